"""The ledger's tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

#: An instant: whole milliseconds (UTC) where the store has no such type.
INSTANT: Final = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")

#: Compared byte by byte.
NAME: Final = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _only(predicate: str, on_postgres: str = "") -> dict[str, Any]:
    """Predicates of a partial index.

    PostgreSQL's may have another condition, because its index rows have a size limit.
    """
    both = f"{predicate} AND {on_postgres}" if on_postgres else predicate
    return {"postgresql_where": sa.text(both), "sqlite_where": sa.text(predicate)}


def upgrade() -> None:
    _create_jobs()
    _create_job_events()
    _create_dlq_items()
    _create_idempotency_keys()
    _create_job_steps()
    _create_approvals()
    _create_approval_votes()
    _create_operator_events()
    _create_alerts()
    _create_outbox_events()
    _create_outbox_lanes()
    _notify_of_outbox_events()
    _create_queue_executions()
    _create_trigger_presences()
    _create_trigger_pauses()
    _create_tokens()
    _create_ledger_owner()
    _create_feed_positions()
    _create_feed_entries()
    _create_anomalies()


def downgrade() -> None:
    op.drop_table("anomalies")
    op.drop_table("feed_entries")
    op.drop_table("feed_positions")
    op.drop_table("ledger_owner")
    op.drop_table("tokens")
    op.drop_table("trigger_pauses")
    op.drop_table("trigger_presences")
    op.drop_table("queue_executions")
    op.drop_table("outbox_lanes")
    op.drop_table("outbox_events")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION holdfast_outbox_written()")
    op.drop_table("alerts")
    op.drop_table("operator_events")
    op.drop_table("approval_votes")
    op.drop_table("approvals")
    op.drop_table("job_steps")
    op.drop_table("idempotency_keys")
    op.drop_table("dlq_items")
    op.drop_table("job_events")
    op.drop_table("jobs")


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("job_type", NAME, nullable=False),
        sa.Column("state", NAME, nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", NAME, nullable=False),
        sa.Column("trace_id", NAME, server_default="", nullable=False),
        sa.Column("worker", NAME),
        sa.Column("error_code", NAME),
        sa.Column("last_error", sa.Text()),
        sa.Column("error_message", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("context", sa.Text()),
        sa.Column("result", sa.Text()),
        sa.Column("meta", sa.Text()),
        sa.Column("run_at", INSTANT),
        sa.Column("next_retry_at", INSTANT),
        sa.Column("dlq_id", NAME),
        sa.Column("webhook", sa.Text()),
        sa.Column("told_at", INSTANT),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("updated_at", INSTANT, nullable=False),
        sa.Column("finished_at", INSTANT),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('cancelled', 'failed', 'succeeded'))", name=op.f("jobs_end_time")
        ),
        sa.CheckConstraint(
            "state IN ('cancelled', 'dlq_pending', 'dlq_recorded', 'failed', 'queued', "
            "'retrying', 'running', 'succeeded', 'suspended', 'waiting_approval')",
            name=op.f("jobs_known_state"),
        ),
        sa.CheckConstraint(
            "state NOT IN ('dlq_recorded', 'failed') OR dlq_id IS NOT NULL", name=op.f("jobs_dead_letter")
        ),
        sa.CheckConstraint("attempt >= 0 AND retry_count >= 0 AND last_seq > 0", name=op.f("jobs_counts")),
        sa.PrimaryKeyConstraint("tenant_id", "job_id", "queue", name=op.f("jobs_pk")),
    )
    op.create_index(
        op.f("jobs_by_key"),
        "jobs",
        ["tenant_id", "idempotency_key"],
        **_only("idempotency_key <> job_id", "octet_length(idempotency_key) <= 1000"),
    )
    op.create_index(
        op.f("jobs_by_state"), "jobs", ["tenant_id", "state", "created_at"], **_only("state <> 'succeeded'")
    )
    op.create_index(op.f("jobs_by_time"), "jobs", ["tenant_id", "created_at"])
    op.create_index(
        op.f("jobs_by_trace"),
        "jobs",
        ["tenant_id", "trace_id"],
        **_only("trace_id <> ''", "octet_length(trace_id) <= 1000"),
    )
    op.create_index(op.f("jobs_by_type"), "jobs", ["tenant_id", "job_type", "created_at"])
    op.create_index(
        op.f("jobs_untold"),
        "jobs",
        ["tenant_id", "finished_at"],
        **_only("webhook IS NOT NULL AND told_at IS NULL AND finished_at IS NOT NULL"),
    )
    op.create_index(
        op.f("jobs_with_error"), "jobs", ["tenant_id", "created_at", "job_id"], **_only("last_error IS NOT NULL")
    )


def _create_job_events() -> None:
    op.create_table(
        "job_events",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("type", NAME, nullable=False),
        sa.Column("from_state", NAME),
        sa.Column("to_state", NAME),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("worker", NAME),
        sa.Column("message", sa.Text()),
        sa.Column("data", sa.Text()),
        sa.Column("at", INSTANT, nullable=False),
        sa.CheckConstraint("seq > 0", name=op.f("job_events_seq")),
        sa.PrimaryKeyConstraint("tenant_id", "job_id", "queue", "seq", name=op.f("job_events_pk")),
    )


def _create_dlq_items() -> None:
    op.create_table(
        "dlq_items",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("dlq_id", NAME, nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("job_type", NAME, nullable=False),
        sa.Column("trace_id", NAME, server_default="", nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("error_code", NAME, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("stack", sa.Text(), server_default="", nullable=False),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("history", sa.Text(), nullable=False),
        sa.Column("failed_at", INSTANT, nullable=False),
        sa.Column("status", NAME, server_default="open", nullable=False),
        sa.Column("requested_by", sa.Text()),
        sa.Column("confirmed_by", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("replayed_as", sa.Text()),
        sa.Column("replay_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("replay_payload", sa.Text()),
        sa.Column("replay_pending", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("fingerprint", NAME, server_default="", nullable=False),
        sa.Column("acked_at", INSTANT),
        sa.CheckConstraint(
            "status IN ('open', 'discard_requested', 'discarded', 'replayed')", name=op.f("dlq_items_known_status")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "dlq_id", name=op.f("dlq_items_pk")),
    )
    op.create_index(op.f("dlq_items_by_fingerprint"), "dlq_items", ["tenant_id", "fingerprint", "failed_at"])
    op.create_index(op.f("dlq_items_by_job"), "dlq_items", ["tenant_id", "job_id", "queue"], unique=True)
    op.create_index(op.f("dlq_items_by_time"), "dlq_items", ["tenant_id", "failed_at", "dlq_id"])
    op.create_index(op.f("dlq_items_replaying"), "dlq_items", ["tenant_id", "dlq_id"], **_only("replay_pending = 1"))
    op.create_index(op.f("dlq_items_unacked"), "dlq_items", ["tenant_id", "queue"], **_only("acked_at IS NULL"))


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("key", NAME, nullable=False),
        sa.Column("state", NAME, nullable=False),
        sa.Column("value", sa.Text()),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT),
        sa.Column("function", NAME, nullable=False),
        sa.Column("fingerprint", NAME, nullable=False),
        sa.Column("token", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", NAME, nullable=False),
        sa.Column("updated_at", INSTANT, nullable=False),
        sa.Column("reason", sa.Text()),
        sa.CheckConstraint("(state = 'done') = (value IS NOT NULL)", name=op.f("idempotency_keys_result")),
        sa.CheckConstraint("state IN ('reserved', 'done', 'in_doubt')", name=op.f("idempotency_keys_known_state")),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("idempotency_keys_pk")),
    )
    op.create_index(
        op.f("idempotency_keys_by_expiry"),
        "idempotency_keys",
        ["tenant_id", "expires_at"],
        **_only("expires_at IS NOT NULL"),
    )
    op.create_index(op.f("idempotency_keys_by_job"), "idempotency_keys", ["tenant_id", "job_id"])
    op.create_index(
        op.f("idempotency_keys_in_doubt"), "idempotency_keys", ["tenant_id", "updated_at"], **_only("state <> 'done'")
    )


def _create_job_steps() -> None:
    op.create_table(
        "job_steps",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.CheckConstraint("position > 0", name=op.f("job_steps_position")),
        sa.PrimaryKeyConstraint("tenant_id", "job_id", "queue", "position", name=op.f("job_steps_pk")),
    )


def _create_approvals() -> None:
    op.create_table(
        "approvals",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("approval_id", NAME, nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("job_type", NAME, nullable=False),
        sa.Column("status", NAME, server_default="requested", nullable=False),
        sa.Column("name", NAME, server_default="", nullable=False),
        sa.Column("payload_hash", NAME, nullable=False),
        sa.Column("policies", sa.Text(), server_default="[]", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("details", sa.Text()),
        sa.Column("quorum", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("deadline", INSTANT),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("requested_at", INSTANT, nullable=False),
        sa.Column("decided_by", sa.Text()),
        sa.Column("decided_at", INSTANT),
        sa.Column("decision_reason", sa.Text()),
        sa.Column("acked_at", INSTANT),
        sa.Column("told", NAME),
        sa.CheckConstraint("(decided_at IS NULL) = (status = 'requested')", name=op.f("approvals_decision")),
        sa.CheckConstraint(
            "status IN ('requested', 'approved', 'rejected', 'expired', 'withdrawn')",
            name=op.f("approvals_known_status"),
        ),
        sa.CheckConstraint("quorum > 0", name=op.f("approvals_quorum")),
        sa.PrimaryKeyConstraint("tenant_id", "approval_id", name=op.f("approvals_pk")),
    )
    op.create_index(
        op.f("approvals_by_deadline"),
        "approvals",
        ["tenant_id", "deadline"],
        **_only("status = 'requested' AND deadline IS NOT NULL"),
    )
    op.create_index(op.f("approvals_by_job"), "approvals", ["tenant_id", "job_id", "queue"])
    op.create_index(op.f("approvals_by_time"), "approvals", ["tenant_id", "status", "requested_at"])
    op.create_index(
        op.f("approvals_undelivered"),
        "approvals",
        ["tenant_id", "decided_at"],
        **_only("acked_at IS NULL AND decided_at IS NOT NULL"),
    )
    op.create_index(
        op.f("approvals_untold"),
        "approvals",
        ["tenant_id", "requested_at"],
        **_only("told IS NULL OR told <> status"),
    )


def _create_approval_votes() -> None:
    op.create_table(
        "approval_votes",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("approval_id", NAME, nullable=False),
        sa.Column("person", NAME, nullable=False),
        sa.Column("approve", sa.SmallInteger(), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "approval_id", "person", name=op.f("approval_votes_pk")),
    )


def _create_operator_events() -> None:
    op.create_table(
        "operator_events",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("id", NAME, nullable=False),
        sa.Column("type", NAME, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("target", NAME, nullable=False),
        sa.Column("target_id", sa.Text(), nullable=False),
        sa.Column("queue", NAME, server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("told_at", INSTANT),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("operator_events_pk")),
    )
    op.create_index(op.f("operator_events_by_time"), "operator_events", ["tenant_id", "at", "id"])
    op.create_index(
        op.f("operator_events_untold"),
        "operator_events",
        ["tenant_id", "at"],
        **_only("told_at IS NULL AND type LIKE 'alert.%'"),
    )


def _create_alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("key", NAME, nullable=False),
        sa.Column("raised_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("alerts_pk")),
    )


def _create_outbox_events() -> None:
    op.create_table(
        "outbox_events",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("id", NAME, nullable=False),
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(always=True),
            nullable=False,
        ),
        sa.Column("destination", NAME, nullable=False),
        sa.Column("topic", NAME, nullable=False),
        sa.Column("key", NAME),
        sa.Column("lane", sa.SmallInteger(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("headers", sa.Text()),
        sa.Column("status", NAME, server_default="NEW", nullable=False),
        sa.Column("attempt_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_retry_at", INSTANT),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("sent_at", INSTANT),
        sa.CheckConstraint(
            "(next_retry_at IS NOT NULL) = (status = 'RETRYING')", name=op.f("outbox_events_next_retry")
        ),
        sa.CheckConstraint("(sent_at IS NOT NULL) = (status = 'SENT')", name=op.f("outbox_events_sent")),
        sa.CheckConstraint("lane BETWEEN 0 AND 63", name=op.f("outbox_events_known_lane")),
        sa.CheckConstraint("status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')", name=op.f("outbox_events_known_status")),
        sa.PrimaryKeyConstraint("position", name=op.f("outbox_events_pk")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("outbox_events_by_id")),
        sqlite_autoincrement=True,
    )
    new, retrying, in_the_way = "status = 'NEW'", "status = 'RETRYING'", "status IN ('RETRYING', 'DEAD')"
    op.create_index(op.f("outbox_events_waiting"), "outbox_events", ["lane", "destination", "position"], **_only(new))
    op.create_index(
        op.f("outbox_events_by_key"),
        "outbox_events",
        ["lane", "destination", "topic", sa.text("coalesce(key, '')"), "position"],
        **_only(new),
    )
    op.create_index(op.f("outbox_events_retrying"), "outbox_events", ["lane", "next_retry_at"], **_only(retrying))
    op.create_index(
        op.f("outbox_events_in_the_way"),
        "outbox_events",
        ["destination", "topic", "key", "status", "position"],
        **_only(in_the_way),
    )
    op.create_index(op.f("outbox_events_by_sent"), "outbox_events", ["sent_at"], **_only("status = 'SENT'"))
    op.create_index(op.f("outbox_events_by_status"), "outbox_events", ["tenant_id", "status", "position"])
    if op.get_bind().dialect.name == "postgresql":
        # A backlog may be in one lane. With statistics of that, the planner would scan all of it to find the first
        # event of any other lane.
        op.execute("ALTER TABLE outbox_events ALTER COLUMN lane SET (n_distinct = 64)")


def _create_outbox_lanes() -> None:
    op.create_table(
        "outbox_lanes",
        sa.Column("lane", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("relay", NAME, nullable=False),
        sa.Column("until", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("lane", name=op.f("outbox_lanes_pk")),
    )


def _notify_of_outbox_events() -> None:
    """Wake the relays on every insert of an event, by any program."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute(
        """
        CREATE FUNCTION holdfast_outbox_written() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_notify('holdfast_outbox', ''); RETURN NULL; END $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER outbox_events_written AFTER INSERT ON outbox_events
        FOR EACH STATEMENT EXECUTE FUNCTION holdfast_outbox_written()
        """
    )


