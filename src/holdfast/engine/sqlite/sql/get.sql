-- get: jobs as they are now.
-- Takes  :queue, :ids (a JSON list of job ids), :expired (jobs that ended by then are gone)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at))
  FROM jobs
 WHERE queue = :queue AND job_id IN (SELECT value FROM json_each(:ids))
   AND (finished_at IS NULL OR finished_at > :expired)
