"""The projection's SQL for PostgreSQL: lease on a feed, position, and bulk rows from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.core.publishing import PUBLISHED_COLUMNS
from holdfast.ledger.fold_events import (
    APPROVAL_REQUEST_COLUMNS,
    AUDIT_COLUMNS,
    CLOSING_COLUMNS,
    UNKNOWN_PAYLOAD,
    UNKNOWN_TASK,
)
from holdfast.ledger.postgres.notifications import CHANNEL

#: A projector on standby only reads: no lock, nothing written.
LEASED_FEEDS: Final = """
SELECT feed FROM feed_positions WHERE feed = ANY($1::text[])
   AND projector <> $2 AND lease_expires_at >= clock_timestamp()"""

#: A row that is locked belongs to a projector that is writing.
LEASE_FEED: Final = """
WITH free AS (
    SELECT feed FROM feed_positions
     WHERE feed = $1 AND (projector IS NULL OR projector = $2 OR lease_expires_at IS NULL
                          OR lease_expires_at < clock_timestamp())
       FOR UPDATE SKIP LOCKED)
UPDATE feed_positions AS p SET projector = $2, lease_expires_at = clock_timestamp() + $3
  FROM free WHERE p.feed = free.feed
RETURNING p.position, p.nonce"""

RENEW_LEASES: Final = """
WITH own AS (
    SELECT feed FROM feed_positions WHERE feed = ANY($1::text[]) AND projector = $2 FOR UPDATE SKIP LOCKED)
UPDATE feed_positions AS p SET lease_expires_at = clock_timestamp() + $3
  FROM own WHERE p.feed = own.feed
RETURNING p.feed, p.position, p.nonce"""

#: Without the WHERE, the INSERT would wait for the lock on an existing row.
INSERT_LEASED_FEED: Final = """
INSERT INTO feed_positions (feed, position, nonce, projector, lease_expires_at, updated_at)
SELECT $1, '', '', $2, clock_timestamp() + $3, clock_timestamp()
 WHERE NOT EXISTS (SELECT FROM feed_positions WHERE feed = $1)
ON CONFLICT DO NOTHING
RETURNING position, nonce"""

RELEASE: Final = (
    "UPDATE feed_positions SET projector = NULL, lease_expires_at = NULL WHERE feed = $1 AND projector = $2"
)

FIRST: Final = """
INSERT INTO feed_positions (feed, position, nonce, updated_at)
SELECT $1, '', '', clock_timestamp() WHERE NOT EXISTS (SELECT FROM feed_positions WHERE feed = $1)
ON CONFLICT DO NOTHING"""

MOVE: Final = f"""
WITH free AS (
    SELECT feed FROM feed_positions WHERE feed = $1 AND position = $6 AND nonce = $7 AND engine_epoch = $11
       FOR UPDATE SKIP LOCKED),
moved AS (
    UPDATE feed_positions AS p
       SET position = $2, nonce = $3, projector = $4, lease_expires_at = clock_timestamp() + $5,
           updated_at = clock_timestamp()
      FROM free WHERE p.feed = free.feed
 RETURNING p.feed),
entries AS (
    INSERT INTO feed_entries (feed, position, nonce, at)
    SELECT moved.feed, u.position, u.nonce, clock_timestamp()
      FROM moved, unnest($9::text[], $10::text[]) AS u (position, nonce)
    ON CONFLICT DO NOTHING)
SELECT pg_notify('{CHANNEL}', $8) FROM moved"""  # noqa: S608 - a constant


ENGINE_EPOCH: Final = "SELECT engine_epoch FROM feed_positions WHERE feed = $1"

BEGIN_EPOCH: Final = """
UPDATE feed_positions SET engine_epoch = $2 WHERE feed = $1 AND engine_epoch = $3 RETURNING position, nonce"""


def _unnest(columns: Sequence[tuple[str, str]]) -> str:
    """Rows from arrays, each with its number and the queue ($1).

    `OFFSET 0` hides from the planner that all rows have the same queue: without statistics it would read every job of
    the queue and search the arrays for it.
    """
    arrays = ", ".join(f"${number}::{kind}[]" for number, (_, kind) in enumerate(columns, 2))
    names = ", ".join(name for name, _ in columns)
    return (
        f"(SELECT $1::text AS queue, given.* FROM unnest({arrays}) WITH ORDINALITY AS given ({names}, place) OFFSET 0)"  # noqa: S608
    )


_NAMES: Final = _unnest((("tenant_id", "text"), ("job_id", "text")))
_THE_JOB: Final = "j.tenant_id = u.tenant_id AND j.job_id = u.job_id AND j.queue = u.queue"


#: The state, and no later attempt in it: an engine that lost data continues from an earlier one.
_WHERE_IT_WAS: Final = (
    " AND j.state = u.came_from AND j.attempt <= u.attempt_was"
    " AND (u.retries_were - j.retry_count BETWEEN 0 AND 1) IS NOT FALSE"
)


#: Values that most jobs of a batch share.
_ALIKE: Final = (
    ("tenant_id", "text"),
    ("n", "int"),
    ("came_from", "text"),
    ("attempt_was", "int"),
    ("retries_were", "int"),
    ("attempt", "int"),
    ("retry_count", "int"),
)


def _update(setting: str, own: Sequence[tuple[str, str]], condition: str = _WHERE_IT_WAS) -> str:
    """An UPDATE of many jobs; returns each job's number in the arrays and its last event's number.

    Takes an array for each own column, one with the number of each job's combination of `_ALIKE`, and an array for each
    column of the combinations. Long arrays of the same few values would be half of the work.
    """
    arrays = ", ".join(f"${number}::{kind}[]" for number, (_, kind) in enumerate((*own, ("", "int")), 2))
    names = ", ".join(name for name, _ in own)
    alike = ", ".join(
        f"(${number}::{kind}[])[g.alike] AS {name}" for number, (name, kind) in enumerate(_ALIKE, len(own) + 3)
    )
    return f"""
