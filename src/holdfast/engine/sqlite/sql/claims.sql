-- name: ready_queues
-- Queues with jobs to claim. Read outside of a transaction, so that idle workers write nothing.
-- Takes  :queues, a JSON list
-- Gives  for each that is not paused: [queue, has ready jobs, of several tenants in one priority, controls of single
--        tenants as JSON text or null, when its next waiting job is due or null, its concurrency limit or null]
SELECT json_group_array(json_array(
           input.value,
           json(iif(EXISTS (SELECT 1 FROM jobs WHERE queue = input.value AND ready_seq IS NOT NULL), 'true', 'false')),
           json(iif(EXISTS (
               SELECT 1 FROM (VALUES {{each priority}}) AS levels
                WHERE (SELECT tenant_id FROM jobs
                        WHERE queue = input.value AND priority = levels.column1 AND ready_seq IS NOT NULL
                        ORDER BY tenant_id LIMIT 1)
                   <> (SELECT tenant_id FROM jobs
                        WHERE queue = input.value AND priority = levels.column1 AND ready_seq IS NOT NULL
                        ORDER BY tenant_id DESC LIMIT 1)), 'true', 'false')),
           control.tenants,
           (SELECT due_at FROM jobs WHERE queue = input.value AND due_at IS NOT NULL ORDER BY due_at LIMIT 1),
           control.concurrency))
  FROM json_each(:queues) AS input
  LEFT JOIN queues AS control ON control.queue = input.value
 WHERE control.paused IS NOT 1

-- name: claimable
-- The first ready jobs, by priority, if one tenant has all jobs of each priority, which is the common case.
-- Takes  :queue, :limit, :first, :second, :third (priorities in reading order), :concurrency (the queue's limit as last
--        read: nothing is given if it has changed since)
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM (
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :first AND ready_seq IS NOT NULL
         ORDER BY tenant_id, ready_seq, state, id LIMIT :limit)
    UNION ALL
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :second AND ready_seq IS NOT NULL
         ORDER BY tenant_id, ready_seq, state, id LIMIT :limit)
    UNION ALL
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :third AND ready_seq IS NOT NULL
         ORDER BY tenant_id, ready_seq, state, id LIMIT :limit)
    LIMIT :limit)
 WHERE NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND (paused OR concurrency IS NOT :concurrency))

-- name: running_jobs
-- How many jobs of the queue run.
-- Takes  :queue
-- Gives  [count]
SELECT json_array(count(*)) FROM jobs WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running'

-- name: ready_tenants
-- Ready jobs by tenant, for fair shares. A window of tenants, ordered by name.
-- Takes  :queue, :first, :second, :third (priorities in reading order), :after (the window's first is the next by name),
--        :window, :limit (counts stop there), :capped (a JSON list of tenants whose running jobs are counted),
--        :concurrency (as in `claimable`)
-- Gives  [fair shares as JSON text or null, [[rank in the reading order, tenant, count]…], [[tenant, running jobs]…]]
WITH RECURSIVE priorities (rank, priority) AS (
    VALUES (0, :first), (1, :second), (2, :third)),
tenants (rank, priority, number, tenant_id) AS (
    SELECT rank, priority, 1,
           (SELECT tenant_id FROM jobs
             WHERE queue = :queue AND jobs.priority = priorities.priority AND ready_seq IS NOT NULL AND tenant_id > :after
             ORDER BY tenant_id LIMIT 1)
      FROM priorities
    UNION ALL
    SELECT rank, priority, number + 1,
           (SELECT jobs.tenant_id FROM jobs
             WHERE queue = :queue AND jobs.priority = tenants.priority AND ready_seq IS NOT NULL
               AND jobs.tenant_id > tenants.tenant_id
             ORDER BY jobs.tenant_id LIMIT 1)
      FROM tenants WHERE tenant_id IS NOT NULL AND number < :window)
SELECT json_array(
    (SELECT fair_share FROM queues WHERE queue = :queue AND NOT paused),
    (SELECT json_group_array(json_array(rank, tenant_id, (
                SELECT count(*) FROM (
                    SELECT 1 FROM jobs
                     WHERE queue = :queue AND jobs.priority = tenants.priority AND ready_seq IS NOT NULL
                       AND jobs.tenant_id = tenants.tenant_id
                     LIMIT :limit))))
       FROM tenants
      WHERE tenant_id IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND (paused OR concurrency IS NOT :concurrency))),
    (SELECT json_group_array(json_array(tenant_id, leases)) FROM (
        SELECT tenant_id, count(*) AS leases FROM jobs
         WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running'
           AND tenant_id IN (SELECT value FROM json_each(:capped))
         GROUP BY tenant_id)))

