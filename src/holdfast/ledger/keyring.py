"""Keys of effects for people: which are in doubt or under way, and one of them with everything that is known."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Select, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port import KeyState
from holdfast.ledger.schema import idempotency_keys as keys


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One key. `value` is JSON text."""

    tenant_id: str
    key: str
    state: str
    function: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    reason: str | None
    value: str | None
    token: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None


_COLUMNS = tuple(keys.c[name] for name in KeyRow.__struct_fields__)


class Keyring:
    """Read-only; on PostgreSQL and SQLite alike."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def unsettled(
        self, tenant_id: str | None = None, state: KeyState | None = None, limit: int = 100
    ) -> list[KeyRow]:
        """Keys that are reserved or in doubt, the longest unchanged first. There are few: done ones are not read."""
        wanted = select(*_COLUMNS).where(keys.c.state != KeyState.DONE.value)
        if tenant_id is not None:
            wanted = wanted.where(keys.c.tenant_id == tenant_id)
        if state is not None:
            wanted = wanted.where(keys.c.state == state.value)
        return await self._rows(wanted.order_by(keys.c.updated_at).limit(limit))

    async def find(self, tenant_id: str, key: str) -> KeyRow | None:
        """One key."""
        rows = await self._rows(select(*_COLUMNS).where(keys.c.tenant_id == tenant_id, keys.c.key == key))
        return rows[0] if rows else None

    async def _rows(self, statement: Select[Any]) -> list[KeyRow]:
        try:
            async with self._engine.connect() as connection:
                found = (await connection.execute(statement)).mappings().all()
        except DBAPIError as exc:
            raise LedgerUnavailable(f"the ledger does not answer: {exc.orig}") from exc
        return [KeyRow(**row) for row in found]
