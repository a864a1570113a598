"""Access to a PostgreSQL ledger from one event loop.

A lazy pool for writes, an SQLAlchemy engine for queries, and a listener for commits. `transact` begins again once if
its connection turns out to be dead (the server was restarted). Later errors are raised: only the caller knows whether a
lost commit may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import asyncpg
import msgspec
from sqlalchemy import event
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast.errors import InvalidOption, LedgerUnavailable
from holdfast.ledger.postgres.errors import DOWN, is_lost, translate, translate_errors
from holdfast.ledger.postgres.notifications import NotifyListener

T = TypeVar("T")

Connection = asyncpg.pool.PoolConnectionProxy
Work = Callable[[Connection], Awaitable[T]]
#: Checks a ledger before its first use, and raises if this process must not use it.
StoreCheck = Callable[[asyncpg.Connection, str], Awaitable[None]]

#: Options that a URL may have after `?`; libpq's others would be ignored silently.
_OPTIONS: Final = frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey", "application_name", "options"})
#: Session setting: a process that stops in mid-transaction must not keep its rows locked for ever.
_IDLE_IN_TRANSACTION_MS: Final = 60_000
#: Connections that queries keep; more are opened for a moment, up to the pool's size.
_KEPT_READERS: Final = 1
#: How long to wait for the server when closing; after that the connection is dropped.
_CLOSE_S: Final = 1.0


class PostgresAddress(msgspec.Struct, frozen=True):
    """A checked URL. `name` has no password and may be printed."""

    dsn: str
    name: str

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a URL. Raises `InvalidOption` for a wrong one.

        The message does not repeat the URL, which may contain a password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            # The original message may contain a part of the password.
            raise InvalidOption(
                "the ledger's URL: host or port cannot be read; encode /, :, @, # and ? in the password as %2F, %3A …"
            ) from None
        if parts.scheme not in ("postgresql", "postgres"):
            raise InvalidOption("the ledger's URL must begin with postgresql://")
        database = unquote(parts.path[1:])
        if not database:
            raise InvalidOption("the ledger's URL names no database; use postgresql://user:password@host:5432/database")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(given.keys() - _OPTIONS)
        if unknown:
            raise InvalidOption(
                f"the ledger's URL: unknown option {', '.join(unknown)}; known: {', '.join(sorted(_OPTIONS))}"
            )
        user = f"{quote(unquote(parts.username), safe='')}@" if parts.username else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else (parts.hostname or "localhost")
        where = host if port is None else f"{host}:{port}"
        login = parts.netloc.rpartition("@")[0]
        netloc = f"{login}@{where}" if login else where
        query = f"?{urlencode({'application_name': 'holdfast'} | given)}"
        return cls(
            dsn=f"postgresql://{netloc}/{quote(database, safe='')}{query}",
            name=f"postgresql://{user}{where}/{database}",
        )


class StoreOptions(msgspec.Struct, frozen=True):
    """Pool size and timeouts."""

    pool_size: int = 5
    connect_timeout_s: float = 5.0
    #: One statement; a store that is silent for longer counts as down.
    reply_timeout_s: float = 10.0


class PostgresStore:
    """Used on one event loop. Connects when first needed."""

    def __init__(self, url: str, options: StoreOptions | None = None, guard: StoreCheck | None = None) -> None:
        self._guard = guard
        self._trusted = guard is None
        self.address = PostgresAddress.parse(url)
        self.url = url
        self.options = options or StoreOptions()
        self._pool: asyncpg.Pool | None = None
        self._making: asyncio.Lock | None = None
        self._readers: AsyncEngine | None = None
        self._closed = False
        self.commits = NotifyListener(self.connect, self.address.name)

    @property
    def name(self) -> str:
        """For messages: the URL without its password."""
        return self.address.name

    def clone(self) -> PostgresStore:
        """A store with its own connections, for another event loop."""
        return PostgresStore(self.url, self.options, self._guard)

    async def open(self) -> None:
        """Connect and check the ledger. Optional before the first use, required after `close`."""
        self._closed = False
        await self.execute("SELECT 1")

    async def close(self) -> None:
        """Close connections, without a long wait for a silent server. Safe to call twice; `open` reverts it."""
        self._closed = True
        pool, self._pool = self._pool, None
        await self.commits.close()
        if self._readers is not None:
            await self._readers.dispose()
        if pool is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await pool.close()
            except TimeoutError:
                pool.terminate()
        # Connections that were dropped, not closed, release their sockets in the next iteration of the event loop.
        await asyncio.sleep(0)

    # Writing ---------------------------------------------------------------------------------------

    async def transact(self, work: Work[T], *, serial: bool = False) -> T:
        """Run `work` in one transaction; return its result after the commit.

        Raises `LedgerUnavailable`; if that happens while committing, the outcome is unknown.
        """
        begin = "BEGIN ISOLATION LEVEL SERIALIZABLE" if serial else "BEGIN"
        connection = await self._begin(begin)
        try:
            with translate_errors(self.name):
                result = await work(connection)
                await connection.execute("COMMIT")
        except BaseException as exc:
            await self._abandon(connection, exc)
            raise
        await self._release(connection)
        return result

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run one statement as its own transaction; return its rows."""
        return await self._alone(lambda connection: connection.fetch(statement, *arguments))

    async def execute(self, statement: str, *arguments: Any) -> str:
        """Run one statement as its own transaction; return its tag, for example `DELETE 3`."""
        return await self._alone(lambda connection: connection.execute(statement, *arguments))

    async def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for many rows, in one transaction."""
        await self.transact(lambda connection: connection.executemany(statement, rows))

    async def _alone(self, work: Work[T]) -> T:
        """Run a statement that is its own transaction."""
        connection = await self._acquire()
        try:
            with translate_errors(self.name):
                result = await work(connection)
        except BaseException as exc:
            await self._abandon(connection, exc, in_transaction=False)
            raise
        await self._release(connection)
        return result

    async def _begin(self, begin: str) -> Connection:
        connection = await self._acquire()
        try:
            await connection.execute(begin)
            return connection
        except BaseException as exc:
            await self._abandon(connection, exc, in_transaction=False)
            if not isinstance(exc, DOWN):
                raise
            if not is_lost(exc) or isinstance(exc, asyncio.TimeoutError):
                raise translate(exc, self.name) from exc
        # Dead when it was acquired: the server was unreachable, so the pool's other connections are dead as well.
        pool = await self._ready()
        await pool.expire_connections()
        connection = await self._acquire()
        try:
            with translate_errors(self.name):
                await connection.execute(begin)
        except BaseException as exc:
            await self._abandon(connection, exc, in_transaction=False)
            raise
        return connection

    async def _acquire(self) -> Connection:
        pool = await self._ready()
        timeout_s = self.options.connect_timeout_s + self.options.reply_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await pool.acquire()
        except TimeoutError as exc:
            if pool.get_idle_size() == 0 and pool.get_size() >= self.options.pool_size:
                raise LedgerUnavailable(
                    f"the ledger {self.name}: all {self.options.pool_size} connections have been busy for "
                    f"{timeout_s:g} s; raise HOLDFAST_LEDGER_POOL_SIZE, or find the slow statements"
                ) from exc
            raise translate(exc, self.name) from exc
        except DOWN as exc:
            raise translate(exc, self.name) from exc

    async def _release(self, connection: Connection) -> None:
        if self._pool is None:
            _drop(connection)
            return
        with suppress(*DOWN):
            # The work is done; a connection that breaks now does no harm.
            await self._pool.release(connection, timeout=self.options.connect_timeout_s)

    async def _abandon(self, connection: Connection, error: BaseException, *, in_transaction: bool = True) -> None:
        """Roll back if the server answers, else drop the connection: never wait for a silent server."""
        cause = error.__cause__ if isinstance(error, LedgerUnavailable) and error.__cause__ is not None else error
        if not isinstance(cause, Exception) or is_lost(cause):
            # Cancelled in mid-statement, or lost.
            _drop(connection)
        elif in_transaction:
            try:
                async with asyncio.timeout(self.options.reply_timeout_s):
                    await connection.execute("ROLLBACK")
            except BaseException as exc:
                _drop(connection)
                if not isinstance(exc, DOWN):
                    raise
        await self._release(connection)

    def _check_open(self) -> None:
        # A caller may still be running when the app is closed: its new connection would never be closed.
        if self._closed:
            raise LedgerUnavailable(f"the ledger {self.name} has been closed; open it to use it again")

    async def _ready(self) -> asyncpg.Pool:
        if self._pool is None:
            self._check_open()
            self._making = self._making or asyncio.Lock()
            async with self._making:
                if self._pool is None:
                    self._pool = await asyncpg.create_pool(
                        min_size=0,
                        max_size=self.options.pool_size,
                        connect=self._connect_writer,
                        reset=_no_reset,
                    )
        return self._pool

    async def connect(self, *_: Any, **options: Any) -> asyncpg.Connection:
        """A new connection to a checked ledger. Raises `LedgerUnavailable`, or what the check raises."""
        self._check_open()
        # The pool passes its event loop and classes along.
        with translate_errors(self.name):
            connection: asyncpg.Connection = await asyncpg.connect(
                self.address.dsn,
                **options,
                timeout=self.options.connect_timeout_s,
                command_timeout=self.options.reply_timeout_s,
                server_settings={"idle_in_transaction_session_timeout": str(_IDLE_IN_TRANSACTION_MS)},
            )
            if not self._trusted and self._guard is not None:
                try:
                    await self._guard(connection, self.name)
                except BaseException:
                    connection.terminate()
                    raise
                self._trusted = True
        return connection

    async def _connect_writer(self, *_: Any, **options: Any) -> asyncpg.Connection:
        connection = await self.connect(**options)
        # Not as the pool's `init`: that would wait for a silent server to close the connection.
        try:
            with translate_errors(self.name):
                await connection.execute(_WRITER_SETTINGS)
        except BaseException:
            connection.terminate()
            raise
        return connection

    # Reading ---------------------------------------------------------------------------------------

    @property
    def read_engine(self) -> AsyncEngine:
        """SQLAlchemy's engine, for queries. Errors of the store come out of it as `LedgerUnavailable`."""
        if self._readers is None:
            self._readers = create_async_engine(
                "postgresql+asyncpg://",
                async_creator=self._connect_reader,
                pool_pre_ping=True,
                pool_size=_KEPT_READERS,
                max_overflow=max(0, self.options.pool_size - _KEPT_READERS),
                pool_timeout=self.options.connect_timeout_s + self.options.reply_timeout_s,
            )
            event.listen(self._readers.sync_engine, "handle_error", self._translate_query)
        return self._readers

    async def _connect_reader(self) -> asyncpg.Connection:
        connection = await self.connect(connection_class=_Reader)
        assert isinstance(connection, _Reader)
        connection.where = self.name
        return connection

    def _translate_query(self, context: ExceptionContext) -> BaseException | None:
        if context.is_pre_ping:
            # A dead connection in the pool: SQLAlchemy opens a new one.
            return None
        original = context.original_exception
        cause = original.__cause__ or original
        translation = translate(cause, self.name)
        return None if translation is cause else translation


