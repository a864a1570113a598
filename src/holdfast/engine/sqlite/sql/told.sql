-- told: events as the feed tells them, by id. What operators did is in no job's story.
-- Takes  :first, :last
-- Gives  rows of [seq, type, job id, tenant, at, from_state, to_state, attempt, retry_count, worker, message, data]
SELECT json_group_array(json_array(
           seq, type, job_id, tenant_id, at, from_state, to_state, attempt, retry_count, worker, message,
           -- As text: else it would be nested.
           data || ''))
  FROM (SELECT * FROM job_events WHERE id BETWEEN :first AND :last ORDER BY id)
