"""Effects in the user's own database (requirement E3): key, write and result in one transaction.

Such an effect is never in doubt: either all of it is committed or none of it. A second caller blocks on the unique
index of the key while the first transaction is open, and then gets its result. The keys are in the table
`idempotency_keys` of that database, which `create_keys_table` creates.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

from holdfast.core.codec import encode_json
from holdfast.core.job import Claim
from holdfast.effects.functions import arguments_fingerprint, check_key, decode_result, function_name, inside_step
from holdfast.effects.keys_table import HOW_TO
from holdfast.errors import EffectInDoubt, EffectMismatch, HoldfastError, Unavailable, UsageError
from holdfast.schema import idempotency_keys as keys

if TYPE_CHECKING:
    pass


#: asyncpg's exceptions for a server that shuts down or accepts no connections.
_ASYNCPG_DOWN: Final = (
    "PostgresConnectionError",
    "CannotConnectNowError",
    "AdminShutdownError",
    "CrashShutdownError",
    "TooManyConnectionsError",
)
#: asyncpg's exceptions for an unusable connection; from the user's function they may be a programming error.
_ASYNCPG_UNUSABLE: Final = ("InterfaceError", "InternalClientError")

#: The row of a key: state, value, function, fingerprint.
Recorded = tuple[str, str | None, str, str]


class UserTransaction(Protocol):
    """One open transaction in the user's database. `handle` is passed to the user's function."""

    handle: Any

    async def reserve(self, row: dict[str, Any]) -> bool:
        """Insert the key's row; returns whether the key was free. Blocks while another transaction has it."""
        ...

    async def get(self, tenant_id: str, key: str) -> Recorded | None: ...
    async def record(self, tenant_id: str, key: str, value: str) -> None: ...


