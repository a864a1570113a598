-- final: which of these jobs have ended.
-- Takes  :pairs (a JSON list of [queue, job id])
-- Gives  a list of [queue, job id]
SELECT json_group_array(json_array(jobs.queue, jobs.job_id))
  FROM json_each(:pairs) AS asked
  CROSS JOIN jobs ON jobs.queue = asked.value ->> 0 AND jobs.job_id = asked.value ->> 1
 WHERE jobs.finished_at IS NOT NULL
