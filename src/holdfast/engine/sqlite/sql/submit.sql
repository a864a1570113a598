-- submit: new jobs of one queue, in order.
-- Takes  created_at, updated_at, queue; rows of job id, tenant, type, state, priority, idempotency key, trace id,
--        dlq id, run_at, line, due_at, meta, payload
INSERT INTO jobs (
    created_at, updated_at, queue, last_seq, job_id, tenant_id, job_type, state, priority, idempotency_key, trace_id,
    dlq_id, run_at, line, due_at, meta, payload)
SELECT ?, ?, ?, 1, column1, column2, column3, column4, column5, column6, column7,
       column8, column9, column10, column11, column12, column13
  FROM (VALUES {{rows 13}})
 WHERE column1 IS NOT NULL
