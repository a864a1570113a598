"""The one thread of a process that writes to a SQLite file, with group commit.

All engines and ledgers of a process on one file share its `Writer`; `acquire_writer` returns it. Operations requested
during a commit go into the next transaction. Each operation is a savepoint in it, so one that fails does not undo the
others. Callers get their answers after the commit, in order, with one wake-up of each event loop per commit.

While a subscriber waits, the thread also checks every few milliseconds whether another process has written
(`PRAGMA data_version`, which this process's own commits do not change).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from holdfast.errors import EngineUnavailable, InvalidOption, Unavailable
from holdfast.sqlite.connection import Prepare, WriteLock, is_lost, open_writer, translate
from holdfast.sqlite.transaction import CommitNotices, Transaction

T = TypeVar("T")

_log = logging.getLogger("holdfast.engine.sqlite")

#: The most operations that share a commit; more would delay the first ones.
_GROUP: Final = 128
#: Interval of the check for other processes' commits while a subscriber waits.
_POLL_S: Final = 0.005
#: How long `close` waits for queued operations.
_CLOSE_S: Final = 10.0
#: Longer than any step takes; after this the caller gets an error.
ANSWER_TIMEOUT_S: Final = 30.0


class FileWriter(Protocol):
    """Runs a step in the transaction of the file's writer."""

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T: ...


class WriteRequest:
    """One operation with a waiting caller.

    A `lazy` operation begins the transaction itself, if it has something to write.
    """

    __slots__ = ("dropped", "future", "lazy", "loop", "unavailable", "work")

    def __init__(
        self,
        work: Callable[[Transaction], Any],
        lazy: bool,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        unavailable: type[Unavailable] = EngineUnavailable,
    ) -> None:
        self.work = work
        #: The type that the store's own errors are translated to.
        self.unavailable = unavailable
        self.lazy = lazy
        self.loop = loop
        self.future = future
        #: The caller no longer waits. The writer skips a dropped operation, but finishes one that it has started.
        self.dropped = False


Outcome = tuple[WriteRequest, Any, BaseException | None]


class _FileReplaced(Exception):
    """The path no longer leads to the file that was opened."""


