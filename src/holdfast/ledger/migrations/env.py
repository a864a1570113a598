"""Runs migrations on the connection that `ledger.migrate` passes, in its transaction."""

from __future__ import annotations

from alembic import context

from holdfast.schema.columns import TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=TABLE,
    # All or nothing. On SQLite this needs `revisions`, which keeps the driver from committing before DDL.
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
