"""Where calls leave for a store, and how one of them fails.

A `Seam` stands at the last place in this process that every call to a store passes:

- Redis: `Connection.call`, one command or script on one socket;
- PostgreSQL: the driver's protocol object, one statement, COPY or COMMIT (SQLAlchemy's reads pass it, too);
- SQLite: the writer's transaction, a reader's question, a query of SQLAlchemy.

Each call has a name (`submit`, `COMMIT after INSERT dlq_items`, …), and is told from others of its name by counting. At
one of them something happens, by `Way`. Everything else goes through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from importlib.resources import files
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import asyncpg
from sqlalchemy import Engine as SqlEngine
from sqlalchemy import event

from holdfast.engine.redis import client as redis_client
from holdfast.engine.redis.connection import Connection
from holdfast.engine.sqlite import writers
from holdfast.engine.sqlite.reader import Reader
from holdfast.engine.sqlite.writer import Writer
from holdfast.errors import EngineUnavailable, LedgerUnavailable, Unavailable


class Way(StrEnum):
    """How a call fails."""

    #: The connection breaks before the store has heard of it.
    BEFORE = "before"
    #: The store has applied it, and the process is dead before it hears so: nothing of its memory is left.
    AFTER = "after"
    #: The store has applied it, the connection breaks, and the process has to cope.
    LOST = "lost"


class Point(NamedTuple):
    """The `number`-th call of this name, and how it fails."""

    call: str
    number: int
    way: Way

    def __str__(self) -> str:
        return f"{self.call}#{self.number}:{self.way}"

    @classmethod
    def parse(cls, text: str) -> Point:
        place, _, way = text.rpartition(":")
        call, _, number = place.rpartition("#")
        return cls(call, int(number), Way(way))


class Seam:
    """Counts calls, and fails one. Used by one process at a time; `reborn` when the next one begins."""

    def __init__(self, point: Point | None = None) -> None:
        self.point = point
        #: Every call in order, for who wants to fail them all.
        self.calls: list[tuple[str, int]] = []
        self.fired = False
        self.dead = False
        #: Calls of whoever looks from outside are none of the story's.
        self.off = False
        self._counts: Counter[str] = Counter()
        self._died: Callable[[], object] = lambda: None
        #: Gives back what a dead process had open; on the loop that opened it.
        self.abandon: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def reborn(self, died: Callable[[], object]) -> None:
        """A new process; `died` is called when it dies."""
        self.dead, self._died = False, died

    def way_of(self, name: str) -> Way | None:
        """What is to happen to this call: most go through."""
        if self.off:
            return None
        with self._lock:
            self._counts[name] += 1
            place = (name, self._counts[name])
            self.calls.append(place)
            if self.point is not None and place == self.point[:2] and not self.fired:
                self.fired = True
                return self.point.way
        return None

    def die(self) -> None:
        self.dead = True
        self._died()

    async def through(
        self, name: str, call: Callable[[], Awaitable[Any]], fail: Callable[[], BaseException], cut: Callable[[], None]
    ) -> Any:
        """Make the call, or what becomes of it. `fail` makes the error of a connection that `cut` has broken."""
        if self.dead:
            # Nobody is there who could call.
            raise asyncio.CancelledError
        match self.way_of(name):
            case None:
                return await call()
            case Way.BEFORE:
                cut()
                raise fail()
            case Way.LOST:
                await call()
                cut()
                raise fail()
            case Way.AFTER:
                await call()
                self.die()
                raise asyncio.CancelledError


#: Whether connections that are made now are the user's own.
_outside: Final[ContextVar[bool]] = ContextVar("outside", default=False)


@contextmanager
def outside() -> Iterator[None]:
    """Connections that are made inside are the user's, and none of the story's."""
    token = _outside.set(True)
    try:
        yield
    finally:
        _outside.reset(token)


@contextmanager
def installed(seam: Seam) -> Iterator[None]:
    """Every store of this process behind the seam, and nobody waits before trying again."""
    opened = _Opened()
    with (
        patch.object(Connection, "call", _redis_call(seam, opened)),
        patch.object(asyncpg.Connection, "__init__", _postgres_connection(seam, opened)),
        patch.object(Writer, "perform", _sqlite_write(seam)),
        patch.object(Reader, "ask", _sqlite_read(seam)),
        patch("holdfast.core.backoff.Backoff.next_s", _at_once),
        _sqlite_queries(seam),
    ):
        seam.abandon = opened.abandon
        yield


class _Opened:
    """What a dead process leaves behind for its operating system to close."""

    def __init__(self) -> None:
        self._redis: set[Connection] = set()
        self._postgres: set[asyncpg.Connection] = set()

    def redis(self, connection: Connection) -> None:
        self._redis.add(connection)

    def postgres(self, connection: asyncpg.Connection) -> None:
        self._postgres.add(connection)

    def abandon(self) -> None:
        """On the loop that opened them."""
        for connection in self._redis:
            connection.close()
        for database in self._postgres:
            if not database.is_closed():
                database.terminate()
        self._redis.clear()
        self._postgres.clear()
        for writer in list(writers._writers.values()):
            del writers._writers[writer.path]
            writer.close()


def _at_once(backoff: Any) -> float:
    backoff.failures += 1
    return 0.001


# Redis ---------------------------------------------------------------------------------------------


def scripts() -> list[Any]:
    """All of the engine's, as it would send them."""
    folder = files("holdfast.engine.redis") / "lua"
    names = sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
    return [redis_client.Script(name) for name in names if not name.startswith("_")]


