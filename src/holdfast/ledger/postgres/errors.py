"""What PostgreSQL says, in our words: what is wrong, and what to do about it. No message holds a password."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import asyncpg

from holdfast.errors import HoldfastError, LedgerRefused, LedgerUnavailable

#: What a driver raises when the connection is gone. asyncpg's internal error: the server's farewell came between two
#: statements, and the end of the connection is still on its way.
_LOST: Final = (OSError, asyncio.TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
#: What it raises when the store, and not the statement, is at fault.
DOWN: Final = (*_LOST, asyncpg.PostgresError)

_ADVICE: Final[dict[type[BaseException], str]] = {
    ConnectionRefusedError: "nothing listens there; start PostgreSQL, or check host and port",
    ssl.SSLError: "TLS failed; check sslmode and sslrootcert in HOLDFAST_LEDGER",
    asyncpg.TooManyConnectionsError: "it is out of connections; raise its max_connections, or lower "
    "HOLDFAST_LEDGER_POOL_SIZE",
    asyncpg.ReadOnlySQLTransactionError: "it is read-only (a standby, or default_transaction_read_only); "
    "point HOLDFAST_LEDGER at the primary",
    asyncpg.DiskFullError: "its disk is full; make room, what waits in the feed is written then",
    asyncpg.OutOfMemoryError: "it is out of memory",
    asyncpg.AdminShutdownError: "it is being shut down",
    asyncpg.CrashShutdownError: "it has crashed and recovers",
    asyncpg.CannotConnectNowError: "it is starting up, shutting down or recovering; it will be tried again",
    asyncpg.InvalidPasswordError: "user or password is wrong; check HOLDFAST_LEDGER",
    asyncpg.InvalidAuthorizationSpecificationError: "it does not let this user in; see HOLDFAST_LEDGER and pg_hba.conf",
    asyncpg.InvalidCatalogNameError: "the database does not exist; create it, then run `holdfast migrate up`",
    asyncpg.InsufficientPrivilegeError: "this user may not do that; grant it the rights on the ledger's tables",
    asyncpg.UndefinedTableError: "a table is missing; run `holdfast migrate up`",
    asyncpg.UndefinedColumnError: "a column is missing; run `holdfast migrate up`",
    asyncpg.QueryCanceledError: "a statement took too long and was stopped; look for locks in pg_stat_activity",
    asyncpg.LockNotAvailableError: "a lock was not to be had in time; look for it in pg_locks",
    asyncpg.DeadlockDetectedError: "two transactions waited for each other; it will be tried again",
    asyncpg.SerializationError: "another transaction was faster; it will be tried again",
    asyncpg.IdleInTransactionSessionTimeoutError: "a transaction stood idle for too long and was ended",
    asyncpg.ConnectionDoesNotExistError: "the connection broke; it will be made again",
    asyncpg.InternalClientError: "the connection broke; it will be made again",
    asyncio.TimeoutError: "it accepts connections but does not answer in time; it may be stopped, or overloaded",
}

#: Server errors that say that the store is in trouble, beyond those above: connection, resources, operator, system.
_TROUBLE: Final = ("08", "25006", "53", "55P03", "57", "58", "40", "28", "3D", "42501", "42P01", "42703", "XX")
#: Those of them that say that the settings are wrong: user, password, database.
_REFUSED: Final = ("28", "3D")


def translate(error: BaseException, where: str) -> BaseException:
    """The error as ours, if it says that the ledger does not work; mistakes of our own (a broken CHECK, say) stay."""
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, asyncpg.PostgresError) and not (error.sqlstate or "").startswith(_TROUBLE):
        return error
    if not isinstance(error, DOWN) or _is_mistake(error):
        return error
    refused = isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "").startswith(_REFUSED)
    kind = LedgerRefused if refused else LedgerUnavailable
    return kind(f"the ledger {where} does not work: {_said(error)}; {_advice(error)}")


def is_lost(error: BaseException) -> bool:
    """Whether the connection is gone, rather than the statement refused."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(("08", "57P"))
    return isinstance(error, _LOST) and not _is_mistake(error)


@contextmanager
def translated(where: str, which: tuple[type[BaseException], ...] = DOWN) -> Iterator[None]:
    """Raises errors of the store as ours; with `which` only those."""
    try:
        yield
    except which as exc:
        ours = translate(exc, where)
        if ours is exc:
            raise
        raise ours from exc


def _is_mistake(error: BaseException) -> bool:
    # asyncpg says InterfaceError for a lost connection and for wrong arguments alike; the latter are ValueErrors, too.
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, (ValueError, TypeError))


def _said(error: BaseException) -> str:
    if isinstance(error, asyncpg.PostgresError):
        return str(error.args[0] if error.args else type(error).__name__)
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _advice(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if kind in _ADVICE:
            return _ADVICE[kind]
    if isinstance(error, asyncpg.PostgresError):
        return "see its log"
    return "check that it runs and can be reached"
