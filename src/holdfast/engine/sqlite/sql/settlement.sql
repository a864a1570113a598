-- name: succeed
-- Settle leased jobs as succeeded.
-- Takes  finished_at, updated_at; rows of id, claim_seq, deliveries, worker, result, meta, token
UPDATE jobs
   SET previous_state = state, state = 'succeeded', finished_at = ?, updated_at = ?, result = done.result, meta = done.meta, token = done.token,
       lease_expires_at = NULL, worker = NULL, error_code = NULL, last_error = NULL, error_message = NULL,
       last_seq = last_seq + 1
  FROM (
    SELECT column1 AS id, column2 AS claim_seq, column3 AS deliveries, column4 AS worker, column5 AS result,
           column6 AS meta, column7 AS token
      FROM (VALUES {{rows 7}})) AS done
 WHERE jobs.id = done.id AND jobs.state = 'running' AND jobs.claim_seq = done.claim_seq
   AND jobs.deliveries = done.deliveries AND jobs.worker = done.worker

-- name: insert_succeeded_events
-- Events of jobs that are about to succeed. The result is not copied: the feed reads it from the job's row.
-- Takes  :ids (a JSON list), :type, :now
INSERT INTO events (job_row, seq, type, from_state, to_state, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, state, 'succeeded', attempt, retry_count, worker, :now
  FROM json_each(:ids) AS input CROSS JOIN jobs ON jobs.id = input.value
