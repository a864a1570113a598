-- name: intake_state
-- What must be known before jobs are accepted into a queue.
-- Takes  :queue, :now, :ttl (ms that a finished job is known by its id); :names, a JSON list of job ids and idempotency keys alike;
--        :tenants, a JSON list
-- Gives  [[intake paused, intake limit or null, tenants' controls as JSON text or null, has jobs] or null, whether the feed has a
--        reader, its unread bytes or null, jobs, keys]
--        jobs: [job id, tenant, has no key, finished longer ago than that]; keys: [tenant, key, job id, fingerprint, expired]
SELECT json_array(
    json((SELECT json_array(intake_paused, intake_limit, tenants, has_jobs) FROM queues WHERE queue = :queue)),
    EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue),
    (SELECT (SELECT total_bytes FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1)
          - coalesce(
                (SELECT total_bytes FROM feed_entries AS read
                  WHERE read.queue = :queue AND read.position <= feed_readers.position
                  ORDER BY read.position DESC LIMIT 1),
                (SELECT total_bytes - bytes FROM feed_entries WHERE queue = :queue ORDER BY position LIMIT 1))
       FROM feed_readers WHERE queue = :queue),
    (SELECT json_group_array(json_array(
                job_id, tenant_id, json(iif(idempotency_key = '', 'true', 'false')),
                json(iif(finished_at IS NOT NULL AND finished_at + :ttl <= :now, 'true', 'false'))))
       FROM jobs
      WHERE queue = :queue AND job_id IN (SELECT value FROM json_each(:names))),
    (SELECT json_group_array(json_array(
                tenant_id, key, job_id, fingerprint,
                json(iif(expires_at <= :now AND NOT EXISTS (
                    SELECT 1 FROM jobs
                     WHERE jobs.queue = submission_keys.queue AND jobs.job_id = submission_keys.job_id
                       AND finished_at IS NULL), 'true', 'false'))))
       FROM submission_keys
      WHERE tenant_id IN (SELECT value FROM json_each(:tenants)) AND queue = :queue
        AND key IN (SELECT value FROM json_each(:names)))
)

-- name: insert_jobs
-- New jobs of one queue, in order.
-- Takes  created_at, updated_at, queue; rows of job id, tenant, type, state, priority, idempotency key, trace id,
--        dlq id, run_at, ready_seq, due_at, meta, payload, schema fingerprint
INSERT INTO jobs (
    created_at, updated_at, queue, last_seq, job_id, tenant_id, job_type, state, priority, idempotency_key, trace_id,
    dlq_id, run_at, ready_seq, due_at, meta, payload, schema_fingerprint)
SELECT ?, ?, ?, 1, column1, column2, column3, column4, column5, column6, column7,
       column8, column9, column10, column11, column12, column13, column14
  FROM (VALUES {{rows 14}})
 WHERE column1 IS NOT NULL

-- name: insert_created_events
-- The first event of new jobs. Only what may change is copied from the envelope (policy, time): the feed reads the rest
-- from the job's row.
-- Takes  :first and :last, the new jobs' consecutive ids
INSERT INTO events (job_row, seq, type, to_state, attempt, retry_count, data, at)
SELECT id, 1,
       CASE state WHEN 'queued' THEN {{event queued}} ELSE {{event waiting_approval}} END,
       state, 0, retry_count,
       CASE WHEN run_at IS NOT NULL OR meta IS NOT NULL THEN
           json_patch('{}', json_object('run_at_ms', coalesce(run_at, 0), 'meta', meta)) END,
       created_at
  FROM jobs
 WHERE id BETWEEN :first AND :last
 ORDER BY id

-- name: insert_submission_keys
-- The first job under each key; an expired entry is replaced.
-- Takes  queue; rows of tenant, key, job id, expires_at, fingerprint
INSERT OR REPLACE INTO submission_keys (queue, tenant_id, key, job_id, expires_at, fingerprint)
SELECT ?, column1, column2, column3, column4, column5
  FROM (VALUES {{rows 5}})
 WHERE column1 IS NOT NULL

-- name: insert_duplicate_event
-- Record a request that was dropped because the job has its idempotency key.
-- Takes  :queue, :tenant, :job_id, :type, :message, :data, :now
INSERT INTO events (job_row, seq, type, attempt, retry_count, message, data, at)
SELECT id, last_seq + 1, :type, attempt, retry_count, :message, :data, :now
  FROM jobs
 WHERE queue = :queue AND job_id = :job_id AND tenant_id = :tenant

-- name: add_duplicate_seq
-- Advance the event counter of the job.
-- Takes  :queue, :tenant, :job_id, :now
UPDATE jobs SET last_seq = last_seq + 1, updated_at = :now
 WHERE queue = :queue AND job_id = :job_id AND tenant_id = :tenant

-- name: count_backlog
-- Ready and running jobs of a queue and of some of its tenants, counted up to a limit.
-- Takes  :queue, :most (the count of the queue stops there), :tenants (a JSON list), :most_each (each tenant's count stops there)
-- Gives  [count, [[tenant, count]…]]
SELECT json_array(
    (SELECT count(*) FROM (SELECT 1 FROM jobs WHERE queue = :queue AND ready_seq IS NOT NULL LIMIT :most))
  + (SELECT count(*) FROM (
        SELECT 1 FROM jobs WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running' LIMIT :most)),
    (SELECT json_group_array(json_array(
                tenant.value,
                (SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND priority IN ({{priorities}}) AND tenant_id = tenant.value
                       AND ready_seq IS NOT NULL LIMIT :most_each))
              + (SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running'
                       AND tenant_id = tenant.value LIMIT :most_each))))
       FROM json_each(:tenants) AS tenant))

-- name: first_tenant_with_room
-- The first of some tenants that owns fewer queues than the limit.
-- Takes  :tenants (a JSON list), :limit
-- Gives  a list of at most one tenant
SELECT json_group_array(value)
  FROM (SELECT value
          FROM json_each(:tenants)
         WHERE (SELECT count(*) FROM queues WHERE owner_tenant = value) < :limit
         ORDER BY key LIMIT 1)

-- name: add_queue
-- Mark a queue as used, by its owner.
-- Takes  :queue, :owner (or null)
INSERT INTO queues (queue, has_jobs, owner_tenant) VALUES (:queue, 1, :owner)
ON CONFLICT (queue) DO UPDATE SET has_jobs = 1, owner_tenant = coalesce(owner_tenant, :owner)

-- name: mark_queue_used
-- Mark the queue as used.
-- Takes  :queue
INSERT INTO queues (queue, has_jobs) VALUES (:queue, 1)
ON CONFLICT (queue) DO UPDATE SET has_jobs = 1 WHERE has_jobs = 0
