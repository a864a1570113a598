"""One engine's access to a SQLite file: the shared writer, a reader, waiters and batch helpers.

`EngineWaiters` holds the waiters for work, notices, feed entries and final states. It runs on the engine's event loop.
A waiter registers first and reads afterwards, so that it misses no commit made in between. `EngineContext` has the
options and clock that an operation uses in any writer. `split_batches` and `restore_order` split large batches into
steps and put the results back in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.clock import Clock
from holdfast.core.job import MAX_BATCH, Lease
from holdfast.engine.outage_watch import OUTAGE_LEASES, OutageWatch
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.engine.sqlite.rows import NAMES
from holdfast.engine.sqlite.schema import prepare_schema
from holdfast.errors import EngineUnavailable
from holdfast.sqlite.connection import _PAIRS, DatabaseFile, ReaderThread
from holdfast.sqlite.transaction import CommitNotices, Transaction, json_list
from holdfast.sqlite.writer import CommitSubscriber, Writer, acquire_writer, release_writer


class WakeEvent:
    """Set by a commit, possibly before its waiter waits."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        #: Also wake when leases end: the waiter's last claim skipped jobs of a tenant at its own limit.
        self.on_freed = False

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, seconds: float) -> None:
        """Wait until it is set, or for this long."""
        if seconds <= 0 or self._event.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return


