-- submit_events: the first event of new jobs. Their envelope is not copied: the feed reads it from the job's row.
-- Takes  :first and :last, the new jobs' consecutive ids
INSERT INTO job_events (tenant_id, job_id, job, seq, type, to_state, attempt, retry_count, at)
SELECT tenant_id, job_id, id, 1,
       CASE state WHEN 'queued' THEN {{event queued}} ELSE {{event waiting_approval}} END,
       state, 0, retry_count, created_at
  FROM jobs
 WHERE id BETWEEN :first AND :last
 ORDER BY id
