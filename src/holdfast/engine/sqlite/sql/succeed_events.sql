-- succeed_events: jobs are about to succeed. Their result is not copied: the feed reads it from the job's row.
-- Takes  :ids (a JSON list), :type, :now
INSERT INTO events (job, seq, type, from_state, to_state, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, state, 'succeeded', attempt, retry_count, worker, :now
  FROM json_each(:ids) AS asked CROSS JOIN jobs ON jobs.id = asked.value