UPDATE jobs AS j SET last_seq = j.last_seq + u.n, {setting}
  FROM (SELECT $1::text AS queue, g.*, {alike}
          FROM unnest({arrays}) WITH ORDINALITY AS g ({names}, alike, place) OFFSET 0) AS u
 WHERE {_THE_JOB}{condition}
RETURNING u.place, j.last_seq"""  # noqa: S608 - constants


_MOVED: Final = (("job_id", "text"), ("at", "timestamptz"))

NOTE: Final = _update("updated_at = j.updated_at", (("job_id", "text"),), condition="")
CLAIM: Final = _update(
    "state = 'running', attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, worker = u.worker,"
    " next_retry_at = NULL",
    (*_MOVED, ("worker", "text")),
)
SUCCEED: Final = _update(
    "state = 'succeeded', attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, finished_at = u.at,"
    " result = u.result, worker = NULL, error_code = NULL, last_error = NULL, error_message = NULL,"
    " next_retry_at = NULL",
    (*_MOVED, ("result", "text")),
)
CHANGE: Final = _update(
    "state = u.state, attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, finished_at = u.finished_at,"
    " worker = u.worker, result = u.result, next_retry_at = u.next_retry_at, run_at = coalesce(u.run_at, j.run_at),"
    " dlq_id = coalesce(u.dlq_id, j.dlq_id),"
    " error_code = CASE WHEN u.keeps_errors THEN j.error_code ELSE u.error_code END,"
    " last_error = CASE WHEN u.keeps_errors THEN j.last_error ELSE u.last_error END,"
    " error_message = CASE WHEN u.keeps_errors THEN j.error_message ELSE u.error_message END",
    (
        *_MOVED,
        ("state", "text"),
        ("finished_at", "timestamptz"),
        ("worker", "text"),
        ("result", "text"),
        ("next_retry_at", "timestamptz"),
        ("run_at", "timestamptz"),
        ("dlq_id", "text"),
        ("keeps_errors", "bool"),
        ("error_code", "text"),
        ("last_error", "text"),
        ("error_message", "text"),
    ),
)

#: Runs before the batch's other updates of these jobs: they may have moved since.
EXPEDITE: Final = f"""
UPDATE jobs AS j
   SET run_at = CASE WHEN j.run_at > u.at THEN u.at ELSE j.run_at END,
       next_retry_at = CASE WHEN j.next_retry_at > u.at THEN u.at ELSE j.next_retry_at END, updated_at = u.at
  FROM {_unnest((("tenant_id", "text"), ("job_id", "text"), ("at", "timestamptz")))} AS u
 WHERE {_THE_JOB} AND j.finished_at IS NULL"""  # noqa: S608

READ_JOBS: Final = f"""
SELECT u.place, j.state, j.last_seq, j.attempt, j.retry_count FROM {_NAMES} AS u JOIN jobs AS j ON {_THE_JOB}"""  # noqa: S608

HISTORIES: Final = f"""
SELECT u.place, j.job_type, e.type, e.from_state, e.to_state, e.attempt, e.worker, e.message, e.data, e.at
  FROM {_NAMES} AS u JOIN jobs AS j ON {_THE_JOB}
  JOIN job_events AS e ON e.tenant_id = u.tenant_id AND e.job_id = u.job_id AND e.queue = u.queue
 ORDER BY u.place, e.seq"""  # noqa: S608

_APPROVAL_TYPES: Final = (*("text",) * 8, "int", "timestamptz", "text", "timestamptz")

#: A job that is dead-lettered twice (after a fork) has one dead letter, the last.
_DEAD_LETTER: Final = (
    ("tenant_id", "text"),
    ("job_id", "text"),
    ("dlq_id", "text"),
    ("error_code", "text"),
    ("error", "text"),
    ("stack", "text"),
    ("retry_count", "int"),
    ("history", "text"),
    ("failed_at", "timestamptz"),
    ("acked_at", "timestamptz"),
    ("fingerprint", "text"),
)
#: A dead letter that is written again (the engine lost its confirmation) keeps what operators decided about it.
_SAME: Final = "d.dlq_id = excluded.dlq_id"
INSERT_DEAD_LETTERS: Final = f"""
INSERT INTO dlq_items AS d (
    tenant_id, dlq_id, job_id, queue, job_type, trace_id, payload, error_code, error, stack, retry_count, history,
    failed_at, acked_at, fingerprint)
