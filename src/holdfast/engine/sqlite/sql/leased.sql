-- leased: what a worker holds.
-- Takes  :queue, :worker
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM jobs
 WHERE queue = :queue AND lease_until IS NOT NULL AND state = 'running' AND worker = :worker
