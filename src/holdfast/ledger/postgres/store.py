"""One event loop's way to a PostgreSQL ledger: a lazy pool for what writes, an engine for queries, a listener for news.

`transact` begins anew once if the connection it was given turns out to be dead (the server was restarted); after that
an error is the caller's: whether a lost commit may be repeated, only the caller knows.
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
from holdfast.ledger.postgres.errors import DOWN, is_lost, translate, translated
from holdfast.ledger.postgres.notifications import NotifyListener

T = TypeVar("T")

Connection = asyncpg.pool.PoolConnectionProxy
Work = Callable[[Connection], Awaitable[T]]
#: Looks at a ledger before anything else does, and raises if it is not ours to use.
StoreCheck = Callable[[asyncpg.Connection, str], Awaitable[None]]

#: What a URL may say after `?`; the rest of libpq's options would be ignored silently.
_OPTIONS: Final = frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey", "application_name", "options"})
#: For the session: a process that stops in mid-transaction must not hold its rows for ever.
_IDLE_IN_TRANSACTION_MS: Final = 60_000
#: How many connections queries keep; more are made for a moment, up to the pool's size.
_KEPT_READERS: Final = 1
#: How long to wait for a server to say goodbye; one that is silent is left.
_CLOSE_S: Final = 1.0


class PostgresAddress(msgspec.Struct, frozen=True):
    """A checked URL. `name` may be shown: it has no password."""

    dsn: str
    name: str

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Raises `InvalidOption` if it is none; the message does not repeat it, since it may hold a password."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            # What it says may be a piece of the password.
            raise InvalidOption(
                "the ledger's URL: host or port cannot be read; write a /, :, @, # or ? in the password as %2F, %3A …"
            ) from None
        if parts.scheme not in ("postgresql", "postgres"):
            raise InvalidOption("the ledger's URL must begin with postgresql://")
        database = unquote(parts.path[1:])
        if not database:
            raise InvalidOption("the ledger's URL names no database: postgresql://user:password@host:5432/database")
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
    """How to hold connections."""

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
        self.news = NotifyListener(self.connect, self.address.name)

    @property
    def name(self) -> str:
        """For messages: the URL without its password."""
        return self.address.name

    def clone(self) -> PostgresStore:
        """Connections of its own, for another event loop."""
        return PostgresStore(self.url, self.options, self._guard)

    async def open(self) -> None:
        """Connect, and look at the ledger. Not needed before the first use, but after `close`."""
        self._closed = False
        await self.execute("SELECT 1")

    async def close(self) -> None:
        """Give connections back, soon even if the server is silent. Safe to call twice; to use it again, `open` it."""
        self._closed = True
        pool, self._pool = self._pool, None
        await self.news.close()
        if self._readers is not None:
            await self._readers.dispose()
        if pool is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await pool.close()
            except TimeoutError:
                pool.terminate()
        # Connections that were dropped, not closed, give their sockets back in the next turn of the loop.
        await asyncio.sleep(0)

    # Writing ---------------------------------------------------------------------------------------

    async def transact(self, work: Work[T], *, serial: bool = False) -> T:
        """Run `work` in one transaction; its result, once that is committed.

        Raises `LedgerUnavailable`; when it came while committing, nobody knows whether it did.
        """
        begin = "BEGIN ISOLATION LEVEL SERIALIZABLE" if serial else "BEGIN"
        connection = await self._begin(begin)
        try:
            with translated(self.name):
                result = await work(connection)
                await connection.execute("COMMIT")
        except BaseException as exc:
            await self._abandon(connection, exc)
            raise
        await self._release(connection)
        return result

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """One statement on its own."""
        return await self._alone(lambda connection: connection.fetch(statement, *arguments))

    async def execute(self, statement: str, *arguments: Any) -> str:
        """One statement on its own; its tag, as in `DELETE 3`."""
        return await self._alone(lambda connection: connection.execute(statement, *arguments))

    async def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for many rows, in one transaction."""
        await self.transact(lambda connection: connection.executemany(statement, rows))

    async def _alone(self, work: Work[T]) -> T:
        """A statement that is its own transaction."""
        connection = await self._acquire()
        try:
            with translated(self.name):
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
        # Dead when it was taken: the server has been away, and the others of the pool are dead, too.
        pool = await self._ready()
        await pool.expire_connections()
        connection = await self._acquire()
        try:
            with translated(self.name):
                await connection.execute(begin)
        except BaseException as exc:
            await self._abandon(connection, exc, in_transaction=False)
            raise
        return connection

    async def _acquire(self) -> Connection:
        pool = await self._ready()
        patience = self.options.connect_timeout_s + self.options.reply_timeout_s
        try:
            async with asyncio.timeout(patience):
                return await pool.acquire()
        except TimeoutError as exc:
            if pool.get_idle_size() == 0 and pool.get_size() >= self.options.pool_size:
                raise LedgerUnavailable(
                    f"the ledger {self.name}: all {self.options.pool_size} connections have been busy for "
                    f"{patience:g} s; raise HOLDFAST_LEDGER_POOL_SIZE, or look at what is slow"
                ) from exc
            raise translate(exc, self.name) from exc
        except DOWN as exc:
            raise translate(exc, self.name) from exc

    async def _release(self, connection: Connection) -> None:
        if self._pool is None:
            _drop(connection)
            return
        with suppress(*DOWN):
            # The work is done; a connection that breaks now is nobody's trouble.
            await self._pool.release(connection, timeout=self.options.connect_timeout_s)

    async def _abandon(self, connection: Connection, error: BaseException, *, in_transaction: bool = True) -> None:
        """Roll back if the server listens, else drop the connection: it must not wait for a server that is silent."""
        cause = error.__cause__ if isinstance(error, LedgerUnavailable) and error.__cause__ is not None else error
        if not isinstance(cause, Exception) or is_lost(cause):
            # Cancelled in mid-statement, or gone.
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
        # Somebody may still be at it when the app is closed: a new connection would never be given back.
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
        """A new connection to a ledger that has been looked at. Raises `LedgerUnavailable`, or what the guard does."""
        self._check_open()
        # The pool passes its event loop and classes along.
        with translated(self.name):
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
        # Not as the pool's `init`: that would wait for the goodbye of a server that is silent.
        try:
            with translated(self.name):
                await connection.execute(_GO_BY_KEYS)
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
            # A dead connection in the pool: SQLAlchemy makes a new one.
            return None
        original = context.original_exception
        cause = original.__cause__ or original
        ours = translate(cause, self.name)
        return None if ours is cause else ours


