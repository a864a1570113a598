-- restore: jobs that were lost, put back under their own ids.
-- Takes  updated_at, place, queue; rows of job id, tenant, type, state, came_from, priority, attempt, idempotency key,
--        trace id, dlq id, run_at, line, due_at, lease_until, next_retry_at, error_code, last_error, error_message,
--        created_at, meta, payload
INSERT INTO jobs (
    updated_at, place, queue, last_seq, job_id, tenant_id, job_type, state, came_from, priority, attempt,
    idempotency_key, trace_id, dlq_id, run_at, line, due_at, lease_until, next_retry_at, error_code, last_error,
    error_message, created_at, meta, payload)
SELECT ?, ?, ?, 1, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11,
       column12, column13, column14, column15, column16, column17, column18, column19, column20, column21
  FROM (VALUES {{rows 21}})
 WHERE column1 IS NOT NULL
