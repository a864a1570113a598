"""The one thread of a process that writes to a SQLite file: group commit, in order, answers after the commit.

All engines and ledgers of a process on one file share its `Writer`; `acquire_writer` returns it. Operations requested
while a commit is under way go into the next transaction. Each operation is a savepoint in it, so one that fails does
not undo the others. No caller gets an answer before the commit has returned, and each event loop is woken once per
commit.

While a subscriber waits, the thread also checks every few milliseconds whether another process has written
(`PRAGMA data_version`, which this process's own commits do not change).
"""

from __future__ import annotations

import asyncio
import logging
import os
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

#: How many operations share a commit at most; more would keep the first ones waiting.
_GROUP: Final = 128
#: How often to look for other processes' work while somebody waits.
_LOOK_EVERY_S: Final = 0.005
#: How long `close` waits for what was asked for.
_CLOSE_S: Final = 10.0
#: Longer than any step takes; whoever waits longer is told that the file does not answer.
ANSWER_TIMEOUT_S: Final = 30.0


class FileWriter(Protocol):
    """Runs a step in the transaction of the file's writer."""

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T: ...


class WriteRequest:
    """One operation somebody waits for. `lazy` ones begin the transaction themselves, if they find something to do."""

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
        #: What the store's own errors become.
        self.unavailable = unavailable
        self.lazy = lazy
        self.loop = loop
        self.future = future
        #: Nobody waits any more. Read by the writer before it starts; what it has started it finishes.
        self.dropped = False


Outcome = tuple[WriteRequest, Any, BaseException | None]


class _FileReplaced(Exception):
    """The file is not where it was."""


