-- name: read_feed
-- Entries from a position on, each with its events. An event's data comes from the job's row where it was not
-- copied; an operator's (row 0) says itself whom it is about. An entry whose events were pruned has one row without an
-- event.
-- Takes  :queue, :start, :limit
-- Gives  rows of [position, nonce, urgent, event id or null, type, job id, tenant, at, from_state, to_state, attempt,
--        retry_count, worker, message, data]
SELECT json_group_array(json_array(
           entry.position, entry.nonce, entry.urgent, event.id, event.type,
           iif(event.job_row = 0, iif(event.data ->> 'target' = 'job', event.data ->> 'target_id', ''), jobs.job_id),
           iif(event.job_row = 0, event.data ->> 'tenant_id', jobs.tenant_id), event.at,
           event.from_state, event.to_state, event.attempt, event.retry_count, event.worker, event.message,
           -- As text: else it would be nested.
           ({{event_data}}) || ''))
  FROM (
    SELECT * FROM feed_entries WHERE queue = :queue AND position >= :start ORDER BY position LIMIT :limit) AS entry
  LEFT JOIN events AS event ON event.id BETWEEN entry.first_event AND entry.position
  LEFT JOIN jobs ON jobs.id = event.job_row

-- name: insert_feed_entry
-- One atomic step of one queue for the ledger's reader.
-- Takes  :queue, :first, :last (event ids), :nonce, :bytes, :urgent
INSERT INTO feed_entries (queue, position, first_event, nonce, urgent, bytes, total_bytes)
SELECT :queue, :last, :first, :nonce, :urgent, :bytes, :bytes + coalesce((
    SELECT total_bytes FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1), 0)

-- name: trim_detached_feed
-- While no reader has ever registered the feed keeps only its latest entries.
-- Takes  :queue, :limit
DELETE FROM feed_entries
 WHERE queue = :queue AND NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
   AND position <= (
    SELECT position FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1 OFFSET :limit)

-- name: feeds_after
-- Queues whose feed has an entry after a position.
-- Takes  :positions (a JSON list of [queue, position])
-- Gives  a list of queues
SELECT json_group_array(asked.value ->> 0)
  FROM json_each(:positions) AS asked
 WHERE EXISTS (
    SELECT 1 FROM feed_entries WHERE queue = asked.value ->> 0 AND position > CAST(asked.value ->> 1 AS INTEGER))

-- name: events_by_id
-- Events as the feed tells them, by id. What operators did is in no job's story.
-- Takes  :first, :last
-- Gives  rows of [seq, type, job id, tenant, at, from_state, to_state, attempt, retry_count, worker, message, data]
SELECT json_group_array(json_array(
           seq, type, job_id, tenant_id, at, from_state, to_state, attempt, retry_count, worker, message,
           -- As text: else it would be nested.
           data || ''))
  FROM (SELECT * FROM job_events WHERE id BETWEEN :first AND :last ORDER BY id)

-- name: insert_outbox_events
-- Events for the outbox, in this order. One that is there already is left as it is.
-- Takes  :rows, a JSON list of [tenant, id, destination, topic, key, lane, payload, headers, created_at]
INSERT INTO outbox_events (tenant_id, id, destination, topic, key, lane, payload, headers, created_at)
SELECT row.value ->> 0, row.value ->> 1, row.value ->> 2, row.value ->> 3, row.value ->> 4, row.value ->> 5,
       row.value ->> 6, row.value ->> 7, row.value ->> 8
  FROM json_each(:rows) AS row WHERE true
ON CONFLICT DO NOTHING

-- name: save_reader_position
-- How far the reader has come.
-- Takes  :queue, :position
UPDATE feed_readers SET position = max(position, :position) WHERE queue = :queue

-- name: attach_reader
-- From now on nothing unread is dropped.
-- Takes  :queue, :now
INSERT OR IGNORE INTO feed_readers (queue, registered_at) VALUES (:queue, :now)

-- name: trim_feed
-- The reader has everything before a position; the entry at it is kept, to prove identity, and a tail before it.
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
