-- events: what happened, one row a move, in order.
-- Takes  at; rows of tenant, job id, the job's row, seq, type, from_state, to_state, attempt, retry_count, worker,
--        message, data
INSERT INTO job_events (
    at, tenant_id, job_id, job, seq, type, from_state, to_state, attempt, retry_count, worker, message, data)
SELECT ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11, column12
  FROM (VALUES {{rows 12}})
 WHERE column1 IS NOT NULL
