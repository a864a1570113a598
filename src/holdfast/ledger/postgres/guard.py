"""The look at a PostgreSQL ledger before it is used: the right tables, and nobody else's."""

from __future__ import annotations

from contextlib import suppress

import asyncpg

from holdfast.ledger.owner import READ_OWNER, check_owner, is_another
from holdfast.ledger.postgres.store import Guard
from holdfast.ledger.version import READ_VERSION, check_version

_CLAIM = "INSERT INTO ledger_owner (id, namespace, engine, since) VALUES (1, $1, $2, now()) ON CONFLICT DO NOTHING"
_NOTE = "UPDATE ledger_owner SET engine = $1"


def guard_for(namespace: str, engine: str = "") -> Guard:
    """Raises `SchemaMismatch` or `InvalidOption`; warns if it was another engine's."""

    async def look(connection: asyncpg.Connection, where: str) -> None:
        try:
            version = await connection.fetchval(READ_VERSION)
        except asyncpg.UndefinedTableError:
            version = None
        check_version(where, version)
        owner = await connection.fetchrow(READ_OWNER)
        if owner is None:
            await connection.execute(_CLAIM, namespace, engine)
            owner = await connection.fetchrow(READ_OWNER)
            assert owner is not None
        check_owner(where, owner["namespace"], namespace)
        if is_another(where, owner["engine"], engine):
            # Who only reads may do so on a standby.
            with suppress(asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientPrivilegeError):
                await connection.execute(_NOTE, engine)

    return look
