-- feed: entries from a position on, each with its events. An event's data comes from the job's row where it was not
-- copied; an operator's (row 0) says itself whom it is about. An entry whose events were pruned has one row without an
-- event.
-- Takes  :queue, :start, :limit
-- Gives  rows of [position, nonce, hurry, event id or null, type, job id, tenant, at, from_state, to_state, attempt,
--        retry_count, worker, message, data]
SELECT json_group_array(json_array(
           entry.position, entry.nonce, entry.hurry, event.id, event.type,
           iif(event.job = 0, iif(event.data ->> 'target' = 'job', event.data ->> 'target_id', ''), jobs.job_id),
           iif(event.job = 0, event.data ->> 'tenant_id', jobs.tenant_id), event.at,
           event.from_state, event.to_state, event.attempt, event.retry_count, event.worker, event.message,
           -- As text: else it would be nested.
           ({{event_data}}) || ''))
  FROM (
    SELECT * FROM feed_entries WHERE queue = :queue AND position >= :start ORDER BY position LIMIT :limit) AS entry
  LEFT JOIN events AS event ON event.id BETWEEN entry.first_event AND entry.position
  LEFT JOIN jobs ON jobs.id = event.job