class EngineWaiters:
    """The waiters of one engine. `watch(+1 | -1)` is called when one is added or removed."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._watch = watch
        self._for_work: dict[WakeEvent, frozenset[str]] = {}
        self._for_notices: dict[WakeEvent, frozenset[str]] = {}
        self._for_feeds: dict[WakeEvent, frozenset[str]] = {}
        self._for_final: dict[tuple[str, str], set[WakeEvent]] = {}

    def notify(self, effects: CommitNotices) -> None:
        """Wake the waiters that a commit concerns."""
        for waiters, queues in (
            (self._for_work, effects.ready),
            (self._for_notices, effects.notices),
            (self._for_feeds, effects.feeds),
        ):
            for wake, watched in waiters.items():
                if effects.external or not watched.isdisjoint(queues):
                    wake.set()
        for wake, watched in self._for_work.items() if effects.freed else ():
            if wake.on_freed and not watched.isdisjoint(effects.freed):
                wake.set()
        for job in effects.finished if self._for_final else ():
            for wake in self._for_final.get(job, ()):
                wake.set()

    def wake_all(self) -> None:
        """Wake all waiters when the engine closes; their next read raises `EngineUnavailable`."""
        for wake in [
            *self._for_work,
            *self._for_notices,
            *self._for_feeds,
            *(wake for waiters in self._for_final.values() for wake in waiters),
        ]:
            wake.set()

    def jobs(self) -> list[tuple[str, str]]:
        """Queue and id of the jobs whose end is awaited."""
        return list(self._for_final)

    @contextmanager
    def for_work(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._register(self._for_work, queues) as wake:
            yield wake

    @contextmanager
    def for_notices(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._register(self._for_notices, queues) as wake:
            yield wake

    @contextmanager
    def for_feeds(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._register(self._for_feeds, queues) as wake:
            yield wake

    @contextmanager
    def for_final(self, queue: str, job_id: str) -> Iterator[WakeEvent]:
        wake = WakeEvent()
        waiters = self._for_final.setdefault((queue, job_id), set())
        waiters.add(wake)
        self._watch(1)
        try:
            yield wake
        finally:
            self._watch(-1)
            waiters.discard(wake)
            if not waiters:
                self._for_final.pop((queue, job_id), None)

    @contextmanager
    def _register(self, waiters: dict[WakeEvent, frozenset[str]], queues: Sequence[str]) -> Iterator[WakeEvent]:
        wake = WakeEvent()
        waiters[wake] = frozenset(queues)
        self._watch(1)
        try:
            yield wake
        finally:
            self._watch(-1)
            del waiters[wake]


T = TypeVar("T")


class SqliteEngineStore:
    """One engine's writer, reader and waiters. Opened and used on one event loop."""

    def __init__(self, file: DatabaseFile, outages: OutageWatch) -> None:
        self.file = file
        self._outages = outages
        self._writer: Writer | None = None
        self._reader: ReaderThread | None = None
        self._subscriber: CommitSubscriber | None = None
        self._checking: asyncio.Task[None] | None = None
        #: Another process has written since the last check began.
        self._unchecked = False
        self.waiters = EngineWaiters(self._watch)

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def open(self) -> None:
        """Open the file.

        Raises `EngineUnavailable` if it cannot be used, `InvalidOption` if it is not holdfast's.
        """
        if self.is_open:
            return
        writer = await asyncio.to_thread(
            acquire_writer, self.file.path, durable=not self.file.temporary, prepare=prepare_schema
        )
        await self._attach(writer)

    async def _attach(self, writer: Writer) -> None:
        if self._writer is not None:
            # Two tasks opened it at the same time.
            await asyncio.to_thread(release_writer, writer)
            return
        self._subscriber = CommitSubscriber(asyncio.get_running_loop(), self._notify)
        writer.subscribe(self._subscriber)
        self._reader = ReaderThread(self.file.path)
        self._writer = writer

    async def close(self) -> None:
        """Close the file. Safe to call twice. Waiting calls raise `EngineUnavailable`."""
        writer, reader, subscriber = self._writer, self._reader, self._subscriber
        if writer is None or reader is None or subscriber is None:
            return
        self._writer = self._reader = None
        writer.unsubscribe(subscriber)
        self.waiters.wake_all()
        if self._checking is not None:
            self._checking.cancel()
            with suppress(asyncio.CancelledError):
                await self._checking
        await reader.close()
        await asyncio.to_thread(release_writer, writer)

    @property
    def reader(self) -> ReaderThread:
        if self._reader is None:
            raise _not_open_error()
        return self._reader

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T:
        """Run a step in the writer's transaction; returns its result after the commit."""
        if self._writer is None:
            raise _not_open_error()
        began = time.monotonic()
        try:
            return await self._writer.perform(work, *arguments, lazy=lazy)
        except EngineUnavailable:
            self._outages.interruptions += 1
            raise
        finally:
            self._outages.interruptions += time.monotonic() - began > self._outages.late_s

    # Notices of commits ----------------------------------------------------------------------------

    def _watch(self, change: int) -> None:
        if self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, change)

    def _notify(self, effects: CommitNotices) -> None:
        self.waiters.notify(effects)
        if not effects.external or not self.waiters.jobs():
            return
        self._unchecked = True
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check_final())
            self._checking.add_done_callback(self._on_checked)

    async def _check_final(self) -> None:
        """After another process's commit: find all awaited jobs that have ended, in one query."""
        while self._unchecked:
            self._unchecked = False
            ended = await self.reader.rows("finished_among", _PAIRS, pairs=json_list(self.waiters.jobs()))
            self.waiters.notify(CommitNotices(finished=ended))

    def _on_checked(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled() and task.exception() is not None:
            # Wake all waiters: each reads its job itself and gets the error.
            self.waiters.notify(CommitNotices(finished=self.waiters.jobs()))


def _not_open_error() -> EngineUnavailable:
    return EngineUnavailable("the engine is not open; call `await engine.open()` first")


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One engine's options and clock."""

    options: EngineOptions
    clock: Clock
    watch: OutageWatch
    #: Whether dead letters are stored in this file when there is no separate ledger.
    stream_dlq: bool

    def lost_in_outage(self, lease: Lease) -> bool:
        """Whether a lease that has expired may have done so in an outage, so that the loss does not count."""
        ended_ms = self.watch.outages_ms.get(lease.queue)
        recent = ended_ms is not None and self.clock.now_ms() - ended_ms < self.options.visibility_timeout_ms
        return recent and not self.watch.has_ended(lease)

    def note_outages(self, transaction: Transaction, renewed: Iterable[int]) -> None:
        """Note the renewal of leases: of one that had expired long before, it proves an outage."""
        now_ms = self.clock.now_ms()
        expired_at_ms = now_ms - round((OUTAGE_LEASES - 1) * self.options.visibility_timeout_ms)
        queues = transaction.rows("long_expired", NAMES, ids=json_list(list(renewed)), at=expired_at_ms)
        self.watch.outages_ms.update(dict.fromkeys(queues, now_ms))

    def retries_in_pending(self, queue: str) -> bool:
        return self.options.retry_via.get(queue) is RetryVia.PENDING


def split_batches(queues: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Group the indexes of a batch into steps: one queue, at most `MAX_BATCH`, in order."""
    by_queue: dict[str, list[int]] = {}
    for at, queue in enumerate(queues):
        by_queue.setdefault(queue, []).append(at)
    return [
        (queue, indexes[start : start + MAX_BATCH])
        for queue, indexes in by_queue.items()
        for start in range(0, len(indexes), MAX_BATCH)
    ]


async def gather_all(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all steps concurrently, so that they share a commit.

    Raises the first error after all have ended.
    """
    results = await asyncio.gather(*steps, return_exceptions=True)
    good: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good


def restore_order(steps: Sequence[tuple[str, Sequence[int]]], answers: Sequence[Sequence[T]]) -> list[T]:
    """The steps' answers, in the order of the original batch."""
    by_index: dict[int, T] = {}
    for (_, indexes), step in zip(steps, answers, strict=True):
        by_index.update(zip(indexes, step, strict=True))
    return [by_index[at] for at in range(len(by_index))]
