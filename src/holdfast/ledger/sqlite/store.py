"""One event loop's way to a SQLite ledger: the file's one writer for what writes, an engine for queries.

The same for a file of its own and for the engine's file (embedded); they differ in who made the tables.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, event
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast.engine.sqlite.connection import BUSY_TIMEOUT_MS, Prepare, translate
from holdfast.engine.sqlite.store import Place
from holdfast.engine.sqlite.transaction import Effects, Transaction
from holdfast.engine.sqlite.writer import Subscriber, Writer
from holdfast.engine.sqlite.writers import acquire, release
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.news import Turn, WaitingRoom
from holdfast.ledger.sqlite.reading import connect

T = TypeVar("T")

#: Looks at a ledger before anything else does, and raises if it is not ours to use.
Guard = Callable[[Transaction, str], None]

#: Connections that queries keep, and how many more they may make for a moment. Each is a thread.
_KEPT_READERS: Final = 1
_MORE_READERS: Final = 4


class FileNews:
    """Who waits for the file to move: told by the writer, which also looks for other processes' commits."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._room = WaitingRoom(watch)

    def of(self, queue: str) -> AbstractContextManager[Turn]:
        """Be told when this queue's feed has moved in the ledger (`transaction.effects.recorded`)."""
        return self._room.of(queue)

    def tell(self, effects: Effects) -> None:
        if effects.foreign:
            self._room.tell_all()
        else:
            self._room.tell(effects.recorded)


class SqliteStore:
    """Used on one event loop. Opens the file when first needed."""

    def __init__(self, place: Place, prepare: Prepare, guard: Guard | None = None) -> None:
        self.place = place
        self._guard = guard
        self._prepare = prepare
        self._writer: Writer | None = None
        self._subscriber: Subscriber | None = None
        self._readers: AsyncEngine | None = None
        self._opening: asyncio.Lock | None = None
        self._closed = False
        self._waiting = 0
        self.news = FileNews(self._watch)

    @property
    def path(self) -> Path:
        return self.place.path

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path)

    def sibling(self) -> SqliteStore:
        """For another event loop; the writer is shared."""
        return SqliteStore(self.place, self._prepare, self._guard)

    async def open(self) -> Writer:
        """Raises `LedgerUnavailable` if the file cannot be used; what `prepare` raises if it is not ours.

        Not needed before the first use, but after `close`."""
        self._closed = False
        return await self._ready()

    async def _ready(self) -> Writer:
        if self._closed:
            # Somebody who was still at it when the app was closed.
            raise LedgerUnavailable(f"the ledger {self.name} has been closed; open it to use it again")
        if self._writer is None:
            self._opening = self._opening or asyncio.Lock()
            async with self._opening:
                if self._writer is None:
                    writer = await asyncio.to_thread(self._acquire)
                    await self._look(writer)
                    self._subscriber = Subscriber(asyncio.get_running_loop(), self.news.tell)
                    writer.subscribe(self._subscriber)
                    self._writer = writer
                    self._watch_again()
        return self._writer

    async def close(self) -> None:
        """Safe to call twice; `open` makes it usable again."""
        self._closed = True
        writer, self._writer = self._writer, None
        if self._readers is not None:
            await self._readers.dispose()
        if writer is not None and self._subscriber is not None:
            writer.unsubscribe(self._subscriber)
            self._subscriber = None
            await asyncio.to_thread(release, writer)

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T:
        """Run `work(transaction, *arguments)` in the writer's thread; its result, once it is committed.

        Many share a commit; each is a savepoint. What moves a feed adds its queue to `transaction.effects.recorded`.
        """
        writer = self._writer or await self._ready()
        return await writer.perform(work, *arguments, lazy=lazy, unavailable=LedgerUnavailable)

    @property
    def readers(self) -> AsyncEngine:
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

    async def _look(self, writer: Writer) -> None:
        if self._guard is not None:
            try:
                await writer.perform(self._guard, self.name, unavailable=LedgerUnavailable)
            except BaseException:
                await asyncio.to_thread(release, writer)
                raise

    def _acquire(self) -> Writer:
        return acquire(
            self.path, durable=not self.place.temporary, prepare=self._prepare, unavailable=LedgerUnavailable
        )

    def _watch_again(self) -> None:
        """Those who began to wait before the file was open are watched for, too, and look once more."""
        if self._waiting and self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, self._waiting)
            self.news.tell(Effects(foreign=True))

    def _watch(self, change: int) -> None:
        self._waiting += change
        if self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, change)

    def _must_exist(self, *_: object) -> None:
        # Not made by who only looks.
        if not self.path.exists():
            raise LedgerUnavailable(f"there is no ledger {self.path} yet; a worker or `holdfast migrate up` makes it")

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
