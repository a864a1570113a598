-- start_events: jobs are about to be leased from the line, or as retries due in the pending list.
-- Takes  :ids (a JSON list), :worker, :type, :now
INSERT INTO events (job, seq, type, from_state, to_state, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, state, 'running', attempt + 1, retry_count, :worker, :now
  FROM json_each(:ids) AS asked CROSS JOIN jobs ON jobs.id = asked.value
