-- name: job_for_move
-- One job for an operator's move.
-- Takes  :queue, :job_id
-- Gives  at most one work row
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, claim_seq, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM jobs
 WHERE queue = :queue AND job_id = :job_id

-- name: get_control
-- An operator's controls of a queue.
-- Takes  :queue
-- Gives  [paused, intake paused, concurrency, concurrency of a worker, intake limit, backlog alert, tenants' controls as
--        JSON text; or nulls]
SELECT coalesce(
    (SELECT json_array(
                json(iif(paused, 'true', 'false')), json(iif(intake_paused, 'true', 'false')), concurrency,
                worker_concurrency, intake_limit, backlog_alert, tenants)
       FROM queues WHERE queue = :queue),
    json_array(json('false'), json('false'), NULL, NULL, NULL, NULL, NULL))

-- name: set_control
-- Change an operator's controls of a queue.
-- Takes  :queue, :paused, :intake_paused, :concurrency, :worker_concurrency, :intake_limit, :backlog_alert,
--        :tenants (JSON text)
INSERT INTO queues (queue, paused, intake_paused, concurrency, worker_concurrency, intake_limit, backlog_alert, tenants)
VALUES (:queue, :paused, :intake_paused, :concurrency, :worker_concurrency, :intake_limit, :backlog_alert, :tenants)
ON CONFLICT (queue) DO UPDATE
   SET paused = excluded.paused, intake_paused = excluded.intake_paused, concurrency = excluded.concurrency,
       worker_concurrency = excluded.worker_concurrency, intake_limit = excluded.intake_limit, backlog_alert = excluded.backlog_alert, tenants = excluded.tenants

-- name: expedite
-- Make a waiting job due now.
-- Takes  :id, :now
UPDATE jobs
   SET due_at = min(due_at, :now), lease_expires_at = min(lease_expires_at, :now), run_at = min(run_at, :now),
       next_retry_at = min(next_retry_at, :now), last_seq = last_seq + 1, updated_at = :now
 WHERE id = :id AND (due_at IS NOT NULL OR state = 'retrying' AND lease_expires_at IS NOT NULL)