class CommitSubscriber:
    """An engine or ledger that is notified of commits while it has waiters."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Callable[[CommitNotices], None]) -> None:
        self.loop = loop
        self.notify = notify
        self.waiting = 0


class Writer:
    """The writing thread of one file; `acquire_writer` returns it."""

    def __init__(self, path: Path, durable: bool, prepare: Prepare) -> None:
        self.path = path
        self.prepare = prepare
        self._durable = durable
        self._requests: deque[WriteRequest] = deque()
        self._wake = threading.Condition()
        self._subscribers: list[CommitSubscriber] = []
        self._closing = False
        self._turnstile = WriteLock(path)
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._version = 0
        self._polled_at = 0.0
        self._untrimmed: dict[str, int] = {}
        self.engines = 0
        try:
            self._connect()
        except BaseException:
            self._turnstile.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"holdfast-writer-{path.name}", daemon=True)
        self._thread.start()

    # For the engines -------------------------------------------------------------------------------

    async def perform(
        self,
        work: Callable[..., T],
        *arguments: Any,
        lazy: bool = False,
        unavailable: type[Unavailable] = EngineUnavailable,
    ) -> T:
        """Run `work(transaction, *arguments)` in the writer's transaction.

        Returns its result after the commit. An error that it raises is raised here, and its writes are rolled back.
        Errors of the store are raised as `unavailable`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(transaction: Transaction) -> T:
            return work(transaction, *arguments)

        request = WriteRequest(run, lazy, loop, future, unavailable)
        self.enqueue(request)
        timer = loop.call_later(ANSWER_TIMEOUT_S, self._time_out, request)
        try:
            return await future
        finally:
            request.dropped = True
            timer.cancel()

    def _time_out(self, request: WriteRequest) -> None:
        if not request.future.done():
            request.future.set_exception(
                request.unavailable(
                    f"the database {self.path} did not answer within {ANSWER_TIMEOUT_S:g} s; "
                    "another process may be stopped during a write: resume or kill it"
                )
            )

    def enqueue(self, request: WriteRequest) -> None:
        with self._wake:
            if self._closing:
                raise request.unavailable("the engine is closed; open it again")
            self._requests.append(request)
            self._wake.notify()

    def subscribe(self, subscriber: CommitSubscriber) -> None:
        with self._wake:
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: CommitSubscriber) -> None:
        with self._wake:
            self._subscribers.remove(subscriber)

    def watch(self, subscriber: CommitSubscriber, change: int) -> None:
        """Count a new waiter (+1), or one that no longer waits (-1)."""
        with self._wake:
            subscriber.waiting += change
            if subscriber.waiting == 1 and change > 0:
                self._wake.notify()

    def close(self) -> None:
        """Finish queued operations, then close the file. Blocks."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # The thread waits for a process stopped during a write; it ends when it gets the lock or this process ends.
            _log.warning("%s closed while another process has it locked", self.path)
        else:
            self._turnstile.close()

    def abandon_after_fork(self) -> None:
        """Close in a forked child, where the thread does not exist and the locks belong to the parent."""
        self._wake = threading.Condition()
        self._closing = True
        self._turnstile.close()

    # The thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            group = self._next_group()
            if group is None:
                break
            if group:
                self._handle(group)
            self._poll_other_processes()
        if self._connection is not None:
            self._connection.close()

    def _next_group(self) -> list[WriteRequest] | None:
        """The next queued operations; empty when it is time to poll, None when closed."""
        with self._wake:
            while not self._requests:
                if self._closing:
                    return None
                watched = any(subscriber.waiting for subscriber in self._subscribers)
                if not self._wake.wait(_POLL_S if watched else None):
                    return []
            return [self._requests.popleft() for _ in range(min(_GROUP, len(self._requests)))]

    def _handle(self, group: list[WriteRequest]) -> None:
        group = [request for request in group if not request.dropped]
        outcomes: list[Outcome] = []
        effects = CommitNotices()
        try:
            outcomes, effects = self._transact(group)
        except Exception as exc:  # noqa: BLE001 - nothing of the group was committed, and all its callers get the error
            self._roll_back(exc)
            outcomes = [(request, None, self._translate_error(exc, request)) for request in group]
        self._deliver(outcomes, effects)

    def _transact(self, group: list[WriteRequest]) -> tuple[list[Outcome], CommitNotices]:
        connection = self._connect()
        transaction = Transaction(connection, self._turnstile.acquire, self._untrimmed, alone=len(group) == 1)
        try:
            outcomes = [self._perform(request, transaction) for request in group]
            transaction.commit()
        finally:
            if transaction.begun:
                self._turnstile.release()
        return outcomes, transaction.effects

    def _perform(self, request: WriteRequest, transaction: Transaction) -> Outcome:
        """Run one operation; if it fails, only its own writes are rolled back."""
        transaction.open_savepoint()
        try:
            if not request.lazy:
                transaction.begin()
            result = request.work(transaction)
        except Exception as exc:
            if (isinstance(exc, sqlite3.Error) and is_lost(exc)) or not transaction.undo():
                raise
            return request, None, self._translate_error(exc, request)
        transaction.keep()
        return request, result, None

    def _roll_back(self, error: Exception) -> None:
        """Roll back, or drop an unusable connection; the next operation opens another."""
        connection = self._connection
        if connection is None:
            return
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            lost = isinstance(error, sqlite3.Error) and is_lost(error)
        except sqlite3.Error:
            lost = True
        if lost:
            self._connection = None
            connection.close()

    def _translate_error(self, error: Exception, request: WriteRequest) -> Exception:
        if isinstance(error, sqlite3.Error | OSError):
            translated = translate(error, self.path, request.unavailable)
        elif isinstance(error, _FileReplaced):
            translated = request.unavailable(str(error))
        else:
            return error
        translated.__cause__ = error
        return translated

    def _connect(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if self._connection is not None:
            if _inode(self.path) == self._inode:
                return self._connection
            # SQLite would continue to write into a file that no longer has a name.
            connection, self._connection = self._connection, None
            connection.close()
            raise _FileReplaced(f"the database {self.path} was moved or deleted while in use; put it back")
        self._turnstile.acquire()
        try:
            self._connection = open_writer(self.path, self.prepare, durable=self._durable)
        finally:
            self._turnstile.release()
        self._inode = _inode(self.path)
        self._version = self._data_version(self._connection)
        return self._connection

    def _poll_other_processes(self) -> None:
        """Wake all waiters if another process has written."""
        now = time.monotonic()
        connection = self._connection
        if connection is None or now - self._polled_at < _POLL_S:
            return
        self._polled_at = now
        try:
            version = self._data_version(connection)
        except sqlite3.Error as exc:
            _log.warning("cannot check %s for commits of other processes: %s", self.path, exc)
            return
        if version != self._version:
            self._version = version
            self._deliver([], CommitNotices(external=True))

    @staticmethod
    def _data_version(connection: sqlite3.Connection) -> int:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _deliver(self, outcomes: list[Outcome], effects: CommitNotices) -> None:
        """Pass answers and notices on, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, tuple[list[Outcome], list[CommitSubscriber]]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].loop, ([], []))[0].append(outcome)
        if effects:
            with self._wake:
                listening = [subscriber for subscriber in self._subscribers if subscriber.waiting]
            # At random: if the same engine were always first, it would claim most of the jobs that become due.
            random.shuffle(listening)
            for subscriber in listening:
                by_loop.setdefault(subscriber.loop, ([], []))[1].append(subscriber)
        for loop, (answers, subscribers) in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers, subscribers, effects)
            except RuntimeError:
                _log.debug("event loop closed before it received its answers from %s", self.path)


