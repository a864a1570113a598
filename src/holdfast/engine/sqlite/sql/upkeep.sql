-- name: queues_with_expired_leases
-- Queues with leases to reclaim. Read outside of a transaction. Jobs of a paused queue are not reclaimed.
-- Takes  :queues (a JSON list), :now
-- Gives  a list of queues
SELECT json_group_array(input.value)
  FROM json_each(:queues) AS input
 WHERE NOT EXISTS (SELECT 1 FROM queues WHERE queue = input.value AND paused)
   AND EXISTS (SELECT 1 FROM jobs WHERE queue = input.value AND lease_expires_at IS NOT NULL AND lease_expires_at <= :now)

-- name: expired_leases
-- Expired leases without the first `skip`, to choose from. Without payloads, which may be large.
-- Takes  :queue, :now, :skip, :limit
-- Gives  [[id, job id, claim, delivery count, worker]…]
SELECT json_group_array(json_array(id, job_id, claim_seq, deliveries, worker))
  FROM (
    SELECT * FROM jobs
     WHERE queue = :queue AND lease_expires_at IS NOT NULL AND lease_expires_at <= :now AND state = 'running'
     ORDER BY lease_expires_at, id LIMIT :limit OFFSET :skip)

-- name: lost_jobs
-- Of some jobs, those whose leases have expired.
-- Takes  :queue, :now, :ids (a JSON list)
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_expires_at <= :now AND state = 'running'
   AND NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND paused)

-- name: due_retries
-- Due retries in the pending list, without the first `skip`.
-- Takes  :queue, :now, :skip, :limit
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM (
    SELECT * FROM jobs
     WHERE queue = :queue AND lease_expires_at IS NOT NULL AND lease_expires_at <= :now AND state = 'retrying'
       AND NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND paused)
     ORDER BY lease_expires_at, id LIMIT :limit OFFSET :skip)

-- name: leases_of
-- Leases of a worker that have not expired.
-- Takes  :queues (a JSON list), :worker, :now, :limit
-- Gives  a list of ids
SELECT json_group_array(id) FROM (
    SELECT jobs.id FROM json_each(:queues) AS input
      JOIN jobs ON jobs.queue = input.value AND jobs.lease_expires_at > :now
     WHERE jobs.state = 'running' AND jobs.worker = :worker
     LIMIT :limit)

-- name: expire_leases
-- Let leases expire now.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET lease_expires_at = :now, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids))

-- name: running_by_tenant
-- How many jobs of each tenant run.
-- Takes  :queue
-- Gives  [[tenant, count]…]
SELECT json_group_array(json_array(tenant_id, leases)) FROM (
    SELECT tenant_id, count(*) AS leases FROM jobs
     WHERE queue = :queue AND lease_expires_at IS NOT NULL AND state = 'running'
     GROUP BY tenant_id)

-- name: requeue_retries
-- Make due retries in the pending list ready, ordered by due time.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET ready_seq = lease_expires_at, lease_expires_at = NULL, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'retrying' AND lease_expires_at <= :now

-- name: reclaim
-- Claim expired leases for another worker.
-- Takes  :ids (a JSON list), :worker, :now, :until
UPDATE jobs
   SET attempt = attempt + 1, deliveries = deliveries + 1, worker = :worker, claimed_at = :now, lease_expires_at = :until,
       last_seq = last_seq + 1, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'running' AND lease_expires_at <= :now

-- name: promote
-- Make due jobs ready, ordered by due time.
-- Takes  :queue, :now, :limit
UPDATE jobs SET ready_seq = due_at, due_at = NULL, updated_at = :now
 WHERE id IN (
    SELECT id FROM jobs
     WHERE queue = :queue AND due_at IS NOT NULL AND due_at <= :now
     ORDER BY due_at LIMIT :limit)

-- name: next_due
-- When the next waiting job is due.
-- Takes  :queues, a JSON list
-- Gives  [the earliest instant or null]
SELECT json_array(min((
           SELECT due_at FROM jobs WHERE queue = input.value AND due_at IS NOT NULL ORDER BY due_at LIMIT 1)))
  FROM json_each(:queues) AS input