class _Reader(asyncpg.Connection):
    """A connection for queries.

    Translates a timeout of SQLAlchemy's ping, which SQLAlchemy would raise unchanged, and closes without a long wait.
    """

    where = ""

    async def execute(self, *arguments: Any, **options: Any) -> str:
        with translate_errors(self.where, (TimeoutError,)):
            return await super().execute(*arguments, **options)

    async def fetchrow(self, *arguments: Any, **options: Any) -> Any:
        with translate_errors(self.where, (TimeoutError,)):
            return await super().fetchrow(*arguments, **options)

    async def close(self, *, timeout: float | None = None) -> None:
        try:
            await super().close(timeout=min(timeout or _CLOSE_S, _CLOSE_S))
        except DOWN:
            self.terminate()


#: All writes find their rows by a key. Statements are planned each time: a plan made while a table was empty would read
#: all of it, and be kept until the table is analysed. JIT is off, because the settings inflate the estimated costs and
#: compiling takes half a second.
_WRITER_SETTINGS: Final = (
    "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;"
    " SET plan_cache_mode = force_custom_plan; SET jit = off"
)


async def _no_reset(_: asyncpg.Connection) -> None:
    """Nothing to reset: sessions are never changed, and every transaction is ended. Saves a round trip."""


def _drop(connection: Connection) -> None:
    # A connection that the server has closed is already back in the pool.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()