SELECT j.tenant_id, u.dlq_id, j.job_id, j.queue, j.job_type, j.trace_id, j.payload, u.error_code, u.error, u.stack,
       u.retry_count, u.history, u.failed_at, u.acked_at, u.fingerprint
  FROM {_unnest(_DEAD_LETTER)} AS u JOIN jobs AS j ON {_THE_JOB}
ON CONFLICT (tenant_id, job_id, queue) DO UPDATE
   SET dlq_id = excluded.dlq_id, error_code = excluded.error_code, error = excluded.error, stack = excluded.stack,
       retry_count = excluded.retry_count, history = excluded.history, failed_at = excluded.failed_at,
       acked_at = excluded.acked_at, fingerprint = excluded.fingerprint,
       status = CASE WHEN {_SAME} THEN d.status ELSE 'open' END,
       replay_pending = CASE WHEN {_SAME} THEN d.replay_pending ELSE 0 END"""  # noqa: S608

#: Not a second time: a request is made once, and may have been decided.
INSERT_APPROVALS: Final = f"""
INSERT INTO approvals (
    tenant_id, approval_id, job_id, queue, job_type, name, payload_hash, policies, reason, details, quorum, deadline,
    requested_by, requested_at)
SELECT j.tenant_id, u.approval_id, j.job_id, j.queue, j.job_type, u.name, u.payload_hash, u.policies, u.reason,
       u.details, u.quorum, u.deadline, u.requested_by, u.requested_at
  FROM {_unnest(tuple(zip(APPROVAL_REQUEST_COLUMNS, _APPROVAL_TYPES, strict=True)))} AS u JOIN jobs AS j ON {_THE_JOB}
ON CONFLICT DO NOTHING"""  # noqa: S608

_CLOSING_TYPES: Final = (*("text",) * (len(CLOSING_COLUMNS) - 1), "timestamptz")
#: Their jobs have continued, so there is nothing to deliver: `acked_at` is set.
CLOSE_APPROVALS: Final = f"""
UPDATE approvals AS j
   SET status = u.status, decided_by = u.decided_by, decided_at = u.at, decision_reason = u.decision_reason,
       acked_at = u.at
  FROM {_unnest(tuple(zip(CLOSING_COLUMNS, _CLOSING_TYPES, strict=True)))} AS u
 WHERE {_THE_JOB} AND j.status = 'requested' AND j.approval_id <> u.stays"""  # noqa: S608

_AUDIT_TYPES: Final = ("text",) * (len(AUDIT_COLUMNS) - 1) + ("timestamptz",)
INSERT_AUDIT: Final = f"""
INSERT INTO operator_events ({", ".join(AUDIT_COLUMNS)})
SELECT {", ".join(AUDIT_COLUMNS)}
  FROM unnest({", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_AUDIT_TYPES, 1))})
    AS u ({", ".join(AUDIT_COLUMNS)})
ON CONFLICT DO NOTHING"""  # noqa: S608

WRITTEN: Final = f"""
SELECT e.position FROM {_unnest((("position", "text"), ("nonce", "text")))} AS u
  JOIN feed_entries AS e ON e.feed = u.queue AND e.position = u.position AND e.nonce = u.nonce"""  # noqa: S608

UNACKED: Final = """
SELECT tenant_id, job_id, dlq_id FROM dlq_items
 WHERE acked_at IS NULL AND queue = $1 AND (tenant_id, dlq_id) > ($3, $4)
 ORDER BY tenant_id, dlq_id LIMIT $2"""

DEAD_LETTERS: Final = f"""
SELECT u.place, j.dlq_id FROM {_NAMES} AS u JOIN dlq_items AS j ON {_THE_JOB}"""  # noqa: S608

ACK: Final = """
UPDATE dlq_items AS d SET acked_at = clock_timestamp()
  FROM unnest($1::text[], $2::text[]) AS u (tenant_id, dlq_id)
 WHERE d.tenant_id = u.tenant_id AND d.dlq_id = u.dlq_id AND d.acked_at IS NULL"""

POSITION: Final = "SELECT position, nonce FROM feed_positions WHERE feed = $1"

#: A job whose creation event was lost or refused cannot be restored, so it does not count as recorded.
PRESENT: Final = f"""
SELECT u.place FROM {_NAMES} AS u JOIN jobs AS j ON {_THE_JOB}
 WHERE NOT (j.job_type = '{UNKNOWN_TASK}' AND j.payload = '{UNKNOWN_PAYLOAD}')"""  # noqa: S608

#: Job events for the outbox, in this order.
PUBLISH: Final = f"""
INSERT INTO outbox_events ({", ".join(PUBLISHED_COLUMNS)})
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::text[],
                     $9::timestamptz[])
ON CONFLICT DO NOTHING"""  # noqa: S608 - constants