class CommitSubscriber:
    """An engine that wants to know what commits bring, while somebody waits in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[CommitNotices], None]) -> None:
        self.loop = loop
        self.tell = tell
        self.waiting = 0


class Writer:
    """There is one for each file: `writers.acquire` gives it."""

    def __init__(self, path: Path, durable: bool, prepare: Prepare) -> None:
        self.path = path
        self.prepare = prepare
        self._durable = durable
        self._orders: deque[WriteRequest] = deque()
        self._wake = threading.Condition()
        self._subscribers: list[CommitSubscriber] = []
        self._closing = False
        self._turnstile = WriteLock(path)
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._version = 0
        self._looked_at = 0.0
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
        """Run `work(transaction, *arguments)` in the thread's transaction; its result, once that is committed.

        What it raises is raised here, and what it wrote is taken back. The store's own errors come as `unavailable`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(transaction: Transaction) -> T:
            return work(transaction, *arguments)

        order = WriteRequest(run, lazy, loop, future, unavailable)
        self.enqueue(order)
        timer = loop.call_later(ANSWER_TIMEOUT_S, self._give_up, order)
        try:
            return await future
        finally:
            order.dropped = True
            timer.cancel()

    def _give_up(self, order: WriteRequest) -> None:
        if not order.future.done():
            order.future.set_exception(
                order.unavailable(
                    f"the database {self.path} has not answered for {ANSWER_TIMEOUT_S:g} s; "
                    "another process may have stopped in the middle of a write: continue or end it"
                )
            )

    def enqueue(self, order: WriteRequest) -> None:
        """Queue an operation."""
        with self._wake:
            if self._closing:
                raise order.unavailable("the engine is closed; open it again")
            self._orders.append(order)
            self._wake.notify()

    def subscribe(self, subscriber: CommitSubscriber) -> None:
        with self._wake:
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: CommitSubscriber) -> None:
        with self._wake:
            self._subscribers.remove(subscriber)

    def watch(self, subscriber: CommitSubscriber, change: int) -> None:
        """Somebody begins (+1) or ceases (-1) to wait there."""
        with self._wake:
            subscriber.waiting += change
            if subscriber.waiting == 1 and change > 0:
                self._wake.notify()

    def close(self) -> None:
        """Finish what was asked for, then give the file back. Blocks."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # It waits for a process that stopped in mid-write. The thread ends with this process, or once it is let in.
            _log.warning("%s is closed while another process holds it locked", self.path)
        else:
            self._turnstile.close()

    def abandon_after_fork(self) -> None:
        """In a forked child: the thread is not here, and the locks are the parent's."""
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
            self._look_elsewhere()
        if self._connection is not None:
            self._connection.close()

    def _next_group(self) -> list[WriteRequest] | None:
        """What has been asked for; empty when it is time to look elsewhere, None at the end."""
        with self._wake:
            while not self._orders:
                if self._closing:
                    return None
                watched = any(subscriber.waiting for subscriber in self._subscribers)
                if not self._wake.wait(_LOOK_EVERY_S if watched else None):
                    return []
            return [self._orders.popleft() for _ in range(min(_GROUP, len(self._orders)))]

    def _handle(self, group: list[WriteRequest]) -> None:
        group = [order for order in group if not order.dropped]
        outcomes: list[Outcome] = []
        effects = CommitNotices()
        try:
            outcomes, effects = self._transact(group)
        except Exception as exc:  # noqa: BLE001 - nothing of the group was committed, and everyone in it is told why
            self._roll_back(exc)
            outcomes = [(order, None, self._as_ours(exc, order)) for order in group]
        self._deliver(outcomes, effects)

    def _transact(self, group: list[WriteRequest]) -> tuple[list[Outcome], CommitNotices]:
        connection = self._connect()
        transaction = Transaction(connection, self._turnstile.acquire, self._untrimmed, alone=len(group) == 1)
        try:
            outcomes = [self._perform(order, transaction) for order in group]
            transaction.commit()
        finally:
            if transaction.begun:
                self._turnstile.release()
        return outcomes, transaction.effects

    def _perform(self, order: WriteRequest, transaction: Transaction) -> Outcome:
        """Run one operation; if it fails, it alone is taken back."""
        transaction.open_savepoint()
        try:
            if not order.lazy:
                transaction.begin()
            result = order.work(transaction)
        except Exception as exc:
            if (isinstance(exc, sqlite3.Error) and is_lost(exc)) or not transaction.undo():
                raise
            return order, None, self._as_ours(exc, order)
        transaction.keep()
        return order, result, None

    def _roll_back(self, error: Exception) -> None:
        """The connection is clean again, or gone and opened anew next time."""
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

    def _as_ours(self, error: Exception, order: WriteRequest) -> Exception:
        if isinstance(error, sqlite3.Error | OSError):
            ours = translate(error, self.path, order.unavailable)
        elif isinstance(error, _FileReplaced):
            ours = order.unavailable(str(error))
        else:
            return error
        ours.__cause__ = error
        return ours

    def _connect(self) -> sqlite3.Connection:
        """The connection to the file that is at our path now."""
        if self._connection is not None:
            if _inode(self.path) == self._inode:
                return self._connection
            # SQLite would go on writing into a file that nobody can find any more.
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

    def _look_elsewhere(self) -> None:
        """Wake everybody who waits if another process has written."""
        now = time.monotonic()
        connection = self._connection
        if connection is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            version = self._data_version(connection)
        except sqlite3.Error as exc:
            _log.warning("cannot look for other processes' work in %s: %s", self.path, exc)
            return
        if version != self._version:
            self._version = version
            self._deliver([], CommitNotices(external=True))

    @staticmethod
    def _data_version(connection: sqlite3.Connection) -> int:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _deliver(self, outcomes: list[Outcome], effects: CommitNotices) -> None:
        """Answers and news, one call into each event loop."""
        mail: dict[asyncio.AbstractEventLoop, tuple[list[Outcome], list[CommitSubscriber]]] = {}
        for outcome in outcomes:
            mail.setdefault(outcome[0].loop, ([], []))[0].append(outcome)
        if effects:
            with self._wake:
                listening = [subscriber for subscriber in self._subscribers if subscriber.waiting]
            for subscriber in listening:
                mail.setdefault(subscriber.loop, ([], []))[1].append(subscriber)
        for loop, (answers, subscribers) in mail.items():
            try:
                loop.call_soon_threadsafe(_hand_over, answers, subscribers, effects)
            except RuntimeError:
                _log.debug("an event loop is gone before its answer from %s came", self.path)


def _hand_over(answers: list[Outcome], subscribers: list[CommitSubscriber], effects: CommitNotices) -> None:
    for order, result, error in answers:
        if order.future.done():
            continue
        if error is None:
            order.future.set_result(result)
        else:
            order.future.set_exception(error)
    for subscriber in subscribers:
        subscriber.tell(effects)


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
    """This process's writer for the file (an absolute path), started if need be. Blocks.

    `prepare` is the same function for all who share a file: an engine's and a ledger's of its own are two files.
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
            raise InvalidOption(f"{path} is in use as another kind of store; give the ledger a file of its own")
        writer.engines += 1
        return writer


def release_writer(writer: Writer) -> None:
    """Give it back; the last one ends the thread. Blocks."""
    with _registry:
        if _writers.get(writer.path) is not writer:
            # Acquired before a fork: it is the parent's.
            return
        writer.engines -= 1
        if writer.engines == 0:
            del _writers[writer.path]
            writer.close()


def _forget_writers() -> None:
    """A forked child has none of the threads, and must not touch its parent's connections."""
    global _registry
    _registry = threading.Lock()
    _orphans.extend(_writers.values())
    for writer in _writers.values():
        writer.abandon_after_fork()
    _writers.clear()


#: Kept, so that no connection of the parent is ever closed here: that would cut its log.
_orphans: Final[list[Writer]] = []
os.register_at_fork(after_in_child=_forget_writers)
