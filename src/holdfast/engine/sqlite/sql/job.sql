-- job: one job for an operator's move.
-- Takes  :queue, :job_id
-- Gives  no or one work row
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM jobs
 WHERE queue = :queue AND job_id = :job_id