#: Of connecting, not of work.
_GREETINGS: Final = frozenset({"AUTH", "SELECT", "HELLO", "SCRIPT"})


def _redis_call(seam: Seam, opened: _Opened) -> Callable[..., Any]:
    original = Connection.call
    names = {script.sha: script.name for script in scripts()}

    def call(self: Connection, *command: Any, blocks_s: float = 0.0) -> Any:
        opened.redis(self)
        word = _text(command[0]).upper()
        if word in _GREETINGS or seam.off:
            return original(self, *command, blocks_s=blocks_s)
        name = names.get(command[1], word) if word == "EVALSHA" else word
        return asyncio.ensure_future(
            seam.through(
                name,
                lambda: original(self, *command, blocks_s=blocks_s),
                lambda: ConnectionResetError("the connection was cut"),
                self.close,
            )
        )

    return call


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


# PostgreSQL ----------------------------------------------------------------------------------------

_TABLE: Final = re.compile(r"\b(?:INTO|UPDATE|FROM|COPY|TABLE)\s+(?:ONLY\s+)?\"?(?:\w+\"?\.\"?)?(\w+)", re.IGNORECASE)
_LOCKS: Final = re.compile(r"FOR (?:NO KEY )?(?:UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED| NOWAIT)?", re.IGNORECASE)
_VERB: Final = re.compile(r"\b(INSERT|UPDATE|DELETE|COPY|SELECT)\b", re.IGNORECASE)


def _statement(query: str) -> str:
    """`UPDATE jobs`: enough to tell one from another, and the same in every run."""
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


def _postgres_connection(seam: Seam, opened: _Opened) -> Callable[..., None]:
    original = asyncpg.Connection.__init__

    def init(self: asyncpg.Connection, protocol: Any, *arguments: Any, **options: Any) -> None:
        ours = not _outside.get()
        if ours:
            protocol = _Protocol(seam, protocol, self)
        original(self, protocol, *arguments, **options)
        if ours:
            opened.postgres(self)

    return init


class _Protocol:
    """The driver's own, with the seam before each round trip that does something."""

    def __init__(self, seam: Seam, real: Any, connection: asyncpg.Connection) -> None:
        self._seam = seam
        self._real = real
        self._connection = connection
        self._last = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def query(self, query: str, *arguments: Any, **options: Any) -> Any:
        name = _statement(query)
        if name == "COMMIT":
            name = f"COMMIT after {self._last}"
        return await self._through(name, lambda: self._real.query(query, *arguments, **options))

    async def bind_execute(self, state: Any, *arguments: Any, **options: Any) -> Any:
        name = _statement(state.query)
        return await self._through(name, lambda: self._real.bind_execute(state, *arguments, **options))

    async def bind_execute_many(self, state: Any, *arguments: Any, **options: Any) -> Any:
        name = _statement(state.query)
        return await self._through(name, lambda: self._real.bind_execute_many(state, *arguments, **options))

    async def copy_in(self, statement: str, *arguments: Any, **options: Any) -> Any:
        name = _statement(statement)
        return await self._through(name, lambda: self._real.copy_in(statement, *arguments, **options))

    async def _through(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self._last = name
        return await self._seam.through(name, call, _gone, self._connection.terminate)


def _gone() -> BaseException:
    return asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


# SQLite --------------------------------------------------------------------------------------------


def _sqlite_write(seam: Seam) -> Callable[..., Any]:
    original = Writer.perform

    async def perform(
        self: Writer,
        work: Callable[..., Any],
        *arguments: Any,
        unavailable: type[Unavailable] = EngineUnavailable,
        **more: Any,
    ) -> Any:
        return await seam.through(
            _named(work, *arguments),
            lambda: original(self, work, *arguments, unavailable=unavailable, **more),
            lambda: unavailable("the disk does not answer"),
            _nothing,
        )

    return perform


def _sqlite_read(seam: Seam) -> Callable[..., Any]:
    original = Reader.ask

    async def ask(self: Reader, question: Callable[..., Any]) -> Any:
        return await seam.through(
            f"read {_named(question)}",
            lambda: original(self, question),
            lambda: EngineUnavailable("the disk does not answer"),
            _nothing,
        )

    return ask


@contextmanager
def _sqlite_queries(seam: Seam) -> Iterator[None]:
    """SQLAlchemy's, on a thread of its driver: they only read, so that before and after are one."""

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if connection.dialect.name != "sqlite" or seam.off:
            return
        way = None if seam.dead else seam.way_of(f"query {_statement(statement)}")
        if way is Way.AFTER:
            seam.die()
        elif seam.dead or way is not None:
            raise LedgerUnavailable("the disk does not answer")

    event.listen(SqlEngine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(SqlEngine, "before_cursor_execute", before)


def _named(work: Callable[..., Any], *arguments: Any) -> str:
    """What a step is called: its function, the act that it runs, or the statement that a lambda closes over."""
    if arguments and inspect.isgenerator(arguments[0]):
        return arguments[0].__name__
    name = getattr(work, "__qualname__", type(work).__qualname__)
    if "<lambda>" in name:
        given = inspect.getclosurevars(work).nonlocals.get("name")
        if isinstance(given, str):
            return given
    return name.replace("<locals>.", "")


def _nothing() -> None:
    """A file has no connection that could be cut."""
