-- in_turn: the heads of some tenants' lines.
-- Takes  :queue, :shares (a JSON list of [priority, tenant, count]), :most (the largest count)
-- Gives  for each share its work rows, in order
SELECT json_group_array(json((
           SELECT json_group_array(json_array(
                      jobs.id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries,
                      worker, claimed_at, created_at, run_at, last_seq, payload, meta))
             FROM (
               SELECT id FROM (
                   SELECT id, row_number() OVER () AS number FROM (
                       SELECT id FROM jobs
                        WHERE queue = :queue AND priority = share.value ->> 0 AND tenant_id = share.value ->> 1
                          AND line IS NOT NULL
                        ORDER BY line, state, id LIMIT :most))
                WHERE number <= share.value ->> 2) AS head
             CROSS JOIN jobs ON jobs.id = head.id)))
  FROM json_each(:shares) AS share
