"""Tables of approvals, the audit log, alerts and tokens (requirements L1, L6).

Conventions are those of `schema.jobs`.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, Column, PrimaryKeyConstraint, SmallInteger, Table, Text

from holdfast.schema.columns import NAME, InstantColumn, tenant
from holdfast.schema.columns import metadata as metadata

#: Approval requests (requirements A1–A3). The row is written with the move that holds the job.
approvals: Final = Table(
    "approvals",
    metadata,
    tenant(),
    Column("approval_id", NAME, nullable=False),
    Column("job_id", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("job_type", NAME, nullable=False),
    Column("status", NAME, nullable=False, server_default="requested"),
    #: Empty: a guard's request; otherwise the name that the task gave its request.
    Column("name", NAME, nullable=False, server_default=""),
    #: An approval is bound to the payload that was shown.
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
    #: When the engine applied the decision; NULL: not applied yet.
    Column("acked_at", InstantColumn),
    #: The status of which subscribers were last notified.
    Column("notified_status", NAME),
    PrimaryKeyConstraint("tenant_id", "approval_id"),
    CheckConstraint("status IN ('requested', 'approved', 'rejected', 'expired', 'withdrawn')", name="known_status"),
    CheckConstraint("(decided_at IS NULL) = (status = 'requested')", name="decision"),
    CheckConstraint("quorum > 0", name="quorum"),
)

#: One vote per approver and request.
approval_votes: Final = Table(
    "approval_votes",
    metadata,
    tenant(),
    Column("approval_id", NAME, nullable=False),
    Column("voter", NAME, nullable=False),
    Column("approve", SmallInteger, nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "approval_id", "voter"),
)

#: The audit log, and alerts (requirements H5, H6). Only `notified_at` changes; kept as long as finished jobs.
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
    #: When subscribers were notified, if there are any.
    Column("notified_at", InstantColumn),
    PrimaryKeyConstraint("tenant_id", "id"),
)

#: Alerts that are raised now, one row each for all processes.
alerts: Final = Table(
    "alerts",
    metadata,
    tenant(),
    Column("key", NAME, nullable=False),
    Column("raised_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("tenant_id", "key"),
)

#: Tasks that workers have announced, one row for each schema of a task. Not per tenant: workers serve every tenant.
announced_tasks: Final = Table(
    "announced_tasks",
    metadata,
    Column("task", NAME, nullable=False),
    #: Fingerprint of the schema.
    Column("fingerprint", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    #: JSON Schema of the arguments, as text: the order of its properties is that of the parameters. Empty: unknown.
    Column("schema", Text, nullable=False),
    Column("seen_at", InstantColumn, nullable=False),
    PrimaryKeyConstraint("task", "fingerprint"),
)

#: Tokens for the HTTP API. Not per tenant, since a token may have several tenants. Only the secret's hash is stored.
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
