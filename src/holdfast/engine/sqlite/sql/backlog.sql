-- backlog: how many jobs are in line or running, as far as a limit wants to know: of a queue, and of some of its tenants.
-- Takes  :queue, :most (the count of the queue ends there), :tenants (a JSON list), :most_each (each tenant's ends there)
-- Gives  [count, [[tenant, count]…]]
SELECT json_array(
    (SELECT count(*) FROM (SELECT 1 FROM jobs WHERE queue = :queue AND line IS NOT NULL LIMIT :most))
  + (SELECT count(*) FROM (
        SELECT 1 FROM jobs WHERE queue = :queue AND lease_until IS NOT NULL AND state = 'running' LIMIT :most)),
    (SELECT json_group_array(json_array(
                tenant.value,
                (SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND priority IN ({{priorities}}) AND tenant_id = tenant.value
                       AND line IS NOT NULL LIMIT :most_each))
              + (SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND lease_until IS NOT NULL AND state = 'running'
                       AND tenant_id = tenant.value LIMIT :most_each))))
       FROM json_each(:tenants) AS tenant))
