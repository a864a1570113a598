"""Runs migrations on the connection that `ledger.migrate` passes, in its transaction."""

from __future__ import annotations

from alembic import context

from holdfast.schema.columns import TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=TABLE,
    # All or nothing, also on SQLite, whose DDL is transactional if only the driver lets it be.
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
