"""Translate errors of PostgreSQL into what is wrong and what to do about it.

No message contains a password.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import asyncpg

from holdfast.errors import HoldfastError, LedgerRefused, LedgerUnavailable

#: Raised by the driver when the connection is lost. It raises its internal error if the server's shutdown message came
#: between two statements and the connection is not closed yet.
_LOST: Final = (OSError, asyncio.TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
#: Raised by the driver when the store, and not the statement, is at fault.
DOWN: Final = (*_LOST, asyncpg.PostgresError)

_ADVICE: Final[dict[type[BaseException], str]] = {
    ConnectionRefusedError: "nothing listens there; start PostgreSQL, or check host and port",
    ssl.SSLError: "TLS failed; check sslmode and sslrootcert in HOLDFAST_LEDGER",
    asyncpg.TooManyConnectionsError: "it is out of connections; raise its max_connections, or lower "
    "HOLDFAST_LEDGER_POOL_SIZE",
    asyncpg.ReadOnlySQLTransactionError: "it is read-only (a standby, or default_transaction_read_only); "
    "point HOLDFAST_LEDGER at the primary",
    asyncpg.DiskFullError: "its disk is full; free space, then the feed is written",
    asyncpg.OutOfMemoryError: "it is out of memory",
    asyncpg.AdminShutdownError: "it is being shut down",
    asyncpg.CrashShutdownError: "it has crashed and is recovering",
    asyncpg.CannotConnectNowError: "it is starting up, shutting down or recovering; the call will be retried",
    asyncpg.InvalidPasswordError: "user or password is wrong; check HOLDFAST_LEDGER",
    asyncpg.InvalidAuthorizationSpecificationError: "it rejects this user; check HOLDFAST_LEDGER and pg_hba.conf",
    asyncpg.InvalidCatalogNameError: "the database does not exist; create it, then run `holdfast migrate up`",
    asyncpg.InsufficientPrivilegeError: "this user lacks a privilege; grant it the rights on the ledger's tables",
    asyncpg.UndefinedTableError: "a table is missing; run `holdfast migrate up`",
    asyncpg.UndefinedColumnError: "a column is missing; run `holdfast migrate up`",
    asyncpg.QueryCanceledError: "a statement took too long and was cancelled; check pg_stat_activity for locks",
    asyncpg.LockNotAvailableError: "a lock was not available in time; check pg_locks",
    asyncpg.DeadlockDetectedError: "two transactions waited for each other; the call will be retried",
    asyncpg.SerializationError: "another transaction was faster; the call will be retried",
    asyncpg.IdleInTransactionSessionTimeoutError: "a transaction was idle for too long and was ended",
    asyncpg.ConnectionDoesNotExistError: "the connection broke; it will be reopened",
    asyncpg.InternalClientError: "the connection broke; it will be reopened",
    asyncio.TimeoutError: "it accepts connections but does not answer in time; it may be stopped, or overloaded",
}

#: SQLSTATEs of a failing store, besides the errors above: connection, resources, operator, system.
_FAILING: Final = ("08", "25006", "53", "55P03", "57", "58", "40", "28", "3D", "42501", "42P01", "42703", "XX")
#: Those of them that mean wrong settings: user, password, database.
_REFUSED: Final = ("28", "3D")


def translate(error: BaseException, where: str) -> BaseException:
    """The error as `LedgerUnavailable` if the ledger is failing.

    Other errors (a violated CHECK) are returned unchanged.
    """
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, asyncpg.PostgresError) and not (error.sqlstate or "").startswith(_FAILING):
        return error
    if not isinstance(error, DOWN) or _is_mistake(error):
        return error
    refused = isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "").startswith(_REFUSED)
    kind = LedgerRefused if refused else LedgerUnavailable
    return kind(f"cannot use the ledger {where}: {_cause(error)}; {_advice(error)}")


def is_lost(error: BaseException) -> bool:
    """Whether the connection is lost, rather than the statement refused."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(("08", "57P"))
    return isinstance(error, _LOST) and not _is_mistake(error)


@contextmanager
def translate_errors(where: str, which: tuple[type[BaseException], ...] = DOWN) -> Iterator[None]:
    """Translate errors of the store, or only those of the given types."""
    try:
        yield
    except which as exc:
        error = translate(exc, where)
        if error is exc:
            raise
        raise error from exc


def _is_mistake(error: BaseException) -> bool:
    # asyncpg raises InterfaceError for a lost connection and for wrong arguments; the latter are also ValueErrors.
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, (ValueError, TypeError))


def _cause(error: BaseException) -> str:
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
