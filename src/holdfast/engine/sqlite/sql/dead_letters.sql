-- dead_letters: the record of jobs that were given up (requirement D2); their last move is in the same transaction.
-- Takes  failed_at, acked_at, queue; rows of tenant, dlq id, job id, type, trace id, payload, error_code, error, stack,
--        retry_count, history, fingerprint
INSERT INTO dlq_items (
    failed_at, acked_at, queue, tenant_id, dlq_id, job_id, job_type, trace_id, payload, error_code, error, stack,
    retry_count, history, fingerprint)
SELECT ?, ?, ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11,
       column12
  FROM (VALUES {{rows 12}})
 WHERE column1 IS NOT NULL
