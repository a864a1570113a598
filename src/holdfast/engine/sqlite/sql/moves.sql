-- name: move
-- Move jobs from one state to another, each only if it is unchanged since the move was decided.
-- Takes  updated_at; rows of id, from_state, claim_seq, deliveries, to_state, attempt, meta, error_code, last_error,
--        error_message, ready_seq, due_at, lease_expires_at, next_retry_at, dlq_id, finished_at, token, last_seq
UPDATE jobs
   SET updated_at = ?, previous_state = state, state = move.to_state, attempt = move.attempt, meta = move.meta,
       -- The last moves of a dead letter keep the error of its last attempt.
       error_code = iif(move.from_state LIKE 'dlq%', jobs.error_code, move.error_code),
       last_error = iif(move.from_state LIKE 'dlq%', jobs.last_error, move.last_error),
       error_message = iif(move.from_state LIKE 'dlq%', jobs.error_message, move.error_message), ready_seq = move.ready_seq, due_at = move.due_at,
       lease_expires_at = move.lease_expires_at, next_retry_at = move.next_retry_at, dlq_id = coalesce(move.dlq_id, jobs.dlq_id),
       finished_at = move.finished_at,
       -- A delayed job keeps its time while it is parked.
       run_at = iif(move.to_state = 'queued', coalesce(move.due_at, jobs.run_at), jobs.run_at), token = coalesce(move.token, jobs.token), last_seq = move.last_seq, worker = NULL
  FROM (
    SELECT column1 AS id, column2 AS from_state, column3 AS claim_seq, column4 AS deliveries, column5 AS to_state,
           column6 AS attempt, column7 AS meta, column8 AS error_code, column9 AS last_error,
           column10 AS error_message, column11 AS ready_seq, column12 AS due_at, column13 AS lease_expires_at,
           column14 AS next_retry_at, column15 AS dlq_id, column16 AS finished_at, column17 AS token,
           column18 AS last_seq
      FROM (VALUES {{rows 18}})) AS move
 WHERE jobs.id = move.id AND jobs.state = move.from_state AND jobs.claim_seq = move.claim_seq
   AND jobs.deliveries = move.deliveries

-- name: insert_events
-- One event per move, in order.
-- Takes  at; rows of the job's row, seq, type, from_state, to_state, attempt, retry_count, worker, message, data
INSERT INTO events (at, job_row, seq, type, from_state, to_state, attempt, retry_count, worker, message, data)
SELECT ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10
  FROM (VALUES {{rows 10}})
 WHERE column1 IS NOT NULL

-- name: insert_dead_letters
-- The record of dead letters (requirement D2), in the same transaction as their last move.
-- Takes  failed_at, acked_at, queue; rows of tenant, dlq id, job id, type, trace id, payload, error_code, error, stack,
--        retry_count, history, fingerprint
INSERT INTO dlq_items (
    failed_at, acked_at, queue, tenant_id, dlq_id, job_id, job_type, trace_id, payload, error_code, error, stack,
    retry_count, history, fingerprint)
SELECT ?, ?, ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11,
       column12
  FROM (VALUES {{rows 12}})
 WHERE column1 IS NOT NULL

-- name: mark_dlq_recorded
-- Mark jobs whose dead letter is written.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET previous_state = state, state = 'dlq_recorded', updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into dlq_recorded}})

-- name: mark_failed
-- Finish jobs whose dead letter is recorded.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET previous_state = state, state = 'failed', updated_at = :now, finished_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into failed}})

-- name: insert_approval_requests
-- Approval requests, in the embedded ledger (requirement A2). An existing one stays unchanged.
-- Takes  requested_at, queue; rows of tenant, approval id, job id, type, name, payload hash, policies, reason, details,
--        quorum, deadline, requested_by
INSERT OR IGNORE INTO approvals (
    requested_at, queue, tenant_id, approval_id, job_id, job_type, name, payload_hash, policies, reason, details, quorum,
    deadline, requested_by)
SELECT ?, ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11, column12
  FROM (VALUES {{rows 12}})
 WHERE column1 IS NOT NULL

-- name: withdraw_approvals
-- Withdraw the pending approval requests of a job that no longer waits. Decided ones stay unchanged.
-- Takes  :tenant, :job_id, :queue, :actor, :reason, :now
UPDATE approvals
   SET status = 'withdrawn', decided_by = :actor, decided_at = :now, decision_reason = :reason, acked_at = :now
 WHERE tenant_id = :tenant AND job_id = :job_id AND queue = :queue AND status = 'requested'

-- name: insert_audit_event
-- An audit event for the feed. It belongs to no job: its `job_row` is 0.
-- Takes  :type, :message, :data (JSON text), :now
INSERT INTO events (job_row, seq, type, attempt, retry_count, message, data, at)
SELECT 0, coalesce(max(seq), 0) + 1, :type, 0, 0, :message, :data, :now FROM events WHERE job_row = 0

-- name: insert_audit_entry
-- An audit entry for the embedded ledger.
-- Takes  :tenant, :id, :type, :actor, :target, :target_id, :queue, :reason, :before, :after (JSON text), :now
INSERT INTO operator_events (tenant_id, id, type, actor, target, target_id, queue, reason, before, after, at)
VALUES (:tenant, :id, :type, :actor, :target, :target_id, :queue, :reason, :before, :after, :now)
