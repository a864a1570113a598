-- leases: the fence and what a settle must know, for rows by id.
-- Takes  :ids (a JSON list)
-- Gives  lease rows
SELECT json_group_array(json_array(
           id, queue, job_id, state, place, deliveries, worker, token, attempt, last_seq, run_at))
  FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids))
