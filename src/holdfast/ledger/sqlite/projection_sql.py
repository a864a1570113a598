"""The projection's SQL for SQLite: lease on a feed, position, and bulk rows from one JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.core.publishing import PUBLISHED_COLUMNS
from holdfast.ledger.fold_events import (
    APPROVAL_REQUEST_COLUMNS,
    AUDIT_COLUMNS,
    CLOSING_COLUMNS,
    UNKNOWN_PAYLOAD,
    UNKNOWN_TASK,
)
from holdfast.ledger.fold_rows import ANOMALY_COLUMNS, EVENT_COLUMNS, JOB_COLUMNS


def _fields(names: Iterable[str]) -> str:
    """Columns of the rows in a JSON text."""
    return ", ".join(f"row.value ->> {number} AS {name}" for number, name in enumerate(names))


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) SELECT {_fields(columns)} FROM json_each(?) AS row"  # noqa: S608


LEASE_FEED: Final = """
INSERT INTO feed_positions AS p (feed, position, nonce, projector, lease_expires_at, updated_at)
VALUES (:queue, '', '', :projector, :until, :now)
ON CONFLICT (feed) DO UPDATE SET projector = excluded.projector, lease_expires_at = excluded.lease_expires_at
 WHERE p.projector IS NULL OR p.projector = excluded.projector OR p.lease_expires_at IS NULL
    OR p.lease_expires_at < :now
RETURNING position, nonce"""

RENEW_LEASES: Final = """
UPDATE feed_positions SET lease_expires_at = :until
 WHERE feed IN (SELECT row.value FROM json_each(:queues) AS row) AND projector = :projector
RETURNING feed, position, nonce"""

LEASED_FEEDS: Final = """
SELECT json_group_array(feed) FROM feed_positions
 WHERE feed IN (SELECT row.value FROM json_each(:queues) AS row)
   AND projector <> :projector AND lease_expires_at >= :now"""

RELEASE: Final = "UPDATE feed_positions SET projector = NULL, lease_expires_at = NULL WHERE feed = ? AND projector = ?"

FIRST: Final = """
INSERT INTO feed_positions (feed, position, nonce, updated_at) VALUES (?, '', '', ?) ON CONFLICT DO NOTHING"""

MOVE: Final = """
UPDATE feed_positions
   SET position = :position, nonce = :nonce, projector = :projector, lease_expires_at = :until, updated_at = :now
 WHERE feed = :queue AND position = :old_position AND nonce = :old_nonce AND engine_epoch = :epoch"""

ENGINE_EPOCH: Final = "SELECT engine_epoch FROM feed_positions WHERE feed = ?"

BEGIN_EPOCH: Final = """
UPDATE feed_positions SET engine_epoch = :epoch WHERE feed = :queue AND engine_epoch = :expected
RETURNING position, nonce"""

ENTRIES: Final = """
INSERT INTO feed_entries (feed, position, nonce, at)
SELECT :queue, row.value ->> 0, row.value ->> 1, :now FROM json_each(:rows) AS row WHERE true
ON CONFLICT DO NOTHING"""

INSERT_JOBS: Final = _insert("jobs", JOB_COLUMNS)
INSERT_EVENTS: Final = _insert("job_events", EVENT_COLUMNS)
INSERT_ANOMALIES: Final = _insert("anomalies", ANOMALY_COLUMNS)
#: Job events for the outbox, in this order.
PUBLISH: Final = f"{_insert('outbox_events', PUBLISHED_COLUMNS)} WHERE true ON CONFLICT DO NOTHING"

NOTE: Final = """
UPDATE jobs SET last_seq = last_seq + u.n
  FROM (SELECT row.value ->> 0 AS tenant_id, row.value ->> 1 AS job_id, row.value ->> 2 AS n
          FROM json_each(:rows) AS row) AS u
 WHERE jobs.tenant_id = u.tenant_id AND jobs.job_id = u.job_id AND jobs.queue = :queue"""

CHANGED: Final = (
    "job_id",
    "at",
    "tenant_id",
    "n",
    "came_from",
    "attempt_was",
    "retries_were",
    "attempt",
    "retry_count",
    "state",
    "finished_at",
    "worker",
    "result",
    "next_retry_at",
    "run_at",
    "dlq_id",
    "keeps_errors",
    "error_code",
    "last_error",
    "error_message",
)
CHANGE: Final = f"""
UPDATE jobs
   SET last_seq = jobs.last_seq + u.n, state = u.state, attempt = u.attempt, retry_count = u.retry_count,
       updated_at = u.at, finished_at = u.finished_at, worker = u.worker, result = u.result,
       next_retry_at = u.next_retry_at, run_at = coalesce(u.run_at, jobs.run_at),
       dlq_id = coalesce(u.dlq_id, jobs.dlq_id),
       error_code = iif(u.keeps_errors, jobs.error_code, u.error_code),
       last_error = iif(u.keeps_errors, jobs.last_error, u.last_error),
       error_message = iif(u.keeps_errors, jobs.error_message, u.error_message)
  FROM (SELECT {_fields(CHANGED)} FROM json_each(:rows) AS row) AS u
 WHERE jobs.tenant_id = u.tenant_id AND jobs.job_id = u.job_id AND jobs.queue = :queue AND jobs.state = u.came_from
