-- feed: entries after a position, each with its events. An event's data comes from the job's row where it was not copied.
-- Takes  :queue, :after, :limit
-- Gives  rows of [position, nonce, event id or null, type, job id, at, from_state, to_state, attempt, retry_count, worker,
--        message, data, job: null or [type, payload, queue, tenant, idempotency key, trace id, priority, meta, run_at,
--        result]]
SELECT json_group_array(json_array(
           entry.position, entry.nonce, event.id, event.type, event.job_id, event.at, event.from_state, event.to_state,
           event.attempt, event.retry_count, event.worker, event.message, event.data,
           iif(jobs.id IS NULL, NULL, json_array(
               jobs.job_type, jobs.payload, jobs.queue, jobs.tenant_id, jobs.idempotency_key, jobs.trace_id,
               jobs.priority, jobs.meta, jobs.run_at, jobs.result))))
  FROM (
    SELECT * FROM feed_entries WHERE queue = :queue AND position > :after ORDER BY position LIMIT :limit) AS entry
  LEFT JOIN job_events AS event ON event.id BETWEEN entry.first_event AND entry.position
  LEFT JOIN jobs ON jobs.id = event.job AND (event.from_state IS NULL OR event.to_state = 'succeeded')
