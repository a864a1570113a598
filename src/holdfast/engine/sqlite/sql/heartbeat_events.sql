-- heartbeat_events: leased jobs are alive.
-- Takes  :ids (a JSON list), :type, :now
INSERT INTO events (job, seq, type, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, attempt, retry_count, worker, :now
  FROM json_each(:ids) AS asked CROSS JOIN jobs ON jobs.id = asked.value