-- name: tenant_candidates
-- The first ready jobs of some tenants.
-- Takes  :queue, :shares (a JSON list of [priority, tenant, count]), :most (the largest count)
-- Gives  for each share its work rows, in order
SELECT json_group_array(json((
           SELECT json_group_array(json_array(
                      jobs.id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries,
                      worker, claimed_at, created_at, run_at, last_seq, payload, meta))
             FROM (
               SELECT id FROM (
                   SELECT id, row_number() OVER () AS number FROM (
                       SELECT id FROM jobs
                        WHERE queue = :queue AND priority = share.value ->> 0 AND tenant_id = share.value ->> 1
                          AND ready_seq IS NOT NULL
                        ORDER BY ready_seq, state, id LIMIT :most))
                WHERE number <= share.value ->> 2) AS head
             CROSS JOIN jobs ON jobs.id = head.id)))
  FROM json_each(:shares) AS share

-- name: save_fair_share
-- Save the fair shares.
-- Takes  :queue, :fair_share (JSON text)
INSERT INTO queues (queue, fair_share) VALUES (:queue, :fair_share)
ON CONFLICT (queue) DO UPDATE SET fair_share = excluded.fair_share

-- name: lease_jobs
-- Lease ready jobs, or due retries in the pending list; `early`: jobs that wait for a time, too. The attempt is counted
-- here, not at failure: a worker that dies never reports.
-- Takes  :ids (a JSON list), :worker, :now, :until, :early (0|1)
UPDATE jobs
   SET previous_state = state, state = 'running', attempt = attempt + 1, claim_seq = claim_seq + 1, deliveries = 1, worker = :worker,
       claimed_at = :now, lease_expires_at = :until, ready_seq = NULL, due_at = NULL, next_retry_at = NULL, last_seq = last_seq + 1,
       -- A job that is claimed early does not wait for its time again.
       run_at = min(run_at, :now), updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into running}})
   AND (ready_seq IS NOT NULL OR lease_expires_at <= :now OR :early)

-- name: insert_claimed_events
-- Events of jobs that are about to be leased.
-- Takes  :ids (a JSON list), :worker, :type, :now
INSERT INTO events (job_row, seq, type, from_state, to_state, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, state, 'running', attempt + 1, retry_count, :worker, :now
  FROM json_each(:ids) AS input CROSS JOIN jobs ON jobs.id = input.value

-- name: worker_leases
-- The leases of a worker.
-- Takes  :queue, :worker
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM jobs
 WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running' AND worker = :worker

-- name: leases_by_id
-- The fence and other fields that settle needs, by row.
-- Takes  :ids (a JSON list)
-- Gives  lease rows
SELECT json_group_array(json_array(
           id, queue, job_id, state, claim_seq, deliveries, worker, token, attempt, last_seq, run_at))
  FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids))

-- name: long_expired
-- The queues of leases that had expired at this time.
-- Takes  :ids (a JSON list), :at
-- Gives  queues
SELECT json_group_array(DISTINCT queue) FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_expires_at <= :at

-- name: renew
-- Extend leases.
-- Takes  until; rows of id, claim_seq, deliveries, worker
UPDATE jobs SET lease_expires_at = ?
  FROM (SELECT column1 AS id, column2 AS claim_seq, column3 AS deliveries, column4 AS worker FROM (VALUES {{rows 4}})) AS lease
 WHERE jobs.id = lease.id AND jobs.state = 'running' AND jobs.claim_seq = lease.claim_seq AND jobs.deliveries = lease.deliveries
   AND jobs.worker = lease.worker