-- name: expired_jobs
-- Finished jobs past their retention that nothing refers to. Read by a reader: it may have to skip many.
-- Takes  :queue, :before, :limit
-- Gives  a list of ids
SELECT json_group_array(id)
  FROM (
    SELECT id FROM jobs
     WHERE queue = :queue AND finished_at IS NOT NULL AND finished_at <= :before AND {{prunable}}
     ORDER BY finished_at LIMIT :limit)

-- name: prunable_jobs
-- Which of some finished jobs nothing refers to.
-- Takes  :queue, :before, :ids (a JSON list)
-- Gives  a list of ids
SELECT json_group_array(id) FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL AND finished_at <= :before
   AND queue = :queue AND {{prunable}}

-- name: delete_idle_workers
-- Delete idle workers without leases.
-- Takes  :queue, :before
DELETE FROM workers
 WHERE queue = :queue AND seen_at < :before AND NOT EXISTS (
    SELECT 1 FROM jobs
     WHERE jobs.queue = workers.queue AND lease_expires_at IS NOT NULL AND state = 'running' AND jobs.worker = workers.worker)

-- name: prune_anomalies
-- Delete the anomalies of jobs to prune. Runs before `prune_jobs`.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM anomalies
 WHERE (tenant_id, job_id, queue) IN (
    SELECT tenant_id, job_id, queue FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)))

-- name: prune_approvals
-- Delete the approvals of jobs to prune. Runs before `prune_jobs`.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM approvals
 WHERE (tenant_id, job_id, queue) IN (
    SELECT tenant_id, job_id, queue FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)))

-- name: prune_audit_events
-- Delete audit events past their retention that no reader needs.
-- Takes  :queue, :before, :limit
DELETE FROM events
 WHERE id IN (
    SELECT id FROM events
     WHERE job_row = 0 AND at <= :before AND data ->> 'queue' = :queue
       AND (NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
            OR id < coalesce((SELECT min(first_event) FROM feed_entries WHERE queue = :queue), 9223372036854775807))
     ORDER BY seq LIMIT :limit)

-- name: prune_effects
-- Delete expired keys of effects that are done. Keys that are reserved or in doubt stay.
-- Takes  :now, :limit
DELETE FROM idempotency_keys
 WHERE (tenant_id, key) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM idempotency_keys WHERE expires_at IS NOT NULL
        UNION ALL
        SELECT (SELECT min(idempotency_keys.tenant_id) FROM idempotency_keys
                 WHERE expires_at IS NOT NULL AND idempotency_keys.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.key
      FROM tenants CROSS JOIN idempotency_keys AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.expires_at IS NOT NULL AND old.expires_at <= :now AND old.state = 'done'
     LIMIT :limit)

-- name: prune_events
-- Delete the events of pruned jobs.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM events WHERE job_row IN (SELECT value FROM json_each(:ids))

-- name: prune_executions
-- Delete executions past their retention.
-- Takes  :before, :limit
DELETE FROM queue_executions
 WHERE (tenant_id, id) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM queue_executions
        UNION ALL
        SELECT (SELECT min(queue_executions.tenant_id) FROM queue_executions
                 WHERE queue_executions.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.id
      FROM tenants CROSS JOIN queue_executions AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.started_at <= :before
     LIMIT :limit)

-- name: prune_feed
-- Delete feed entries whose events were all pruned.
-- Takes  :queue
DELETE FROM feed_entries
 WHERE queue = :queue AND NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
   AND position < coalesce((SELECT min(id) FROM events), 0)

-- name: prune_jobs
-- Delete finished jobs.
-- Takes  :ids (a JSON list)
DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL

-- name: prune_keys
-- Delete keys past their window, unless their job is still open.
-- Takes  :queue, :now, :limit
DELETE FROM submission_keys
 WHERE (tenant_id, queue, key) IN (
    SELECT tenant_id, queue, key FROM submission_keys AS old
     WHERE old.queue = :queue AND old.expires_at <= :now AND NOT EXISTS (
        SELECT 1 FROM jobs WHERE jobs.queue = old.queue AND jobs.job_id = old.job_id AND finished_at IS NULL)
     LIMIT :limit)

