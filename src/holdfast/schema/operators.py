"""The ledger's tables, one schema for PostgreSQL and SQLite (requirements L1, L6).

Every business table and each of its indexes leads with `tenant_id`. Instants are `timestamptz` on PostgreSQL and whole
milliseconds (UTC) on SQLite; Python sees aware datetimes. JSON is kept as text, byte for byte as it was submitted: an
approval binds to it, and no digit of a number may change. `CHECK`s hold what must survive our own bugs.

The embedded engine has the same tables in its own file, with columns more of its own (`engine/sqlite/sql/schema.sql`).
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, Column, PrimaryKeyConstraint, SmallInteger, Table, Text

from holdfast.schema.columns import NAME, InstantColumn, tenant
from holdfast.schema.columns import metadata as metadata

#: Questions to people (requirements A1–A3). The row is written with the move that holds the job.
approvals: Final = Table(
    "approvals",
    metadata,
    tenant(),
    Column("approval_id", NAME, nullable=False),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("job_type", NAME, nullable=False),
    Column("status", NAME, nullable=False, server_default="requested"),
    #: Empty: a guard asks; else the name that the task gave its question.
    Column("name", NAME, nullable=False, server_default=""),
    #: Approval binds to the payload that was shown.
    Column("payload_hash", NAME, nullable=False),
    #: Names of the guard's rules, a JSON list.
    Column("policies", Text, nullable=False, server_default="[]"),
    Column("reason", Text, nullable=False, server_default=""),
    #: What the task shows, JSON.
    Column("details", Text),
    Column("quorum", SmallInteger, nullable=False, server_default="1"),
    Column("deadline", InstantColumn),
    Column("requested_by", Text, nullable=False),
    Column("requested_at", InstantColumn, nullable=False),
    Column("decided_by", Text),
    Column("decided_at", InstantColumn),
    Column("decision_reason", Text),
    #: When the engine was told; null: to be told (again).
    Column("acked_at", InstantColumn),
    #: The status that subscribers were last told of.
    Column("told", NAME),
    PrimaryKeyConstraint("tenant_id", "approval_id"),
    CheckConstraint("status IN ('requested', 'approved', 'rejected', 'expired', 'withdrawn')", name="known_status"),
    CheckConstraint("(decided_at IS NULL) = (status = 'requested')", name="decision"),
    CheckConstraint("quorum > 0", name="quorum"),
)

#: Who said what. A person has one vote.
approval_votes: Final = Table(
    "approval_votes",
    metadata,
    tenant(),
    Column("approval_id", NAME, nullable=False),
    Column("person", NAME, nullable=False),
    Column("approve", SmallInteger, nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "approval_id", "person"),
)

#: What people did, and alerts (requirements H5, H6): never changed, kept as long as finished jobs are.
operator_events: Final = Table(
    "operator_events",
    metadata,
    tenant(),
    #: Ordered by time, like job ids.
    Column("id", NAME, nullable=False),
    Column("type", NAME, nullable=False),
    Column("actor", Text, nullable=False),
    Column("target", NAME, nullable=False),
    Column("target_id", Text, nullable=False),
    Column("queue", NAME, nullable=False, server_default=""),
    Column("reason", Text, nullable=False, server_default=""),
    Column("before", Text),
    Column("after", Text),
    Column("at", InstantColumn, nullable=False),
    #: When subscribers were told, if there are any for it.
    Column("told_at", InstantColumn),
    PrimaryKeyConstraint("tenant_id", "id"),
)

#: Alerts that stand at the moment: one row each, whoever raised it.
alerts: Final = Table(
    "alerts",
    metadata,
    tenant(),
    Column("key", NAME, nullable=False),
    Column("raised_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "key"),
)

#: Who may come in over HTTP: of the system, since a token may be of several tenants. Never the secret, only its hash.
tokens: Final = Table(
    "tokens",
    metadata,
    Column("token_id", NAME, nullable=False),
    Column("name", NAME, nullable=False),
    Column("role", NAME, nullable=False),
    #: A JSON list; "*" is every tenant.
    Column("tenants", Text, nullable=False),
    Column("secret_hash", NAME, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", InstantColumn, nullable=False),
    Column("expires_at", InstantColumn),
    Column("revoked_at", InstantColumn),
    PrimaryKeyConstraint("token_id"),
    CheckConstraint("role IN ('viewer', 'operator', 'approver', 'admin')", name="known_role"),
)