async def transaction(
    claim: Claim,
    payload_limit: int,
    database: Any,
    key: str,
    function: Callable[..., Awaitable[Any]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call the function in a transaction, once per key; returns its result, now or recorded."""
    bound_to = (function_name(function), arguments_fingerprint(function, args, kwargs))
    row = _row(claim, check_key(key), bound_to)
    in_function = False
    try:
        async with _begin(database) as opened:
            while not await opened.reserve(row):
                recorded = await opened.get(claim.tenant_id, key)
                # None: the row has just been deleted, and the key is free again.
                if recorded is not None:
                    return decode_result(function, _value(key, recorded, bound_to))
            in_function = True
            with inside_step("transaction"):
                result = await _awaitable(function(opened.handle, *args, **kwargs), bound_to[0])
            in_function = False
            value = encode_json(result, f"the result of the transaction {key!r}", payload_limit)
            await opened.record(claim.tenant_id, key, value.decode())
        return decode_result(function, value)
    except HoldfastError:
        raise
    except Exception as exc:
        raise _translate(exc, in_function=in_function) from exc


def _awaitable(returned: Any, name: str) -> Awaitable[Any]:
    if not inspect.isawaitable(returned):
        raise UsageError(
            f"ctx.transaction takes an async function and {name} is not one; make it an `async def` that awaits its "
            "calls on the connection; nothing was written"
        )
    return returned


def _row(claim: Claim, key: str, bound_to: tuple[str, str]) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "tenant_id": claim.tenant_id,
        "key": key,
        "state": "reserved",
        "created_at": now,
        "updated_at": now,
        "function": bound_to[0],
        "fingerprint": bound_to[1],
        "token": uuid4().hex,
        "queue": claim.queue,
        "job_id": claim.job_id,
        "attempt": claim.attempt,
        "worker": claim.lease.worker,
    }


def _value(key: str, recorded: Recorded, bound_to: tuple[str, str]) -> bytes:
    state, value, function, arguments = recorded
    if function != bound_to[0]:
        raise EffectMismatch(key, f"it belongs to {function}, not to {bound_to[0]}")
    if arguments != bound_to[1]:
        raise EffectMismatch(key, f"{function} was called with other arguments under it")
    if value is None:
        # Only a ctx.effect can leave such a row, in a ledger that shares the database.
        raise EffectInDoubt(key, f"it is {state} by a ctx.effect")
    return value.encode()


def _translate(error: Exception, *, in_function: bool) -> Exception:
    """Turn errors of an unreachable database into `Unavailable`; others stay as they are."""
    driver = getattr(error, "orig", None) or error
    cause = getattr(driver, "__cause__", None) or driver
    if getattr(cause, "sqlstate", None) == "42P01" or "no such table: idempotency_keys" in str(error):
        return error if in_function else UsageError(HOW_TO)
    down = _is_of_asyncpg(cause, _ASYNCPG_DOWN)
    if isinstance(error, sqlalchemy_errors.DBAPIError):
        down = down or error.connection_invalidated or isinstance(cause, OSError)
    elif not in_function:
        down = down or isinstance(error, OSError) or _is_of_asyncpg(error, _ASYNCPG_UNUSABLE)
    return Unavailable(f"the database does not answer: {error}") if down else error


def _is_of_asyncpg(error: BaseException, names: Sequence[str]) -> bool:
    # Not imported: it may not be installed, and asyncpg's exceptions exist only where it is loaded.
    asyncpg = sys.modules.get("asyncpg")
    return asyncpg is not None and isinstance(error, tuple(getattr(asyncpg, name) for name in names))


# The databases ----------------------------------------------------------------------------------------


@asynccontextmanager
async def _begin(database: Any) -> AsyncIterator[UserTransaction]:
    if isinstance(database, AsyncEngine):
        async with database.begin() as connection:
            yield _Sqlalchemy(connection)
    elif isinstance(database, async_sessionmaker):
        async with database() as session, session.begin():
            yield _Sqlalchemy(session)
    elif isinstance(database, AsyncSession | AsyncConnection):
        if database.in_transaction():
            raise UsageError(
                "ctx.transaction begins and commits its own transaction; pass a connection without an open one"
            )
        async with database.begin():
            yield _Sqlalchemy(database)
    elif hasattr(database, "acquire") and _is_asyncpg(database):
        async with database.acquire() as connection, connection.transaction():
            yield _Asyncpg(connection)
    elif _is_asyncpg(database):
        if database.is_in_transaction():
            raise UsageError(
                "ctx.transaction begins and commits its own transaction; pass a connection without an open one"
            )
        async with database.transaction():
            yield _Asyncpg(database)
    else:
        raise UsageError(
            "ctx.transaction takes SQLAlchemy's AsyncEngine, async_sessionmaker, AsyncSession or AsyncConnection, "
            f"or a pool or connection of asyncpg, not {type(database).__qualname__}"
        )


def _is_asyncpg(database: Any) -> bool:
    return type(database).__module__.partition(".")[0] == "asyncpg"


class _Sqlalchemy(UserTransaction):
    def __init__(self, handle: AsyncSession | AsyncConnection) -> None:
        self.handle = handle

    async def reserve(self, row: dict[str, Any]) -> bool:
        dialect = await _dialect_of(self.handle)
        if dialect == "postgresql":
            statement = postgresql.insert(keys).values(row).on_conflict_do_nothing().returning(keys.c.key)
        elif dialect == "sqlite":
            statement = sqlite.insert(keys).values(row).on_conflict_do_nothing().returning(keys.c.key)
        else:
            raise UsageError(f"ctx.transaction works on PostgreSQL and SQLite, not on {dialect}")
        return (await self.handle.execute(statement)).scalar_one_or_none() is not None

    async def get(self, tenant_id: str, key: str) -> Recorded | None:
        query = select(keys.c.state, keys.c.value, keys.c.function, keys.c.fingerprint).where(
            keys.c.tenant_id == tenant_id, keys.c.key == key
        )
        row = (await self.handle.execute(query)).one_or_none()
        return None if row is None else (row[0], row[1], row[2], row[3])

    async def record(self, tenant_id: str, key: str, value: str) -> None:
        await self.handle.execute(
            update(keys)
            .where(keys.c.tenant_id == tenant_id, keys.c.key == key)
            .values(state="done", value=value, updated_at=datetime.now(UTC))
        )


async def _dialect_of(handle: AsyncSession | AsyncConnection) -> str:
    if isinstance(handle, AsyncSession):
        return handle.get_bind(clause=keys).dialect.name
    return handle.dialect.name


_COLUMNS: Final = (
    "tenant_id", "key", "state", "created_at", "updated_at", "function", "fingerprint", "token", "queue", "job_id",
    "attempt", "worker",
)  # fmt: skip
_INSERT: Final = (
    f"INSERT INTO idempotency_keys ({', '.join(_COLUMNS)}) "  # noqa: S608 - constant names
    f"VALUES ({', '.join(f'${number}' for number in range(1, len(_COLUMNS) + 1))}) ON CONFLICT DO NOTHING"
)
_SELECT: Final = "SELECT state, value, function, fingerprint FROM idempotency_keys WHERE tenant_id = $1 AND key = $2"
_UPDATE: Final = (
    "UPDATE idempotency_keys SET state = 'done', value = $3, updated_at = now() WHERE tenant_id = $1 AND key = $2"
)


class _Asyncpg(UserTransaction):
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def reserve(self, row: dict[str, Any]) -> bool:
        tag: str = await self.handle.execute(_INSERT, *(row[column] for column in _COLUMNS))
        return tag.endswith(" 1")

    async def get(self, tenant_id: str, key: str) -> Recorded | None:
        row = await self.handle.fetchrow(_SELECT, tenant_id, key)
        return None if row is None else (row["state"], row["value"], row["function"], row["fingerprint"])

    async def record(self, tenant_id: str, key: str, value: str) -> None:
        await self.handle.execute(_UPDATE, tenant_id, key, value)
