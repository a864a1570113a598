"""One engine's access to a SQLite file: the shared writer, its own reader, its waiters and batch helpers.

`EngineWaiters` holds the waiters for work, notices, feed entries and final states. All of it runs on the engine's event
loop. A waiter registers first and reads afterwards, so that it misses no commit made in between. `EngineContext` has
the options and clock that an operation uses in any writer. `split_batches` and `restore_order` split large batches into
steps and put the results back in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.clock import Clock
from holdfast.core.job import MAX_BATCH
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.engine.sqlite.schema import prepare_schema
from holdfast.errors import EngineUnavailable
from holdfast.sqlite.connection import _PAIRS, DatabaseFile, ReaderThread
from holdfast.sqlite.transaction import CommitNotices, json_list
from holdfast.sqlite.writer import CommitSubscriber, Writer, acquire_writer, release_writer


class WakeEvent:
    """Rung by a commit; may be rung before anyone waits."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        #: Whoever waits for work has seen some that only a tenant's own limit holds back.
        self.wants_places = False

    @property
    def is_set(self) -> bool:
        return self._rung.is_set()

    def set(self) -> None:
        self._rung.set()

    def clear(self) -> None:
        self._rung.clear()

    async def wait(self, seconds: float) -> None:
        """Until it rings, or the time is up."""
        if seconds <= 0 or self._rung.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return


class EngineWaiters:
    """The bells of one engine. `watch(+1 | -1)` is called as they come and go."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._watch = watch
        self._for_work: dict[WakeEvent, frozenset[str]] = {}
        self._for_notices: dict[WakeEvent, frozenset[str]] = {}
        self._for_feeds: dict[WakeEvent, frozenset[str]] = {}
        self._for_ends: dict[tuple[str, str], set[WakeEvent]] = {}

    def notify(self, effects: CommitNotices) -> None:
        """A commit has happened."""
        for bells, queues in (
            (self._for_work, effects.ready),
            (self._for_notices, effects.notices),
            (self._for_feeds, effects.feeds),
        ):
            for bell, wanted in bells.items():
                if effects.external or not wanted.isdisjoint(queues):
                    bell.set()
        for bell, wanted in self._for_work.items() if effects.freed else ():
            if bell.wants_places and not wanted.isdisjoint(effects.freed):
                bell.set()
        for job in effects.finished if self._for_ends else ():
            for bell in self._for_ends.get(job, ()):
                bell.set()

    def wake_all(self) -> None:
        """The engine closes; each looks once more, and is told so."""
        for bell in [
            *self._for_work,
            *self._for_notices,
            *self._for_feeds,
            *(bell for bells in self._for_ends.values() for bell in bells),
        ]:
            bell.set()

    def jobs(self) -> list[tuple[str, str]]:
        """Those whose end somebody waits for."""
        return list(self._for_ends)

    @contextmanager
    def for_work(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._among(self._for_work, queues) as bell:
            yield bell

    @contextmanager
    def for_notices(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._among(self._for_notices, queues) as bell:
            yield bell

    @contextmanager
    def for_feeds(self, queues: Sequence[str]) -> Iterator[WakeEvent]:
        with self._among(self._for_feeds, queues) as bell:
            yield bell

    @contextmanager
    def for_final(self, queue: str, job_id: str) -> Iterator[WakeEvent]:
        bell = WakeEvent()
        bells = self._for_ends.setdefault((queue, job_id), set())
        bells.add(bell)
        self._watch(1)
        try:
            yield bell
        finally:
            self._watch(-1)
            bells.discard(bell)
            if not bells:
                self._for_ends.pop((queue, job_id), None)

    @contextmanager
    def _among(self, bells: dict[WakeEvent, frozenset[str]], queues: Sequence[str]) -> Iterator[WakeEvent]:
        bell = WakeEvent()
        bells[bell] = frozenset(queues)
        self._watch(1)
        try:
            yield bell
        finally:
            self._watch(-1)
            del bells[bell]


T = TypeVar("T")


class SqliteEngineStore:
    """Opened and used on one event loop."""

    def __init__(self, place: DatabaseFile) -> None:
        self.place = place
        self._writer: Writer | None = None
        self._reader: ReaderThread | None = None
        self._subscriber: CommitSubscriber | None = None
        self._checking: asyncio.Task[None] | None = None
        self.waiters = EngineWaiters(self._watch)

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def open(self) -> None:
        """Raises `EngineUnavailable` if the file cannot be used, `InvalidOption` if it is not ours."""
        if self.is_open:
            return
        writer = await asyncio.to_thread(
            acquire_writer, self.place.path, durable=not self.place.temporary, prepare=prepare_schema
        )
        await self._settle_in(writer)

    async def _settle_in(self, writer: Writer) -> None:
        if self._writer is not None:
            # Two tasks opened it at once.
            await asyncio.to_thread(release_writer, writer)
            return
        self._subscriber = CommitSubscriber(asyncio.get_running_loop(), self._tell)
        writer.subscribe(self._subscriber)
        self._reader = ReaderThread(self.place.path)
        self._writer = writer

    async def close(self) -> None:
        """Safe to call twice. Whoever still waits is told that it is closed."""
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
            raise _closed()
        return self._reader

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T:
        """Run a step in the writer's transaction; its result, once that is committed."""
        if self._writer is None:
            raise _closed()
        return await self._writer.perform(work, *arguments, lazy=lazy)

    # News ------------------------------------------------------------------------------------------

    def _watch(self, change: int) -> None:
        if self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, change)

    def _tell(self, effects: CommitNotices) -> None:
        self.waiters.notify(effects)
        if effects.external and self._checking is None and self.waiters.jobs():
            self._checking = asyncio.get_running_loop().create_task(self._check_ends())
            self._checking.add_done_callback(self._checked)

    async def _check_ends(self) -> None:
        """Another process wrote: one question for all who wait for the end of a job, however many they are."""
        jobs = self.waiters.jobs()
        ended = await self.reader.rows("final", _PAIRS, pairs=json_list(jobs))
        self.waiters.notify(CommitNotices(finished=ended))

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled() and task.exception() is not None:
            # They will look for themselves, and get the error themselves.
            self.waiters.notify(CommitNotices(finished=self.waiters.jobs()))


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the engine is not open; await its open() first")


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One engine's way of doing things."""

    options: EngineOptions
    clock: Clock
    #: Whether dead letters are written down here when there is no ledger.
    stream_dlq: bool

    def retries_in_pending(self, queue: str) -> bool:
        return self.options.retry_via.get(queue) is RetryVia.PENDING


def split_batches(queues: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Which places of a batch go together: one queue, at most `MAX_BATCH`, in order."""
    by_queue: dict[str, list[int]] = {}
    for at, queue in enumerate(queues):
        by_queue.setdefault(queue, []).append(at)
    return [
        (queue, places[start : start + MAX_BATCH])
        for queue, places in by_queue.items()
        for start in range(0, len(places), MAX_BATCH)
    ]


async def gather_all(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them at once, so that they share a commit; the first error once all have ended."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    good: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good


def restore_order(steps: Sequence[tuple[str, Sequence[int]]], answers: Sequence[Sequence[T]]) -> list[T]:
    """The answers of the steps, each in its place."""
    placed: dict[int, T] = {}
    for (_, places), step in zip(steps, answers, strict=True):
        placed.update(zip(places, step, strict=True))
    return [placed[at] for at in range(len(placed))]
