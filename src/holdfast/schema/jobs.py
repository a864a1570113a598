"""The ledger's tables, one schema for PostgreSQL and SQLite (requirements L1, L6).

Every business table leads with `tenant_id`, and so do its indexes, except those of the outbox (`schema.messages`).
Instants are `timestamptz` on PostgreSQL and whole milliseconds (UTC) on SQLite; Python gets aware datetimes. JSON is
stored as text, byte for byte as submitted: an approval is bound to it, and no digit of a number may change. `CHECK`s
protect invariants against bugs in holdfast.

The embedded engine has the same tables in its file, with additional columns (`engine/sqlite/sql/schema.sql`).
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, Column, Index, Integer, PrimaryKeyConstraint, SmallInteger, Table, Text, text

from holdfast.core.states import FINAL, State
from holdfast.schema.columns import INDEXED_BYTES as INDEXED_BYTES
from holdfast.schema.columns import NAME, InstantColumn, tenant
from holdfast.schema.columns import metadata as metadata
from holdfast.schema.operators import approvals, operator_events


def _sql_list(states: frozenset[State]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


_ALL: Final = _sql_list(frozenset(State))
_FINAL: Final = _sql_list(FINAL)


jobs: Final = Table(
    "jobs",
    metadata,
    tenant(),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("job_type", NAME, nullable=False),
    Column("state", NAME, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("retry_count", Integer, nullable=False, server_default="0"),
    #: Number of the job's last event; the next event gets the next number.
    Column("last_seq", Integer, nullable=False),
    Column("idempotency_key", NAME, nullable=False),
    Column("trace_id", NAME, nullable=False, server_default=""),
    Column("worker", NAME),
    Column("error_code", NAME),
    #: Truncated.
    Column("last_error", Text),
    #: For API callers; contains no internal details.
    Column("error_message", Text),
    Column("payload", Text, nullable=False),
    Column("context", Text),
    Column("result", Text),
    #: Policy and options as submitted, for the reconciler: a JSON object (`core.job.Meta`).
    Column("meta", Text),
    Column("run_at", InstantColumn),
    Column("next_retry_at", InstantColumn),
    Column("dlq_id", NAME),
    #: URL to notify of the job's end, and when its delivery was submitted.
    Column("webhook", Text),
    Column("notified_at", InstantColumn),
    Column("created_at", InstantColumn, nullable=False),
    Column("updated_at", InstantColumn, nullable=False),
    Column("finished_at", InstantColumn),
    PrimaryKeyConstraint("tenant_id", "job_id", "queue"),
    CheckConstraint(f"state IN ({_ALL})", name="known_state"),
    CheckConstraint(f"(finished_at IS NOT NULL) = (state IN ({_FINAL}))", name="end_time"),
    CheckConstraint("state NOT IN ('dlq_recorded', 'failed') OR dlq_id IS NOT NULL", name="dead_letter"),
    CheckConstraint("attempt >= 0 AND retry_count >= 0 AND last_seq > 0", name="counts"),
)
# Without the job id: jobs of one moment share an index entry, which keeps these indexes small and fast to write.
Index("by_time", jobs.c.tenant_id, jobs.c.created_at, _table=jobs)
Index("by_type", jobs.c.tenant_id, jobs.c.job_type, jobs.c.created_at, _table=jobs)
# A PostgreSQL index row has at most 2,704 bytes. Longer values are not indexed, so that no job is refused.
Index(
    "by_trace",
    jobs.c.tenant_id,
    jobs.c.trace_id,
    _table=jobs,
    postgresql_where=text(f"trace_id <> '' AND octet_length(trace_id) <= {INDEXED_BYTES}"),
    sqlite_where=text("trace_id <> ''"),
)
Index(
    "by_key",
    jobs.c.tenant_id,
    jobs.c.idempotency_key,
    _table=jobs,
    postgresql_where=text(f"idempotency_key <> job_id AND octet_length(idempotency_key) <= {INDEXED_BYTES}"),
    sqlite_where=text("idempotency_key <> job_id"),
)
#: All jobs except `succeeded` ones: open jobs, and finished jobs that operators query.
Index(
    "by_state",
    jobs.c.tenant_id,
    jobs.c.state,
    jobs.c.created_at,
    _table=jobs,
    postgresql_where=text("state <> 'succeeded'"),
    sqlite_where=text("state <> 'succeeded'"),
)
#: For text search in errors: few rows, newest first.
Index(
    "with_error",
    jobs.c.tenant_id,
    jobs.c.created_at,
    jobs.c.job_id,
    _table=jobs,
    postgresql_where=text("last_error IS NOT NULL"),
    sqlite_where=text("last_error IS NOT NULL"),
)

Index(
    "unnotified",
    jobs.c.tenant_id,
    jobs.c.finished_at,
    _table=jobs,
    postgresql_where=text("webhook IS NOT NULL AND notified_at IS NULL AND finished_at IS NOT NULL"),
    sqlite_where=text("webhook IS NOT NULL AND notified_at IS NULL AND finished_at IS NOT NULL"),
)

job_events: Final = Table(
    "job_events",
    metadata,
    tenant(),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("type", NAME, nullable=False),
    Column("from_state", NAME),
    Column("to_state", NAME),
    Column("attempt", Integer, nullable=False),
    Column("retry_count", Integer, nullable=False),
    Column("worker", NAME),
    Column("message", Text),
    Column("data", Text),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "job_id", "queue", "seq"),
    CheckConstraint("seq > 0", name="seq"),
)

dlq_items: Final = Table(
    "dlq_items",
    metadata,
    tenant(),
    Column("dlq_id", NAME, nullable=False),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("job_type", NAME, nullable=False),
    Column("trace_id", NAME, nullable=False, server_default=""),
    Column("payload", Text, nullable=False),
    Column("error_code", NAME, nullable=False),
    Column("error", Text, nullable=False),
    Column("stack", Text, nullable=False, server_default=""),
    Column("retry_count", Integer, nullable=False),
    Column("history", Text, nullable=False),
    Column("failed_at", InstantColumn, nullable=False),
    Column("status", NAME, nullable=False, server_default="open"),
    Column("requested_by", Text),
    Column("confirmed_by", Text),
    Column("reason", Text),
    #: The latest replay: its job, its number, its payload if it was edited, and whether it is still to be submitted.
    Column("replayed_as", Text),
    Column("replay_count", Integer, nullable=False, server_default="0"),
    Column("replay_payload", Text),
    Column("replay_pending", SmallInteger, nullable=False, server_default="0"),
    #: Identifies the kind of error: dead letters with the same kind of error have the same fingerprint.
    Column("fingerprint", NAME, nullable=False, server_default=""),
    #: When the engine moved the job to `failed`; NULL: not confirmed to the engine yet.
    Column("acked_at", InstantColumn),
    PrimaryKeyConstraint("tenant_id", "dlq_id"),
    CheckConstraint("status IN ('open', 'discard_requested', 'discarded', 'replayed')", name="known_status"),
)
Index("by_job", dlq_items.c.tenant_id, dlq_items.c.job_id, dlq_items.c.queue, unique=True, _table=dlq_items)
Index("by_time", dlq_items.c.tenant_id, dlq_items.c.failed_at, dlq_items.c.dlq_id, _table=dlq_items)
Index(
    "unacked",
    dlq_items.c.tenant_id,
    dlq_items.c.queue,
    _table=dlq_items,
    postgresql_where=text("acked_at IS NULL"),
    sqlite_where=text("acked_at IS NULL"),
)

Index("by_fingerprint", dlq_items.c.tenant_id, dlq_items.c.fingerprint, dlq_items.c.failed_at, _table=dlq_items)
Index(
    "replaying",
    dlq_items.c.tenant_id,
    dlq_items.c.dlq_id,
    _table=dlq_items,
    postgresql_where=text("replay_pending = 1"),
    sqlite_where=text("replay_pending = 1"),
)

#: Effects (requirement E2), and writes in a user's own transaction (E3).
idempotency_keys: Final = Table(
    "idempotency_keys",
    metadata,
    tenant(),
    Column("key", NAME, nullable=False),
    #: reserved → done | in_doubt; in_doubt → reserved | done.
    Column("state", NAME, nullable=False),
    #: The recorded result, JSON.
    Column("value", Text),
    Column("created_at", InstantColumn, nullable=False),
    #: After this a `done` key may be used again; NULL: never. Keys that are reserved or in doubt do not expire.
    Column("expires_at", InstantColumn),
    #: What the key is bound to: using it with another function or other arguments is an error.
    Column("function", NAME, nullable=False),
    Column("fingerprint", NAME, nullable=False),
    #: Identifies this reservation; its owner may record the result.
    Column("token", NAME, nullable=False),
    #: The attempt that reserved it: while its lease holds, the effect is in progress and not in doubt.
    Column("queue", NAME, nullable=False),
    Column("job_id", NAME, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker", NAME, nullable=False),
    Column("updated_at", InstantColumn, nullable=False),
    #: Why it is in doubt.
    Column("reason", Text),
    PrimaryKeyConstraint("tenant_id", "key"),
    CheckConstraint("state IN ('reserved', 'done', 'in_doubt')", name="known_state"),
    CheckConstraint("(state = 'done') = (value IS NOT NULL)", name="result"),
)
Index(
    "in_doubt",
    idempotency_keys.c.tenant_id,
    idempotency_keys.c.updated_at,
    _table=idempotency_keys,
    postgresql_where=text("state <> 'done'"),
    sqlite_where=text("state <> 'done'"),
)
Index(
    "by_expiry",
    idempotency_keys.c.tenant_id,
    idempotency_keys.c.expires_at,
    _table=idempotency_keys,
    postgresql_where=text("expires_at IS NOT NULL"),
    sqlite_where=text("expires_at IS NOT NULL"),
)
#: A job's effects, for readers of the job.
Index(
    "by_job",
    idempotency_keys.c.tenant_id,
    idempotency_keys.c.job_id,
    _table=idempotency_keys,
)

#: Checkpoints inside a job (requirement E4), in the order in which its code reaches them.
job_steps: Final = Table(
    "job_steps",
    metadata,
    tenant(),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("position", Integer, nullable=False),
    Column("name", NAME, nullable=False),
    Column("result", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "job_id", "queue", "position"),
    CheckConstraint("position > 0", name="position"),
)
Index("by_job", approvals.c.tenant_id, approvals.c.job_id, approvals.c.queue, _table=approvals)
Index("by_time", approvals.c.tenant_id, approvals.c.status, approvals.c.requested_at, _table=approvals)
Index(
    "undelivered",
    approvals.c.tenant_id,
    approvals.c.decided_at,
    _table=approvals,
    postgresql_where=text("acked_at IS NULL AND decided_at IS NOT NULL"),
    sqlite_where=text("acked_at IS NULL AND decided_at IS NOT NULL"),
)
Index(
    "by_deadline",
    approvals.c.tenant_id,
    approvals.c.deadline,
    _table=approvals,
    postgresql_where=text("status = 'requested' AND deadline IS NOT NULL"),
    sqlite_where=text("status = 'requested' AND deadline IS NOT NULL"),
)

Index(
    "unnotified",
    approvals.c.tenant_id,
    approvals.c.requested_at,
    _table=approvals,
    postgresql_where=text("notified_status IS NULL OR notified_status <> status"),
    sqlite_where=text("notified_status IS NULL OR notified_status <> status"),
)
Index("by_time", operator_events.c.tenant_id, operator_events.c.at, operator_events.c.id, _table=operator_events)

Index(
    "unnotified",
    operator_events.c.tenant_id,
    operator_events.c.at,
    _table=operator_events,
    postgresql_where=text("notified_at IS NULL AND type LIKE 'alert.%'"),
    sqlite_where=text("notified_at IS NULL AND type LIKE 'alert.%'"),
)

# Tables of the projector, not per tenant -----------------------------------------------------------

#: The namespace and engine that this ledger belongs to, in one row. Two namespaces would mix two engines' jobs.
ledger_owner: Final = Table(
    "ledger_owner",
    metadata,
    Column("id", SmallInteger, nullable=False, autoincrement=False),
    Column("namespace", NAME, nullable=False),
    #: The engine last used with it; a second engine with the same namespace causes a warning.
    Column("engine", NAME, nullable=False, server_default=""),
    Column("since", InstantColumn, nullable=False),
    PrimaryKeyConstraint("id"),
    CheckConstraint("id = 1", name="one"),
)

#: How far each feed has been projected; updated in the same transaction as the rows.
feed_positions: Final = Table(
    "feed_positions",
    metadata,
    Column("feed", NAME, nullable=False),
    Column("position", NAME, nullable=False),
    Column("nonce", NAME, nullable=False),
    #: The active projector, and until when others stand by. Not a lock: writes are fenced by the position.
    Column("projector", NAME),
    Column("lease_expires_at", InstantColumn),
    Column("updated_at", InstantColumn, nullable=False),
    #: The epoch of the engine in which the queue was verified last: batches that were read in another one are refused.
    Column("engine_epoch", NAME, nullable=False, server_default=""),
    PrimaryKeyConstraint("feed"),
)

#: Projected entries, kept longer than any lag, so that none is projected twice after a fork.
feed_entries: Final = Table(
    "feed_entries",
    metadata,
    Column("feed", NAME, nullable=False),
    Column("position", NAME, nullable=False),
    Column("nonce", NAME, nullable=False),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("feed", "position", "nonce"),
)
Index("by_time", feed_entries.c.feed, feed_entries.c.at, _table=feed_entries)

#: Events that the projector could not add to a legal history; never dropped silently.
anomalies: Final = Table(
    "anomalies",
    metadata,
    tenant(),
    Column("id", NAME, nullable=False),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("reason", Text, nullable=False),
    #: The event as it came, JSON.
    Column("event", Text, nullable=False),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "id"),
)
Index("by_job", anomalies.c.tenant_id, anomalies.c.job_id, anomalies.c.queue, _table=anomalies)
Index("by_time", anomalies.c.tenant_id, anomalies.c.at, _table=anomalies)
