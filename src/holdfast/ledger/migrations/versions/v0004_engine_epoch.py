"""The epoch of the engine in which each feed is read.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = sa.Text(collation="C") if op.get_bind().dialect.name == "postgresql" else sa.Text()
    op.add_column("feed_positions", sa.Column("engine_epoch", name, nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("feed_positions") as table:
        table.drop_column("engine_epoch")