-- name: prune_dead_letters
-- Delete the closed dead letters of jobs to prune. Runs before `prune_jobs`.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM dlq_items
 WHERE (tenant_id, job_id, queue) IN (
    SELECT tenant_id, job_id, queue FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)))

-- name: prune_audit_entries
-- Delete audit entries past their retention.
-- Takes  :before, :limit
DELETE FROM operator_events
 WHERE (tenant_id, id) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM operator_events
        UNION ALL
        SELECT (SELECT min(operator_events.tenant_id) FROM operator_events
                 WHERE operator_events.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.id
      FROM tenants CROSS JOIN operator_events AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.at <= :before
     LIMIT :limit)

-- name: prune_notices
-- Keep only the latest notices.
-- Takes  :keep
DELETE FROM notices WHERE id <= (SELECT max(id) FROM notices) - :keep

-- name: prune_outbox
-- Delete sent events past their retention. Pending and dead ones stay.
-- Takes  :before, :limit
DELETE FROM outbox_events
 WHERE position IN (
    SELECT position FROM outbox_events WHERE status = 'SENT' AND sent_at <= :before ORDER BY sent_at LIMIT :limit)

-- name: prune_steps
-- Delete the steps of jobs to prune. Runs before `prune_jobs`.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM job_steps
 WHERE (tenant_id, job_id, queue) IN (
    SELECT tenant_id, job_id, queue FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)))

-- name: prune_votes
-- Delete the votes on jobs to prune. Runs before `prune_approvals`.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM approval_votes
 WHERE (tenant_id, approval_id) IN (
    SELECT approvals.tenant_id, approvals.approval_id
      FROM json_each(:ids) AS input CROSS JOIN jobs ON jobs.id = input.value
      CROSS JOIN approvals
        ON approvals.tenant_id = jobs.tenant_id AND approvals.job_id = jobs.job_id AND approvals.queue = jobs.queue)

-- name: snapshot
-- Which of some jobs are unknown, and where the feed ends, in one atomic step.
-- Takes  :queue, :ids (a JSON list of job ids)
-- Gives  [ids, position or null, nonce or null]
SELECT json_array(
    (SELECT json_group_array(input.value) FROM json_each(:ids) AS input
      WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND job_id = input.value)),
    (SELECT position FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1),
    (SELECT nonce FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1))

-- name: insert_restored_jobs
-- Restore lost jobs under their ids.
-- Takes  updated_at, claim_seq, queue; rows of job id, tenant, type, state, previous_state, priority, attempt, idempotency key,
--        trace id, dlq id, run_at, ready_seq, due_at, lease_expires_at, next_retry_at, error_code, last_error, error_message,
--        created_at, meta, payload
INSERT INTO jobs (
    updated_at, claim_seq, queue, last_seq, job_id, tenant_id, job_type, state, previous_state, priority, attempt,
    idempotency_key, trace_id, dlq_id, run_at, ready_seq, due_at, lease_expires_at, next_retry_at, error_code, last_error,
    error_message, created_at, meta, payload)
SELECT ?, ?, ?, 1, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11,
       column12, column13, column14, column15, column16, column17, column18, column19, column20, column21
  FROM (VALUES {{rows 21}})
 WHERE column1 IS NOT NULL

-- name: restore_keys
-- Restore keys from a ledger. Existing keys stay, but the key of the same job expires no later than given.
-- Takes  queue; rows of tenant, key, job id, expires_at, fingerprint
INSERT INTO submission_keys (queue, tenant_id, key, job_id, expires_at, fingerprint)
SELECT ?, column1, column2, column3, column4, column5
  FROM (VALUES {{rows 5}})
 WHERE column1 IS NOT NULL
    ON CONFLICT DO UPDATE SET expires_at = min(expires_at, excluded.expires_at) WHERE job_id = excluded.job_id