"""  # noqa: S608 - constants

#: Runs before the batch's other updates of these jobs: they may have moved since.
EXPEDITE: Final = """
UPDATE jobs
   SET run_at = min(jobs.run_at, u.at), next_retry_at = min(jobs.next_retry_at, u.at), updated_at = u.at
  FROM (SELECT row.value ->> 0 AS tenant_id, row.value ->> 1 AS job_id, row.value ->> 2 AS at
          FROM json_each(:rows) AS row) AS u
 WHERE jobs.tenant_id = u.tenant_id AND jobs.job_id = u.job_id AND jobs.queue = :queue AND jobs.finished_at IS NULL"""

READ_JOBS: Final = """
SELECT json_group_array(json_array(row.key, jobs.state, jobs.last_seq, jobs.attempt, jobs.retry_count))
  FROM json_each(:names) AS row CROSS JOIN jobs
    ON jobs.tenant_id = row.value ->> 0 AND jobs.job_id = row.value ->> 1 AND jobs.queue = :queue"""

#: A job whose creation event was lost or refused cannot be restored, so it does not count as recorded.
PRESENT: Final = f"""
SELECT json_group_array(json_array(row.key))
  FROM json_each(:names) AS row CROSS JOIN jobs
    ON jobs.tenant_id = row.value ->> 0 AND jobs.job_id = row.value ->> 1 AND jobs.queue = :queue
 WHERE NOT (jobs.job_type = '{UNKNOWN_TASK}' AND jobs.payload = '{UNKNOWN_PAYLOAD}')"""  # noqa: S608

HISTORIES: Final = """
SELECT json_group_array(
    json_array(place, job_type, type, from_state, to_state, attempt, worker, message, data, at)
) FROM (
    SELECT row.key AS place, j.job_type, e.* FROM json_each(:names) AS row CROSS JOIN jobs AS j
        ON j.tenant_id = row.value ->> 0 AND j.job_id = row.value ->> 1 AND j.queue = :queue CROSS JOIN job_events AS e
        ON e.tenant_id = j.tenant_id AND e.job_id = j.job_id AND e.queue = j.queue
     ORDER BY row.key, e.seq)"""

#: Not a second time: a request is made once, and may have been decided.
INSERT_APPROVALS: Final = f"""
INSERT INTO approvals (queue, job_type, {", ".join(APPROVAL_REQUEST_COLUMNS)})
SELECT jobs.queue, jobs.job_type, {_fields(APPROVAL_REQUEST_COLUMNS)}
  FROM json_each(:rows) AS row CROSS JOIN jobs
    ON jobs.tenant_id = row.value ->> 0 AND jobs.job_id = row.value ->> 1 AND jobs.queue = :queue
 WHERE true
