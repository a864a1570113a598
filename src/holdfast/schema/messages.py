"""Tables of messages: outgoing events (`outbox_events`), and how incoming messages were handled."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from holdfast.core.publishing import LANES
from holdfast.schema.columns import NAME, InstantColumn, metadata, tenant


def _only(predicate: str) -> dict[str, Any]:
    return {"postgresql_where": text(predicate), "sqlite_where": text(predicate)}


#: Written in users' transactions, by programs in any language, so most columns have a default. The relay reads across
#: all tenants, by lane and position.
outbox_events: Final = Table(
    "outbox_events",
    metadata,
    tenant(),
    Column("id", NAME, nullable=False),
    #: The order of publishing within a key.
    Column("position", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=True), primary_key=True),
    Column("destination", NAME, nullable=False),
    Column("topic", NAME, nullable=False),
    #: NULL: published in any order.
    Column("key", NAME),
    #: By destination, topic and key: a relay leases whole lanes.
    Column("lane", SmallInteger, nullable=False),
    Column("payload", Text, nullable=False),
    #: A JSON object of texts.
    Column("headers", Text),
    Column("status", NAME, nullable=False, server_default="NEW"),
    Column("attempt_count", Integer, nullable=False, server_default="0"),
    Column("next_retry_at", InstantColumn),
    Column("last_error", Text),
    Column("created_at", InstantColumn, nullable=False),
    Column("sent_at", InstantColumn),
    UniqueConstraint("tenant_id", "id", name="by_id"),
    CheckConstraint("status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')", name="known_status"),
    # Relays read these lanes only: an event in another lane would never be published.
    CheckConstraint(f"lane BETWEEN 0 AND {LANES - 1}", name="known_lane"),
    CheckConstraint("(sent_at IS NOT NULL) = (status = 'SENT')", name="sent"),
    CheckConstraint("(next_retry_at IS NOT NULL) = (status = 'RETRYING')", name="next_retry"),
    # Positions of deleted rows are not reused: the order would be wrong.
    sqlite_autoincrement=True,
)
#: Events not tried yet, in order. These indexes lead with the lane, not with the tenant: the relay serves all tenants
#: at once.
Index(
    "waiting",
    outbox_events.c.lane,
    outbox_events.c.destination,
    outbox_events.c.position,
    _table=outbox_events,
    **_only("status = 'NEW'"),
)
#: The same events by key: a search steps to the next key without reading the events behind a retried one.
Index(
    "by_key",
    outbox_events.c.lane,
    outbox_events.c.destination,
    outbox_events.c.topic,
    text("coalesce(key, '')"),
    outbox_events.c.position,
    _table=outbox_events,
    **_only("status = 'NEW'"),
)
Index(
    "retrying",
    outbox_events.c.lane,
    outbox_events.c.next_retry_at,
    _table=outbox_events,
    **_only("status = 'RETRYING'"),
)
#: Events that block later events of their key.
Index(
    "in_the_way",
    outbox_events.c.destination,
    outbox_events.c.topic,
    outbox_events.c.key,
    outbox_events.c.status,
    outbox_events.c.position,
    _table=outbox_events,
    **_only("status IN ('RETRYING', 'DEAD')"),
)
#: For retention.
Index("by_sent", outbox_events.c.sent_at, _table=outbox_events, **_only("status = 'SENT'"))
Index("by_status", outbox_events.c.tenant_id, outbox_events.c.status, outbox_events.c.position, _table=outbox_events)

#: Which relay leases which lane, and until when. One row per lane, created on first use.
outbox_lanes: Final = Table(
    "outbox_lanes",
    metadata,
    Column("lane", SmallInteger, nullable=False, autoincrement=False),
    Column("relay", NAME, nullable=False),
    Column("lease_expires_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("lane"),
)

queue_executions: Final = Table(
    "queue_executions",
    metadata,
    tenant(),
    Column("id", NAME, nullable=False),
    Column("message_id", NAME, nullable=False),
    Column("queue_name", NAME, nullable=False),
    Column("event_name", NAME),
    Column("status", NAME, nullable=False),
    Column("started_at", InstantColumn, nullable=False),
    Column("completed_at", InstantColumn),
    Column("duration_ms", Integer),
    Column("agent_run_id", NAME),
    Column("error_message", Text),
    Column("retry_count", Integer, nullable=False, server_default="0"),
    Column("trace_id", NAME, nullable=False, server_default=""),
    PrimaryKeyConstraint("tenant_id", "id"),
)
Index("by_message", queue_executions.c.tenant_id, queue_executions.c.message_id, _table=queue_executions)
Index(
    "by_queue",
    queue_executions.c.tenant_id,
    queue_executions.c.queue_name,
    queue_executions.c.started_at,
    _table=queue_executions,
)
Index("by_time", queue_executions.c.tenant_id, queue_executions.c.started_at, _table=queue_executions)

#: Health of triggers, as their processes report it. Not per tenant, since a trigger takes messages of all tenants.
trigger_presences: Final = Table(
    "trigger_presences",
    metadata,
    Column("name", NAME, nullable=False),
    Column("process", NAME, nullable=False),
    Column("queue_name", NAME, nullable=False),
    Column("adapter", NAME, nullable=False),
    #: A JSON object.
    Column("health", Text, nullable=False),
    Column("seen_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("name", "process"),
)

#: Triggers that operators have paused.
trigger_pauses: Final = Table(
    "trigger_pauses",
    metadata,
    Column("name", NAME, nullable=False),
    Column("paused_by", NAME, nullable=False),
    Column("reason", Text, nullable=False),
    Column("paused_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("name"),
)
