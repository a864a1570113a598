"""Columns are named after what they hold.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: Table, name before, name after.
COLUMNS: Final = (
    ("jobs", "told_at", "notified_at"),
    ("approvals", "told", "notified_status"),
    ("approval_votes", "person", "voter"),
    ("operator_events", "told_at", "notified_at"),
    ("outbox_lanes", "until", "lease_expires_at"),
    ("feed_positions", "until", "lease_expires_at"),
)
#: Table, columns, predicate before, predicate after; of the indexes `<table>_untold`, afterwards `<table>_unnotified`.
INDEXES: Final = (
    (
        "jobs",
        ["tenant_id", "finished_at"],
        "webhook IS NOT NULL AND told_at IS NULL AND finished_at IS NOT NULL",
        "webhook IS NOT NULL AND notified_at IS NULL AND finished_at IS NOT NULL",
    ),
    (
        "approvals",
        ["tenant_id", "requested_at"],
        "told IS NULL OR told <> status",
        "notified_status IS NULL OR notified_status <> status",
    ),
    (
        "operator_events",
        ["tenant_id", "at"],
        "told_at IS NULL AND type LIKE 'alert.%'",
        "notified_at IS NULL AND type LIKE 'alert.%'",
    ),
)


def upgrade() -> None:
    for table, before, after in COLUMNS:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {after}")
    for table, columns, _, predicate in INDEXES:
        _rename_index(table, columns, "untold", "unnotified", predicate)


def downgrade() -> None:
    for table, before, after in COLUMNS:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {after} TO {before}")
    for table, columns, predicate, _ in INDEXES:
        _rename_index(table, columns, "unnotified", "untold", predicate)


def _rename_index(table: str, columns: list[str], before: str, after: str, predicate: str) -> None:
    """SQLite cannot rename an index; PostgreSQL does it without reading the table."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER INDEX {table}_{before} RENAME TO {table}_{after}")
    else:
        op.drop_index(op.f(f"{table}_{before}"), table)
        op.create_index(op.f(f"{table}_{after}"), table, columns, sqlite_where=sa.text(predicate))