ON CONFLICT DO NOTHING"""  # noqa: S608

#: Their jobs have continued, so there is nothing to deliver: `acked_at` is set.
CLOSE_APPROVALS: Final = f"""
UPDATE approvals
   SET status = u.status, decided_by = u.decided_by, decided_at = u.at, decision_reason = u.decision_reason,
       acked_at = u.at
  FROM (SELECT {_fields(CLOSING_COLUMNS)} FROM json_each(:rows) AS row) AS u
 WHERE approvals.tenant_id = u.tenant_id AND approvals.job_id = u.job_id AND approvals.queue = :queue
   AND approvals.status = 'requested' AND approvals.approval_id <> u.stays"""  # noqa: S608

INSERT_AUDIT: Final = f"{_insert('operator_events', AUDIT_COLUMNS)} WHERE true ON CONFLICT DO NOTHING"

#: A job that is dead-lettered twice (after a fork) has one dead letter, the last. A dead letter that is written again
#: (the engine lost its confirmation) keeps what operators decided about it.
INSERT_DEAD_LETTERS: Final = """
INSERT INTO dlq_items (
    tenant_id, dlq_id, job_id, queue, job_type, trace_id, payload, error_code, error, stack, retry_count, history,
    failed_at, acked_at, fingerprint)
SELECT jobs.tenant_id, row.value ->> 2, jobs.job_id, jobs.queue, jobs.job_type, jobs.trace_id, jobs.payload,
       row.value ->> 3, row.value ->> 4, row.value ->> 5, row.value ->> 6, row.value ->> 7, row.value ->> 8,
       row.value ->> 9, row.value ->> 10
  FROM json_each(:rows) AS row CROSS JOIN jobs
    ON jobs.tenant_id = row.value ->> 0 AND jobs.job_id = row.value ->> 1 AND jobs.queue = :queue
 WHERE true
ON CONFLICT (tenant_id, job_id, queue) DO UPDATE
   SET dlq_id = excluded.dlq_id, error_code = excluded.error_code, error = excluded.error, stack = excluded.stack,
       retry_count = excluded.retry_count, history = excluded.history, failed_at = excluded.failed_at,
       acked_at = excluded.acked_at, fingerprint = excluded.fingerprint,
       status = iif(dlq_items.dlq_id = excluded.dlq_id, dlq_items.status, 'open'),
       replay_pending = iif(dlq_items.dlq_id = excluded.dlq_id, dlq_items.replay_pending, 0)"""

WRITTEN: Final = """
SELECT json_group_array(e.position) FROM json_each(:rows) AS row CROSS JOIN feed_entries AS e
    ON e.feed = :queue AND e.position = row.value ->> 0 AND e.nonce = row.value ->> 1"""

UNACKED: Final = """
SELECT json_group_array(json_array(tenant_id, job_id, dlq_id)) FROM (
    SELECT * FROM dlq_items
     WHERE acked_at IS NULL AND queue = :queue AND (tenant_id, dlq_id) > (:tenant_id, :dlq_id)
     ORDER BY tenant_id, dlq_id LIMIT :limit)"""

DEAD_LETTERS: Final = """
SELECT json_group_array(json_array(row.key, d.dlq_id)) FROM json_each(:rows) AS row CROSS JOIN dlq_items AS d
    ON d.tenant_id = row.value ->> 0 AND d.job_id = row.value ->> 1 AND d.queue = row.value ->> 2"""

ACK: Final = """
UPDATE dlq_items SET acked_at = :now
 WHERE acked_at IS NULL
   AND (tenant_id, dlq_id) IN (SELECT row.value ->> 0, row.value ->> 1 FROM json_each(:rows) AS row)"""

POSITION: Final = "SELECT position, nonce FROM feed_positions WHERE feed = ?"
