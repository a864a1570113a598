-- name: get
-- Current jobs by id.
-- Takes  :queue, :ids (a JSON list of job ids), :expired (jobs that finished by then are omitted)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at, schema_fingerprint))
  FROM jobs
 WHERE queue = :queue AND job_id IN (SELECT value FROM json_each(:ids))
   AND (finished_at IS NULL OR finished_at > :expired)

-- name: find
-- Jobs in these states, newest first. One arm per index, so that none reads the whole table.
-- Takes  :queue, :states (a JSON list), :limit, :expired (jobs that finished by then are omitted)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at, schema_fingerprint))
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
-- Which of these jobs have finished.
-- Takes  :pairs (a JSON list of [queue, job id])
-- Gives  a list of [queue, job id]
SELECT json_group_array(json_array(jobs.queue, jobs.job_id))
  FROM json_each(:pairs) AS input
  CROSS JOIN jobs ON jobs.queue = input.value ->> 0 AND jobs.job_id = input.value ->> 1
 WHERE jobs.finished_at IS NOT NULL

-- name: stats
-- Counts of a queue, from the partial indexes alone.
-- Takes  :queue, :now
-- Gives  [states: [[state, count]…], delayed, workers, feed entries, dead letters, unread bytes of the feed (0 without a
--        reader), leases and retries in the pending list, ready and running jobs by tenant: [[tenant, count]…]]
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
-- The workers of some queues and their leases. A worker with a lease is included even if it is not registered.
-- Takes  :queues (a JSON list)
-- Gives  rows of [worker, queue, seen_at, leases], by name
SELECT json_group_array(json_array(worker, queue, seen_at, leases))
  FROM (
    SELECT worker, queue, max(seen_at) AS seen_at, sum(leases) AS leases
      FROM (
        SELECT worker, workers.queue, seen_at, 0 AS leases
          FROM json_each(:queues) AS input CROSS JOIN workers ON workers.queue = input.value
        UNION ALL
        SELECT worker, jobs.queue, max(claimed_at), count(*)
          FROM json_each(:queues) AS input CROSS JOIN jobs ON jobs.queue = input.value
         WHERE lease_expires_at IS NOT NULL AND state = 'running'
         GROUP BY jobs.queue, worker)
     GROUP BY worker, queue
     ORDER BY worker, queue)

-- name: queues
-- Queues that ever had a job, sorted.
-- Gives  a list of names
SELECT json_group_array(queue) FROM (SELECT queue FROM queues WHERE has_jobs ORDER BY queue)

-- name: queue_owners
-- The tenants that own queues.
-- Gives  an object, queue to tenant
SELECT json_group_object(queue, owner_tenant) FROM queues WHERE owner_tenant IS NOT NULL

-- name: notices
-- Notices of some queues after a position.
-- Takes  :queues (a JSON list), :after
-- Gives  a list of [id, queue, kind, job id, at_ms]
SELECT json_group_array(json_array(id, queue, kind, job_id, at_ms))
  FROM (SELECT * FROM notices WHERE id > :after AND queue IN (SELECT value FROM json_each(:queues)) ORDER BY id)

-- name: last_notice
-- The position at which a new listener starts.
-- Gives  [the latest notice's id]
SELECT json_array(coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'notices'), 0))

-- name: insert_notice
-- A notice for listeners in other processes.
-- Takes  :queue, :kind, :job_id, :at
INSERT INTO notices (queue, kind, job_id, at_ms) VALUES (:queue, :kind, :job_id, :at)

-- name: insert_due_notice
-- A notice that a job is due at :at, unless another one is due earlier.
-- Takes  :queue, :at
INSERT INTO notices (queue, kind, at_ms)
SELECT :queue, 'due', :at
 WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND due_at IS NOT NULL AND due_at < :at)

-- name: announced_tasks
-- Tasks that workers have announced.
-- Gives  [[task, fingerprint, queue, priority, schema, seen_at]…]
SELECT json_group_array(json_array(task, fingerprint, queue, priority, schema, seen_at)) FROM announced_tasks