-- name: add_heartbeat_seq
-- Advance the event counter of jobs for a heartbeat.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET last_seq = last_seq + 1, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'running'

-- name: insert_heartbeats
-- Heartbeat events of leased jobs.
-- Takes  :ids (a JSON list), :type, :now
INSERT INTO events (job_row, seq, type, attempt, retry_count, worker, at)
SELECT jobs.id, last_seq + 1, :type, attempt, retry_count, worker, :now
  FROM json_each(:ids) AS input CROSS JOIN jobs ON jobs.id = input.value

-- name: touch_worker
-- Record that a worker reads from a queue.
-- Takes  :worker, :queue, :now
INSERT INTO workers (worker, queue, seen_at) VALUES (:worker, :queue, :now)
ON CONFLICT (queue, worker) DO UPDATE SET seen_at = excluded.seen_at

-- name: delete_worker
-- Deregister a worker, unless it has leases.
-- Takes  :worker, :queue
DELETE FROM workers
 WHERE worker = :worker AND queue = :queue AND NOT EXISTS (
    SELECT 1 FROM jobs
     WHERE jobs.queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running' AND jobs.worker = :worker)

-- name: announce_tasks
-- Tasks as a worker has them.
-- Takes  :tasks (a JSON list of [task, fingerprint, queue, priority, schema]), :now
INSERT INTO announced_tasks (task, fingerprint, queue, priority, schema, seen_at)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, :now FROM json_each(:tasks) WHERE true
ON CONFLICT (task, fingerprint) DO UPDATE
   SET queue = excluded.queue, priority = excluded.priority, schema = excluded.schema, seen_at = excluded.seen_at

-- name: delete_old_announcements
-- Schemas of these tasks that were last announced long ago.
-- Takes  :tasks (a JSON list of names), :before
DELETE FROM announced_tasks WHERE task IN (SELECT value FROM json_each(:tasks)) AND seen_at < :before

-- name: last_generation
-- Generation of the latest start of a worker's id.
-- Takes  :queues (a JSON list), :worker_id
-- Gives  [the generation, or 0]
SELECT json_array(coalesce(max(generation), 0)) FROM json_each(:queues) AS input
  JOIN worker_starts ON worker_starts.queue = input.value AND worker_id = :worker_id

-- name: latest_worker_start
-- The start that has a worker's id.
-- Takes  :queue, :worker_id
-- Gives  [generation, worker], or [0, '']
SELECT coalesce((
    SELECT json_array(generation, worker) FROM worker_starts
     WHERE queue = :queue AND worker_id = :worker_id ORDER BY generation DESC, worker DESC LIMIT 1), '[0, ""]')

-- name: keep_worker_start
-- Record that a start was running, and when it was replaced.
-- Takes  :queue, :worker_id, :generation, :worker, :now, :replaced_at
INSERT INTO worker_starts (queue, worker_id, generation, worker, seen_at, replaced_at)
VALUES (:queue, :worker_id, :generation, :worker, :now, :replaced_at)
ON CONFLICT (queue, worker_id, generation, worker) DO UPDATE
   SET seen_at = excluded.seen_at, replaced_at = coalesce(replaced_at, excluded.replaced_at)

-- name: delete_old_worker_starts
-- Delete the starts of a queue that have ended long ago.
-- Takes  :queue, :before
DELETE FROM worker_starts WHERE queue = :queue AND seen_at < :before

-- name: replaced_workers
-- The starts that were replaced while they ran.
-- Takes  :queues (a JSON list), :since
-- Gives  [[id, worker]…]
SELECT json_group_array(json_array(worker_id, worker)) FROM json_each(:queues) AS input
  JOIN worker_starts ON worker_starts.queue = input.value
 WHERE replaced_at > :since
