"""Insert rows of `outbox_events` on the user's connection, in the transaction that is open there.

Never commits or rolls back. A connection in autocommit mode is refused: its event would remain even if the user's
changes are rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.errors import Conflict, HoldfastError, UsageError

HOW_TO: Final = (
    "the database of this connection has no table outbox_events; "
    "run `holdfast migrate up --ledger URL` with the URL of that database"
)

_ASYNC: Final = (
    "SQLAlchemy's AsyncConnection or AsyncSession, a connection of asyncpg (also from a pool) or of aiosqlite, "
    "or psycopg's AsyncConnection"
)
_SYNC: Final = "a connection of sqlite3, psycopg or Django, or SQLAlchemy's Connection or Session"


class OutboxRow(msgspec.Struct, frozen=True):
    """A row of `outbox_events`, fields in column order. The insert adds `created_at`."""

    tenant_id: str
    id: str
    destination: str
    topic: str
    key: str | None
    lane: int
    payload: str
    headers: str | None


_COLUMNS: Final = OutboxRow.__struct_fields__
_INSERT: Final = f"INSERT INTO outbox_events ({', '.join(_COLUMNS)}, created_at) VALUES "  # noqa: S608 - our own names
_ON_POSTGRES: Final = (
    f"{_INSERT} ({', '.join(f'${number}' for number in range(1, len(_COLUMNS) + 1))}, clock_timestamp())"
)
#: Placeholder style of psycopg and Django. The driver binds the values.
_PLACEHOLDERS: Final = ", ".join(["%s"] * len(_COLUMNS))
_ON_PSYCOPG: Final = f"{_INSERT} ({_PLACEHOLDERS}, clock_timestamp())"
_ON_DJANGO_SQLITE: Final = f"{_INSERT} ({_PLACEHOLDERS}, %s)"
_ON_SQLITE: Final = f"{_INSERT} ({', '.join('?' * len(_COLUMNS))}, ?)"


async def insert_events(connection: Any, rows: Sequence[OutboxRow]) -> None:
    """Insert rows. Raises `UsageError`, `Conflict` for an existing event id, or the error of the driver."""
    writer = _ASYNC_WRITERS.get(_kind(connection))
    if writer is None:
        raise _unfit(
            connection, supported=_ASYNC, other=_SYNC_WRITERS, instead="add_sync, add_many_sync or submit_sync"
        )
    try:
        await writer(connection, rows)
    except HoldfastError:
        raise
    except Exception as exc:
        raise _translate(exc) from exc


def insert_events_sync(connection: Any, rows: Sequence[OutboxRow]) -> None:
    """`insert_events` for blocking connections."""
    writer = _SYNC_WRITERS.get(_kind(connection))
    if writer is None:
        raise _unfit(connection, supported=_SYNC, other=_ASYNC_WRITERS, instead="add, add_many or submit")
    try:
        writer(connection, rows)
    except HoldfastError:
        raise
    except Exception as exc:
        raise _translate(exc) from exc


def _kind(connection: Any) -> tuple[str, str]:
    """Library and class by name, so that libraries which are not installed need no import."""
    known = _ASYNC_WRITERS.keys() | _SYNC_WRITERS.keys()
    for base in type(connection).__mro__:
        kind = (base.__module__.partition(".")[0], base.__name__)
        if kind in known:
            return kind
    return ("", "")


def _unfit(connection: Any, *, supported: str, other: dict[tuple[str, str], Any], instead: str) -> UsageError:
    name = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if _kind(connection) in other:
        return UsageError(f"{name} is not supported here; use {instead} for it, or pass {supported}")
    return UsageError(f"{name} is not a supported connection; pass {supported}, in a transaction")


# SQLAlchemy ------------------------------------------------------------------------------------------


async def _on_async_sqlalchemy(connection: Any, rows: Sequence[OutboxRow]) -> None:
    await connection.run_sync(_on_sqlalchemy, rows)


async def _on_async_scoped_session(sessions: Any, rows: Sequence[OutboxRow]) -> None:
    await _on_async_sqlalchemy(sessions(), rows)


def _on_sqlalchemy(connection: Any, rows: Sequence[OutboxRow]) -> None:
    # The caller has already imported SQLAlchemy.
    from sqlalchemy import func, insert

    from holdfast.schema import outbox_events

    if hasattr(connection, "get_bind"):
        connection = connection.connection(bind_arguments={"clause": outbox_events})
    if not connection.in_transaction():
        # The first statement would begin one anyway.
        connection.begin()
    match connection.dialect.name:
        case "postgresql":
            if connection.connection.dbapi_connection.autocommit:
                raise _commits_by_itself("use another isolation_level than AUTOCOMMIT")
            now: Any = func.clock_timestamp()
        case "sqlite":
            _check_sqlite(connection.connection.driver_connection)
            now = datetime.now(UTC)
        case other:
            raise UsageError(f"the outbox is for PostgreSQL and SQLite, not for {other}")
    connection.execute(insert(outbox_events).values(created_at=now), [msgspec.structs.asdict(row) for row in rows])


# asyncpg ---------------------------------------------------------------------------------------------


async def _on_asyncpg(connection: Any, rows: Sequence[OutboxRow]) -> None:
    if not connection.is_in_transaction():
        raise _commits_by_itself("open one: `async with connection.transaction():`")
    if len(rows) == 1:
        await connection.execute(_ON_POSTGRES, *msgspec.structs.astuple(rows[0]))
    else:
        await connection.executemany(_ON_POSTGRES, [msgspec.structs.astuple(row) for row in rows])


# psycopg 3 -------------------------------------------------------------------------------------------


async def _on_async_psycopg(connection: Any, rows: Sequence[OutboxRow]) -> None:
    from psycopg import AsyncCursor

    async with connection.pipeline() if _is_pipeline(connection) else nullcontext():
        _check_psycopg(connection, "async with connection.transaction():")
        # Not the connection's cursor factory: a RawCursor, for example, has other placeholders.
        async with AsyncCursor(connection) as cursor:
            if len(rows) == 1:
                await cursor.execute(_ON_PSYCOPG, msgspec.structs.astuple(rows[0]))
            else:
                await cursor.executemany(_ON_PSYCOPG, [msgspec.structs.astuple(row) for row in rows])


def _on_psycopg(connection: Any, rows: Sequence[OutboxRow]) -> None:
    from psycopg import Cursor

    with connection.pipeline() if _is_pipeline(connection) else nullcontext():
        _check_psycopg(connection, "with connection.transaction():")
        with Cursor(connection) as cursor:
            if len(rows) == 1:
                cursor.execute(_ON_PSYCOPG, msgspec.structs.astuple(rows[0]))
            else:
                cursor.executemany(_ON_PSYCOPG, [msgspec.structs.astuple(row) for row in rows])


def _is_pipeline(connection: Any) -> bool:
    """Whether the connection is in pipeline mode.

    A nested pipeline block synchronises at its start and end, which yields the transaction status and the errors of
    this statement.
    """
    from psycopg.pq import PipelineStatus

    return bool(connection.pgconn.pipeline_status != PipelineStatus.OFF)


def _check_psycopg(connection: Any, advice: str) -> None:
    from psycopg.pq import TransactionStatus

    # ACTIVE: a statement of another thread is running; libpq does not report whether it is in a transaction.
    outside = (TransactionStatus.IDLE, TransactionStatus.ACTIVE)
    if connection.autocommit and connection.info.transaction_status in outside:
        raise _commits_by_itself(f"open one: `{advice}`")


# Django ----------------------------------------------------------------------------------------------


def _on_django(connection: Any, rows: Sequence[OutboxRow]) -> None:
    match getattr(connection, "vendor", None):
        case "postgresql":
            statement, values = _ON_PSYCOPG, [msgspec.structs.astuple(row) for row in rows]
        case "sqlite":
            statement, values = _ON_DJANGO_SQLITE, _sqlite_values(rows)
        case None:
            # Django's proxy for a cache has the same class.
            raise _unfit(connection, supported=_SYNC, other={}, instead="")
        case other:
            raise UsageError(f"the outbox is for PostgreSQL and SQLite, not for {other}")
    if not connection.in_atomic_block and connection.get_autocommit():
        raise _commits_by_itself("open one: `with transaction.atomic():`")
    with connection.cursor() as cursor:
        cursor.executemany(statement, values)


# SQLite ----------------------------------------------------------------------------------------------


async def _on_aiosqlite(connection: Any, rows: Sequence[OutboxRow]) -> None:
    _check_sqlite(connection)
    async with connection.executemany(_ON_SQLITE, _sqlite_values(rows)):
        pass


def _on_sqlite(connection: Any, rows: Sequence[OutboxRow]) -> None:
    _check_sqlite(connection)
    connection.executemany(_ON_SQLITE, _sqlite_values(rows)).close()


def _sqlite_values(rows: Sequence[OutboxRow]) -> list[tuple[Any, ...]]:
    now_ms = time.time_ns() // 1_000_000
    return [(*msgspec.structs.astuple(row), now_ms) for row in rows]


def _check_sqlite(connection: Any) -> None:
    # Python 3.12 added `autocommit`; `isolation_level` still works.
    commits = connection.isolation_level is None or getattr(connection, "autocommit", False) is True
    if commits and not connection.in_transaction:
        raise _commits_by_itself("it is in autocommit mode: begin one, for example with BEGIN IMMEDIATE")


_ASYNC_WRITERS: Final[dict[tuple[str, str], Callable[[Any, Sequence[OutboxRow]], Awaitable[None]]]] = {
    ("sqlalchemy", "AsyncConnection"): _on_async_sqlalchemy,
    ("sqlalchemy", "AsyncSession"): _on_async_sqlalchemy,
    ("sqlalchemy", "async_scoped_session"): _on_async_scoped_session,
    ("asyncpg", "Connection"): _on_asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _on_asyncpg,
    ("aiosqlite", "Connection"): _on_aiosqlite,
    ("psycopg", "AsyncConnection"): _on_async_psycopg,
}
_SYNC_WRITERS: Final[dict[tuple[str, str], Callable[[Any, Sequence[OutboxRow]], None]]] = {
    ("sqlite3", "Connection"): _on_sqlite,
    ("sqlalchemy", "Connection"): _on_sqlalchemy,
    ("sqlalchemy", "Session"): _on_sqlalchemy,
    ("sqlalchemy", "scoped_session"): _on_sqlalchemy,
    ("psycopg", "Connection"): _on_psycopg,
    ("django", "BaseDatabaseWrapper"): _on_django,
    #: `django.db.connection`, a proxy for the wrapper of the current thread.
    ("django", "ConnectionProxy"): _on_django,
}


# Errors ----------------------------------------------------------------------------------------------


def _commits_by_itself(advice: str) -> UsageError:
    return UsageError(f"this connection is not in a transaction, so the event would be committed immediately; {advice}")


def _translate(error: Exception) -> Exception:
    """Translate errors that the caller can fix; return all others unchanged."""
    for cause in _causes(error):
        state, text = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None), str(cause)
        if "outbox_events" not in text:
            continue
        if state == "42P01" or "no such table" in text:
            return UsageError(HOW_TO)
        if state == "23505" or "UNIQUE constraint failed" in text:
            return Conflict("an event with this id already exists; omit event_id, or roll back")
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    while True:
        yield error
        below = getattr(error, "orig", None) or error.__cause__
        if below is None:
            return
        error = below
