-- name: get
-- Jobs as they are now.
-- Takes  :queue, :ids (a JSON list of job ids), :expired (jobs that ended by then are gone)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at))
  FROM jobs
 WHERE queue = :queue AND job_id IN (SELECT value FROM json_each(:ids))
   AND (finished_at IS NULL OR finished_at > :expired)

-- name: find
-- Some jobs in these states, the newest first. One arm for each index, so that none reads the whole table.
-- Takes  :queue, :states (a JSON list), :limit, :expired (jobs that ended by then are gone)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at))
  FROM (
    SELECT * FROM jobs
     WHERE id IN (
        SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND ready_seq IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND due_at IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND state IN ({{parked}}) AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND finished_at IS NOT NULL AND finished_at > :expired
               AND state IN (SELECT value FROM json_each(:states))
             ORDER BY finished_at DESC LIMIT :limit))
     ORDER BY id DESC LIMIT :limit)

-- name: finished_among
-- Which of these jobs have ended.
-- Takes  :pairs (a JSON list of [queue, job id])
-- Gives  a list of [queue, job id]
SELECT json_group_array(json_array(jobs.queue, jobs.job_id))
  FROM json_each(:pairs) AS asked
  CROSS JOIN jobs ON jobs.queue = asked.value ->> 0 AND jobs.job_id = asked.value ->> 1
 WHERE jobs.finished_at IS NOT NULL

-- name: stats
-- A queue at one moment, counted in the partial indexes alone.
-- Takes  :queue, :now
-- Gives  [states: [[state, count]…], delayed, workers, feed entries, dead letters, unread bytes of the feed (0 without a
--        reader), leases and retries in the pending list, jobs in line or running by tenant: [[tenant, count]…]]
SELECT json_array(
    (SELECT json_group_array(json_array(state, count)) FROM (
        SELECT state, count(*) AS count FROM jobs WHERE queue = :queue AND ready_seq IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND due_at IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND lease_expires_at IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND state IN ({{parked}}) GROUP BY state)),
    (SELECT count(*) FROM jobs WHERE queue = :queue AND due_at > :now AND state = 'queued'),
    (SELECT count(*) FROM workers WHERE queue = :queue),
    (SELECT count(*) FROM feed_entries WHERE queue = :queue),
    (SELECT count(*) FROM dlq_items WHERE queue = :queue),
    coalesce((SELECT sum(bytes) FROM feed_entries, feed_readers
               WHERE feed_entries.queue = :queue AND feed_readers.queue = :queue
                 AND feed_entries.position > feed_readers.position), 0),
    (SELECT count(*) FROM jobs WHERE queue = :queue AND lease_expires_at IS NOT NULL),
    (SELECT json_group_array(json_array(tenant_id, count)) FROM (
        SELECT tenant_id, sum(count) AS count FROM (
            SELECT tenant_id, count(*) AS count FROM jobs WHERE queue = :queue AND ready_seq IS NOT NULL
             GROUP BY priority, tenant_id
            UNION ALL
            SELECT tenant_id, count(*) FROM jobs
             WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running' GROUP BY tenant_id)
         GROUP BY tenant_id))
)

-- name: workers
-- Who claims from some queues, and how many leases each has. Whoever holds one is there, seen or not.
-- Takes  :queues (a JSON list)
-- Gives  rows of [worker, queue, seen_at, leases], by name
SELECT json_group_array(json_array(worker, queue, seen_at, leases))
  FROM (
    SELECT worker, queue, max(seen_at) AS seen_at, sum(leases) AS leases
      FROM (
        SELECT worker, workers.queue, seen_at, 0 AS leases
          FROM json_each(:queues) AS asked CROSS JOIN workers ON workers.queue = asked.value
        UNION ALL
        SELECT worker, jobs.queue, max(claimed_at), count(*)
          FROM json_each(:queues) AS asked CROSS JOIN jobs ON jobs.queue = asked.value
         WHERE lease_expires_at IS NOT NULL AND state = 'running'
         GROUP BY jobs.queue, worker)
     GROUP BY worker, queue
     ORDER BY worker, queue)

-- name: queues
-- The queues that ever had a job, sorted.
-- Gives  a list of names
SELECT json_group_array(queue) FROM (SELECT queue FROM queues WHERE has_jobs ORDER BY queue)

-- name: notices
-- What happened in some queues since a listener last asked.
-- Takes  :queues (a JSON list), :after
-- Gives  a list of [id, queue, kind, job id, at_ms]
SELECT json_group_array(json_array(id, queue, kind, job_id, at_ms))
  FROM (SELECT * FROM notices WHERE id > :after AND queue IN (SELECT value FROM json_each(:queues)) ORDER BY id)

-- name: last_notice
-- Where a new listener begins.
-- Gives  [the latest notice's id]
SELECT json_array(coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'notices'), 0))

-- name: insert_notice
-- Something that listeners in other processes want to know.
-- Takes  :queue, :kind, :job_id, :at
INSERT INTO notices (queue, kind, job_id, at_ms) VALUES (:queue, :kind, :job_id, :at)

-- name: insert_due_notice
-- A job waits that is due earlier than all others, if that is so.
-- Takes  :queue, :at
INSERT INTO notices (queue, kind, at_ms)
SELECT :queue, 'due', :at
 WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND due_at IS NOT NULL AND due_at < :at)
