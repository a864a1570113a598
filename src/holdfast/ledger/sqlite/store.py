"""Access to a SQLite ledger from one event loop: the file's writer, and a query engine.

The same for a ledger's own file and for the engine's file (embedded); only `prepare`, which creates the tables,
differs. `prepare_ledger` creates them in an empty file and checks a file that is not empty; it refuses an engine's
file.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiosqlite
from sqlalchemy import URL, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast.errors import InvalidOption, LedgerUnavailable
from holdfast.ledger.waiters import CommitWaiter, CommitWaiters
from holdfast.schema.columns import HEAD, READ_VERSION, TABLE, check_version, metadata
from holdfast.sqlite.connection import APPLICATION_ID as ENGINE_ID
from holdfast.sqlite.connection import BUSY_TIMEOUT_MS, DatabaseFile, Prepare, translate
from holdfast.sqlite.transaction import CommitNotices, Transaction
from holdfast.sqlite.writer import CommitSubscriber, Writer, acquire_writer, release_writer

#: "hflg": marks the file as a ledger's.
APPLICATION_ID: Final = 0x68666C67


def prepare_ledger(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file, or check the existing ones.

    Raises `InvalidOption` for a file of another kind, `SchemaMismatch` for one of another release.
    """
    if _is_current(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Checked again: another process may have created them first.
        if not _is_current(connection, path):
            _create(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def foreign(path: Path, owner: int) -> InvalidOption:
    """The error for a file that is not a ledger's."""
    if owner == ENGINE_ID:
        return InvalidOption(
            f"{path} is an engine's database, not a ledger's; name another file, or leave HOLDFAST_LEDGER unset where "
            "HOLDFAST_URL is this file: then it contains the ledger, too"
        )
    return InvalidOption(f"{path} belongs to another program; give the ledger another file")


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    if not tables and owner in (0, APPLICATION_ID):
        # Empty, or migrated down.
        return False
    if owner != APPLICATION_ID:
        raise foreign(path, owner)
    try:
        row = connection.execute(READ_VERSION).fetchone()
    except sqlite3.OperationalError:
        row = None
    check_version(str(path), row and row[0])
    return True


def _create(connection: sqlite3.Connection) -> None:
    dialect = sqlite.dialect()
    for table in metadata.sorted_tables:
        connection.execute(str(CreateTable(table).compile(dialect=dialect)))
        for index in table.indexes:
            connection.execute(str(CreateIndex(index).compile(dialect=dialect)))
    connection.execute(
        f"CREATE TABLE {TABLE} (version_num VARCHAR(32) NOT NULL, CONSTRAINT {TABLE}_pkc PRIMARY KEY (version_num))"
    )
    connection.execute(f"INSERT INTO {TABLE} (version_num) VALUES (?)", (HEAD,))  # noqa: S608 - a constant
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


#: Rows that are fetched at a time, as in aiosqlite.
_ROWS: Final = 64


class InterruptibleConnection(aiosqlite.Connection):
    """A connection that can be stopped twice.

    aiosqlite (0.22) never answers a second `stop`, because its thread has ended with the first. SQLAlchemy stops a
    connection again if the caller that closes it is cancelled, for example when a process ends in the middle of a long
    query, and then the event loop would never end.
    """

    _stopped: asyncio.Future[Any] | None = None

    def stop(self) -> asyncio.Future[Any] | None:
        if self._stopped is None:
            self._stopped = super().stop()
        return self._stopped


def connect(database: str, **options: Any) -> InterruptibleConnection:
    """Return a connection, to be awaited.

    A call that its thread is running does not keep the process from ending.
    """
    connection = InterruptibleConnection(partial(sqlite3.connect, database, **options), _ROWS)
    connection._thread.daemon = True
    return connection


T = TypeVar("T")

#: Checks a ledger before its first use, and raises if this process must not use it.
Guard = Callable[[Transaction, str], None]

#: Connections that queries keep, and how many more they may open for a moment. Each is a thread.
_KEPT_READERS: Final = 1
_MORE_READERS: Final = 4


class FileCommitListener:
    """The waiters for commits, notified by the writer, which also detects commits of other processes."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._waiters = CommitWaiters(watch)

    def listen(self, queue: str) -> AbstractContextManager[CommitWaiter]:
        """A waiter that is notified when this queue's feed has moved in the ledger.

        Operations report that in `transaction.effects.recorded`.
        """
        return self._waiters.waiting_for(queue)

    def notify(self, effects: CommitNotices) -> None:
        if effects.external:
            self._waiters.notify_all()
        else:
            self._waiters.notify(effects.recorded)


class SqliteLedgerStore:
    """Used on one event loop. Opens the file when first needed."""

    def __init__(self, file: DatabaseFile, prepare: Prepare, guard: Guard | None = None) -> None:
        self.file = file
        self._guard = guard
        self._prepare = prepare
        self._writer: Writer | None = None
        self._subscriber: CommitSubscriber | None = None
        self._readers: AsyncEngine | None = None
        self._opening: asyncio.Lock | None = None
        self._closed = False
        self._waiting = 0
        self.commits = FileCommitListener(self._watch)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def sibling(self) -> SqliteLedgerStore:
        """A store for another event loop; the writer is shared."""
        return SqliteLedgerStore(self.file, self._prepare, self._guard)

    async def open(self) -> Writer:
        """Open the file. Optional before the first use, required after `close`.

        Raises `LedgerUnavailable` if the file cannot be used, or what `prepare` and the check raise.
        """
        self._closed = False
        return await self._ready()

    async def _ready(self) -> Writer:
        if self._closed:
            # A caller was still running when the app was closed.
            raise LedgerUnavailable(f"the ledger {self.name} has been closed; open it to use it again")
        if self._writer is None:
            self._opening = self._opening or asyncio.Lock()
            async with self._opening:
                if self._writer is None:
                    writer = await asyncio.to_thread(self._acquire)
                    await self._check(writer)
                    self._subscriber = CommitSubscriber(asyncio.get_running_loop(), self.commits.notify)
                    writer.subscribe(self._subscriber)
                    self._writer = writer
                    self._watch_again()
        return self._writer

    async def close(self) -> None:
        """Close the file. Safe to call twice; `open` makes the store usable again."""
        self._closed = True
        writer, self._writer = self._writer, None
        if self._readers is not None:
            await self._readers.dispose()
        if writer is not None and self._subscriber is not None:
            writer.unsubscribe(self._subscriber)
            self._subscriber = None
            await asyncio.to_thread(release_writer, writer)

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T:
        """Run `work(transaction, *arguments)` in the writer's thread; return its result after the commit.

        Many calls share a commit; each is a savepoint. Work that moves a feed adds its queue to
        `transaction.effects.recorded`.
        """
        writer = self._writer or await self._ready()
        return await writer.perform(work, *arguments, lazy=lazy, unavailable=LedgerUnavailable)

    @property
    def read_engine(self) -> AsyncEngine:
        """SQLAlchemy's engine, for queries. Errors of the file come out of it as `LedgerUnavailable`."""
        if self._readers is None:
            self._readers = create_async_engine(
                URL.create(
                    "sqlite+aiosqlite", database=f"file:{quote(str(self.path))}", query={"mode": "rw", "uri": "true"}
                ),
                connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "async_creator_fn": connect},
                pool_size=_KEPT_READERS,
                max_overflow=_MORE_READERS,
            )
            event.listen(self._readers.sync_engine, "do_connect", self._must_exist)
            event.listen(self._readers.sync_engine, "connect", _only_read)
            event.listen(self._readers.sync_engine, "handle_error", self._translate_query)
        return self._readers

    async def _check(self, writer: Writer) -> None:
        if self._guard is not None:
            try:
                await writer.perform(self._guard, self.name, unavailable=LedgerUnavailable)
            except BaseException:
                await asyncio.to_thread(release_writer, writer)
                raise

    def _acquire(self) -> Writer:
        return acquire_writer(
            self.path, durable=not self.file.temporary, prepare=self._prepare, unavailable=LedgerUnavailable
        )

    def _watch_again(self) -> None:
        """Watch also for callers that waited before the file was open, and wake them to check again."""
        if self._waiting and self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, self._waiting)
            self.commits.notify(CommitNotices(external=True))

    def _watch(self, change: int) -> None:
        self._waiting += change
        if self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, change)

    def _must_exist(self, *_: object) -> None:
        # A query does not create the file.
        if not self.path.exists():
            raise LedgerUnavailable(
                f"there is no ledger {self.path} yet; start a worker or run `holdfast migrate up` to create it"
            )

    def _translate_query(self, context: ExceptionContext) -> BaseException | None:
        original = context.original_exception
        if isinstance(original, sqlite3.OperationalError | sqlite3.DatabaseError) and not isinstance(
            original, sqlite3.IntegrityError | sqlite3.ProgrammingError
        ):
            return translate(original, self.path, LedgerUnavailable)
        return None


def _only_read(connection: DBAPIConnection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only = ON")
    cursor.close()
