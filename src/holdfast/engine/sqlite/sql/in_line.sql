-- in_line: who has how many jobs in line, so that tenants can take turns. A window of tenants, in the order of their names.
-- Takes  :queue, :first, :second, :third (priorities in reading order), :after (the window's first is the next by name),
--        :window, :limit (counts end there), :capped (a JSON list of tenants whose leases are to be counted)
-- Gives  [whose turn it is as JSON text or null, [[place in the reading order, tenant, count]…], [[tenant, leases]…]]
WITH RECURSIVE lines (place, priority) AS (
    VALUES (0, :first), (1, :second), (2, :third)),
tenants (place, priority, number, tenant_id) AS (
    SELECT place, priority, 1,
           (SELECT tenant_id FROM jobs
             WHERE queue = :queue AND jobs.priority = lines.priority AND line IS NOT NULL AND tenant_id > :after
             ORDER BY tenant_id LIMIT 1)
      FROM lines
    UNION ALL
    SELECT place, priority, number + 1,
           (SELECT jobs.tenant_id FROM jobs
             WHERE queue = :queue AND jobs.priority = tenants.priority AND line IS NOT NULL
               AND jobs.tenant_id > tenants.tenant_id
             ORDER BY jobs.tenant_id LIMIT 1)
      FROM tenants WHERE tenant_id IS NOT NULL AND number < :window)
SELECT json_array(
    (SELECT turns FROM queues WHERE queue = :queue AND NOT paused),
    (SELECT json_group_array(json_array(place, tenant_id, (
                SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND jobs.priority = tenants.priority AND line IS NOT NULL
                       AND jobs.tenant_id = tenants.tenant_id
                     LIMIT :limit))))
       FROM tenants
      WHERE tenant_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND paused)),
    (SELECT json_group_array(json_array(tenant_id, leases)) FROM (
        SELECT tenant_id, count(*) AS leases FROM jobs
         WHERE queue = :queue AND lease_until IS NOT NULL AND tenant_id IN (SELECT value FROM json_each(:capped))
         GROUP BY tenant_id)))