def _resolve(answers: list[Outcome], subscribers: list[CommitSubscriber], effects: CommitNotices) -> None:
    for request, result, error in answers:
        if request.future.done():
            continue
        if error is None:
            request.future.set_result(result)
        else:
            request.future.set_exception(error)
    for subscriber in subscribers:
        subscriber.notify(effects)


def _inode(path: Path) -> int:
    return os.stat(path).st_ino


_writers: Final[dict[Path, Writer]] = {}
_registry: threading.Lock = threading.Lock()


def acquire_writer(
    path: Path,
    *,
    durable: bool = True,
    prepare: Prepare,
    unavailable: type[Unavailable] = EngineUnavailable,
) -> Writer:
    """Return this process's writer for the file (an absolute path); start it if necessary. Blocks.

    All users of a file pass the same `prepare`: an engine and a separate ledger need two files.
    """
    with _registry:
        writer = _writers.get(path)
        if writer is None:
            try:
                writer = Writer(path, durable, prepare)
            except sqlite3.Error as exc:
                raise translate(exc, path, unavailable) from exc
            except OSError as exc:
                raise unavailable(
                    f"the database {path} cannot be opened: {exc.strerror}; the directory must exist and be writable"
                ) from exc
            _writers[path] = writer
        elif writer.prepare is not prepare:
            raise InvalidOption(f"{path} is in use as another kind of store; use a separate file for the ledger")
        writer.engines += 1
        return writer


def release_writer(writer: Writer) -> None:
    """Release a writer; the last release ends the thread. Blocks."""
    with _registry:
        if _writers.get(writer.path) is not writer:
            # Acquired before a fork: it belongs to the parent.
            return
        writer.engines -= 1
        if writer.engines == 0:
            del _writers[writer.path]
            writer.close()


def _abandon_writers() -> None:
    """Drop all writers in a forked child: it has no threads, and must not touch its parent's connections."""
    global _registry
    _registry = threading.Lock()
    _orphans.extend(_writers.values())
    for writer in _writers.values():
        writer.abandon_after_fork()
    _writers.clear()


#: Keeps the parent's connections referenced: closing one here would truncate the parent's write-ahead log.
_orphans: Final[list[Writer]] = []
os.register_at_fork(after_in_child=_abandon_writers)
