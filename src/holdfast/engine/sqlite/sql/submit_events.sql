-- submit_events: the first event of new jobs. Of their envelope only what may change is copied (policy, time): the feed
-- reads the rest from the job's row.
-- Takes  :first and :last, the new jobs' consecutive ids
INSERT INTO events (job, seq, type, to_state, attempt, retry_count, data, at)
SELECT id, 1,
       CASE state WHEN 'queued' THEN {{event queued}} ELSE {{event waiting_approval}} END,
       state, 0, retry_count,
       CASE WHEN run_at IS NOT NULL OR meta IS NOT NULL THEN
           json_patch('{}', json_object('run_at_ms', coalesce(run_at, 0), 'meta', meta)) END,
       created_at
  FROM jobs
 WHERE id BETWEEN :first AND :last
 ORDER BY id
