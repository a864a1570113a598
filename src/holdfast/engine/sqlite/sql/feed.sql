-- name: read_feed
-- Entries from a position, each with its events. Data that was not copied comes from the job's row; the data of an audit
-- event (row 0) names its target. An entry whose events were pruned has one row without an event.
-- Takes  :queue, :start, :limit
-- Gives  rows of [position, nonce, urgent, event id or null, type, job id, tenant, at, from_state, to_state, attempt,
--        retry_count, worker, message, data]
SELECT json_group_array(json_array(
           entry.position, entry.nonce, entry.urgent, event.id, event.type,
           iif(event.job_row = 0, iif(event.data ->> 'target' = 'job', event.data ->> 'target_id', ''), jobs.job_id),
           iif(event.job_row = 0, event.data ->> 'tenant_id', jobs.tenant_id), event.at,
           event.from_state, event.to_state, event.attempt, event.retry_count, event.worker, event.message,
           -- As text: otherwise it would be nested.
           ({{event_data}}) || ''))
  FROM (
    SELECT * FROM feed_entries WHERE queue = :queue AND position >= :start ORDER BY position LIMIT :limit) AS entry
  LEFT JOIN events AS event ON event.id BETWEEN entry.first_event AND entry.position
  LEFT JOIN jobs ON jobs.id = event.job_row

-- name: insert_feed_entry
-- One entry for one atomic step of one queue.
-- Takes  :queue, :first, :last (event ids), :nonce, :bytes, :urgent
INSERT INTO feed_entries (queue, position, first_event, nonce, urgent, bytes, total_bytes)
SELECT :queue, :last, :first, :nonce, :urgent, :bytes, :bytes + coalesce((
    SELECT total_bytes FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1), 0)

-- name: trim_detached_feed
-- Keep only the latest entries of a feed that never had a reader.
-- Takes  :queue, :limit
DELETE FROM feed_entries
 WHERE queue = :queue AND NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
   AND position <= (
    SELECT position FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1 OFFSET :limit)

-- name: feeds_after
-- Queues whose feed has an entry after a position.
-- Takes  :positions (a JSON list of [queue, position])
-- Gives  a list of queues
SELECT json_group_array(input.value ->> 0)
  FROM json_each(:positions) AS input
 WHERE EXISTS (
    SELECT 1 FROM feed_entries WHERE queue = input.value ->> 0 AND position > CAST(input.value ->> 1 AS INTEGER))

-- name: seek_feeds
-- The position before the first event of a time or later, in any queue: positions are in the order of commits, whatever
-- the clock did. 0 if more than :limit events follow it.
-- Takes  :at, :limit
-- Gives  [position]
SELECT json_array(CASE WHEN count(*) = :limit AND min(iif(at >= :at, id, NULL)) = min(id) THEN 0
                       ELSE coalesce(min(iif(at >= :at, id, NULL)) - 1, max(id), 0) END)
  FROM (SELECT id, at FROM events ORDER BY id DESC LIMIT :limit)

-- name: dropped_feed_entries
-- Whether entries after a position were dropped from a feed: the running sum of the oldest one kept has them.
-- Takes  :queue, :position
-- Gives  a list: the oldest position, or nothing
SELECT json_group_array(position)
  FROM (SELECT * FROM feed_entries WHERE queue = :queue ORDER BY position LIMIT 1)
 WHERE position > :position AND total_bytes > bytes

-- name: events_by_id
-- Events by id, as in the feed. Without audit events, which belong to no job.
-- Takes  :first, :last
-- Gives  rows of [seq, type, job id, tenant, at, from_state, to_state, attempt, retry_count, worker, message, data]
SELECT json_group_array(json_array(
           seq, type, job_id, tenant_id, at, from_state, to_state, attempt, retry_count, worker, message,
           -- As text: otherwise it would be nested.
           data || ''))
  FROM (SELECT * FROM job_events WHERE id BETWEEN :first AND :last ORDER BY id)

-- name: insert_outbox_events
-- Events for the outbox, in this order. An existing one stays unchanged.
-- Takes  :rows, a JSON list of [tenant, id, destination, topic, key, lane, payload, headers, created_at]
INSERT INTO outbox_events (tenant_id, id, destination, topic, key, lane, payload, headers, created_at)
SELECT row.value ->> 0, row.value ->> 1, row.value ->> 2, row.value ->> 3, row.value ->> 4, row.value ->> 5,
       row.value ->> 6, row.value ->> 7, row.value ->> 8
  FROM json_each(:rows) AS row WHERE true
ON CONFLICT DO NOTHING

-- name: save_reader_position
-- Save the reader's position.
-- Takes  :queue, :position
UPDATE feed_readers SET position = max(position, :position) WHERE queue = :queue

-- name: attach_reader
-- Attach a reader: from now on no unread entry is dropped.
-- Takes  :queue, :now
INSERT OR IGNORE INTO feed_readers (queue, registered_at) VALUES (:queue, :now)

-- name: trim_feed
-- Drop entries before the reader's position. The entry at the position is kept, to prove identity, and a tail before it.
-- Takes  :queue, :position, :tail
DELETE FROM feed_entries
 WHERE queue = :queue AND position < :position
   AND position NOT IN (
    SELECT position FROM feed_entries WHERE queue = :queue AND position < :position ORDER BY position DESC LIMIT :tail)

-- name: has_feed_entry
-- Whether the feed still has an entry.
-- Takes  :queue, :position, :nonce
-- Gives  a list: the position, or nothing
SELECT json_group_array(position) FROM feed_entries
 WHERE queue = :queue AND position = :position AND nonce = :nonce
