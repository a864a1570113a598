"""Tasks that workers have announced.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    name = sa.Text(collation="C") if is_postgresql else sa.Text()
    instant = sa.DateTime(timezone=True) if is_postgresql else sa.BigInteger()
    op.create_table(
        "announced_tasks",
        sa.Column("task", name, nullable=False),
        sa.Column("fingerprint", name, nullable=False),
        sa.Column("queue", name, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("schema", sa.Text, nullable=False),
        sa.Column("seen_at", instant, nullable=False),
        sa.PrimaryKeyConstraint("task", "fingerprint", name="announced_tasks_pk"),
    )


def downgrade() -> None:
    op.drop_table("announced_tasks")