class _Reader(asyncpg.Connection):
    """SQLAlchemy lets a time-out of its own ping through as it is; here it is ours. And it does not wait for long for
    a goodbye."""

    where = ""

    async def execute(self, *arguments: Any, **options: Any) -> str:
        with translated(self.where, (TimeoutError,)):
            return await super().execute(*arguments, **options)

    async def fetchrow(self, *arguments: Any, **options: Any) -> Any:
        with translated(self.where, (TimeoutError,)):
            return await super().fetchrow(*arguments, **options)

    async def close(self, *, timeout: float | None = None) -> None:
        try:
            await super().close(timeout=min(timeout or _CLOSE_S, _CLOSE_S))
        except DOWN:
            self.terminate()


#: Whatever writes finds its rows by a key. It is planned each time: a plan that was made while a table was empty would
#: read all of it, and be kept until the table is analysed. Nor is it compiled, which takes half a second: the settings
#: pretend costs that it has not.
_GO_BY_KEYS: Final = (
    "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;"
    " SET plan_cache_mode = force_custom_plan; SET jit = off"
)


async def _no_reset(_: asyncpg.Connection) -> None:
    """Nothing to undo: we change nothing in a session, and end every transaction ourselves. Saves a round trip."""


def _drop(connection: Connection) -> None:
    # A connection that the server has closed is the pool's already.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()
