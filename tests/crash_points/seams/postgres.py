"""The injection point for PostgreSQL: the driver's protocol, one statement, COPY or COMMIT.

SQLAlchemy's reads pass it too.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import asyncpg

from tests.crash_points.seams.open_handles import OpenHandles
from tests.crash_points.seams.seam import Seam

#: Whether connections that are made now are the user's own.
_outside: Final[ContextVar[bool]] = ContextVar("outside", default=False)


@contextmanager
def bypass_seam() -> Iterator[None]:
    """Make connections inside the block the user's own, without the seam."""
    token = _outside.set(True)
    try:
        yield
    finally:
        _outside.reset(token)


_TABLE: Final = re.compile(r"\b(?:INTO|UPDATE|FROM|COPY|TABLE)\s+(?:ONLY\s+)?\"?(?:\w+\"?\.\"?)?(\w+)", re.IGNORECASE)
_LOCKS: Final = re.compile(r"FOR (?:NO KEY )?(?:UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED| NOWAIT)?", re.IGNORECASE)
_WITHOUT_CHANGE: Final = frozenset({"BEGIN", "ROLLBACK", "SELECT", "SET", "SHOW", "LISTEN", "UNLISTEN", "ping"})
_VERB: Final = re.compile(r"\b(INSERT|UPDATE|DELETE|COPY|SELECT)\b", re.IGNORECASE)


def statement_name(query: str) -> str:
    """Name a statement by verb and table, for example `UPDATE jobs`. The same in every run."""
    query = _LOCKS.sub("", query)
    words = query.replace(";", " ").split()
    if not words:
        return "ping"
    first = words[0].upper()
    if first in ("WITH", "INSERT", "UPDATE", "DELETE", "SELECT", "COPY"):
        writes = re.search(r"\b(INSERT|UPDATE|DELETE)\b", query, re.IGNORECASE) if first == "WITH" else None
        verb = (writes or _VERB.search(query) or re.match(r"(\w+)", query)).group(1).upper()  # type: ignore[union-attr]
        table = _TABLE.search(query, query.upper().find(verb) if first == "WITH" else 0)
        return f"{verb} {table.group(1)}" if table else verb
    return first


def connecting_through(seam: Seam, handles: OpenHandles) -> Callable[..., None]:
    original = asyncpg.Connection.__init__

    def init(self: asyncpg.Connection, protocol: Any, *arguments: Any, **options: Any) -> None:
        intercepted = not _outside.get()
        if intercepted:
            protocol = _Protocol(seam, protocol, self)
        original(self, protocol, *arguments, **options)
        if intercepted:
            handles.add_postgres(self)

    return init


class _Protocol:
    """The driver's protocol, with the seam before each round trip."""

    def __init__(self, seam: Seam, real: Any, connection: asyncpg.Connection) -> None:
        self._seam = seam
        self._real = real
        self._connection = connection
        self._last = ""
        self._wrote = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def query(self, query: str, *arguments: Any, **options: Any) -> Any:
        name = statement_name(query)
        if name == "COMMIT":
            name = f"COMMIT after {self._last}"
        return await self._through(name, lambda: self._real.query(query, *arguments, **options))

    async def bind_execute(self, state: Any, *arguments: Any, **options: Any) -> Any:
        name = statement_name(state.query)
        return await self._through(name, lambda: self._real.bind_execute(state, *arguments, **options))

    async def bind_execute_many(self, state: Any, *arguments: Any, **options: Any) -> Any:
        name = statement_name(state.query)
        return await self._through(name, lambda: self._real.bind_execute_many(state, *arguments, **options))

    async def copy_in(self, statement: str, *arguments: Any, **options: Any) -> Any:
        name = statement_name(statement)
        return await self._through(name, lambda: self._real.copy_in(statement, *arguments, **options))

    async def _through(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self._last = name
        if name == "BEGIN":
            self._wrote = False
        writes = name.split()[0] not in _WITHOUT_CHANGE
        # Uncommitted changes are lost with the connection.
        changes = self._wrote if name.startswith("COMMIT") else writes and not self._real.is_in_transaction()
        self._wrote |= writes
        return await self._seam.through(name, call, _connection_lost, self._connection.terminate, changes=changes)


def _connection_lost() -> BaseException:
    return asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
