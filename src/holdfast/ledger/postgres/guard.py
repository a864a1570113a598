"""The look at a PostgreSQL ledger before it is used: the right tables, and nobody else's."""

from __future__ import annotations

import asyncpg

from holdfast.ledger.owner import READ_OWNER, check_owner
from holdfast.ledger.postgres.store import Guard
from holdfast.ledger.version import READ_VERSION, check_version

_CLAIM = "INSERT INTO ledger_owner (id, namespace, since) VALUES (1, $1, now()) ON CONFLICT DO NOTHING"


def guard_for(namespace: str) -> Guard:
    """Raises `SchemaMismatch` or `InvalidOption`."""

    async def look(connection: asyncpg.Connection, where: str) -> None:
        try:
            version = await connection.fetchval(READ_VERSION)
        except asyncpg.UndefinedTableError:
            version = None
        check_version(where, version)
        owner = await connection.fetchval(READ_OWNER)
        if owner is None:
            await connection.execute(_CLAIM, namespace)
            owner = await connection.fetchval(READ_OWNER)
        check_owner(where, owner, namespace)

    return look