def _create_queue_executions() -> None:
    op.create_table(
        "queue_executions",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("id", NAME, nullable=False),
        sa.Column("message_id", NAME, nullable=False),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("event_name", NAME),
        sa.Column("status", NAME, nullable=False),
        sa.Column("started_at", INSTANT, nullable=False),
        sa.Column("completed_at", INSTANT),
        sa.Column("duration_ms", sa.Integer()),
        sa.Column("agent_run_id", NAME),
        sa.Column("error_message", sa.Text()),
        sa.Column("retry_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("trace_id", NAME, server_default="", nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("queue_executions_pk")),
    )
    op.create_index(op.f("queue_executions_by_message"), "queue_executions", ["tenant_id", "message_id"])
    op.create_index(op.f("queue_executions_by_queue"), "queue_executions", ["tenant_id", "queue_name", "started_at"])
    op.create_index(op.f("queue_executions_by_time"), "queue_executions", ["tenant_id", "started_at"])


def _create_trigger_presences() -> None:
    op.create_table(
        "trigger_presences",
        sa.Column("name", NAME, nullable=False),
        sa.Column("process", NAME, nullable=False),
        sa.Column("queue_name", NAME, nullable=False),
        sa.Column("adapter", NAME, nullable=False),
        sa.Column("health", sa.Text(), nullable=False),
        sa.Column("seen_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("name", "process", name=op.f("trigger_presences_pk")),
    )


def _create_trigger_pauses() -> None:
    op.create_table(
        "trigger_pauses",
        sa.Column("name", NAME, nullable=False),
        sa.Column("paused_by", NAME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("paused_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("trigger_pauses_pk")),
    )


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("token_id", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("role", NAME, nullable=False),
        sa.Column("tenants", sa.Text(), nullable=False),
        sa.Column("secret_hash", NAME, nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT),
        sa.Column("revoked_at", INSTANT),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'approver', 'admin')", name=op.f("tokens_known_role")),
        sa.PrimaryKeyConstraint("token_id", name=op.f("tokens_pk")),
    )


def _create_ledger_owner() -> None:
    op.create_table(
        "ledger_owner",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("namespace", NAME, nullable=False),
        sa.Column("engine", NAME, server_default="", nullable=False),
        sa.Column("since", INSTANT, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ledger_owner_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("ledger_owner_pk")),
    )


def _create_feed_positions() -> None:
    op.create_table(
        "feed_positions",
        sa.Column("feed", NAME, nullable=False),
        sa.Column("position", NAME, nullable=False),
        sa.Column("nonce", NAME, nullable=False),
        sa.Column("projector", NAME),
        sa.Column("until", INSTANT),
        sa.Column("updated_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("feed", name=op.f("feed_positions_pk")),
    )


def _create_feed_entries() -> None:
    op.create_table(
        "feed_entries",
        sa.Column("feed", NAME, nullable=False),
        sa.Column("position", NAME, nullable=False),
        sa.Column("nonce", NAME, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("feed", "position", "nonce", name=op.f("feed_entries_pk")),
    )
    op.create_index(op.f("feed_entries_by_time"), "feed_entries", ["feed", "at"])


def _create_anomalies() -> None:
    op.create_table(
        "anomalies",
        sa.Column("tenant_id", NAME, server_default="default", nullable=False),
        sa.Column("id", NAME, nullable=False),
        sa.Column("job_id", NAME, nullable=False),
        sa.Column("queue", NAME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("anomalies_pk")),
    )
    op.create_index(op.f("anomalies_by_job"), "anomalies", ["tenant_id", "job_id", "queue"])
    op.create_index(op.f("anomalies_by_time"), "anomalies", ["tenant_id", "at"])
