"""Wait for ledger commits: a queue's waiters are woken after a commit that concerns it.

A waiter checks, waits, and checks again. It may be woken for nothing, but never misses a commit (`source` is a
`CommitSource`):

    with source.listen(queue) as waiter:
        while not await check():
            if not await waiter.wait(timeout_s):
                break

`RecordedWaiter` waits until jobs are in the ledger, with one look-up after each commit for all callers of a queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

from holdfast.core.job import JobKey
from holdfast.ledger.port.ledger import FeedPosition, ProjectionReadPort


class CommitWaiter:
    """One waiter for commits of a queue."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a commit since the last call; False if there was none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def notify(self) -> None:
        self._event.set()


class CommitWaiters:
    """The waiters of each queue.

    `changed` is called with +1 when a waiter is added and with -1 when one is removed.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._waiters: dict[str, set[CommitWaiter]] = {}

    @contextmanager
    def waiting_for(self, queue: str) -> Iterator[CommitWaiter]:
        """A waiter that is notified when this queue's feed has moved in the ledger."""
        waiter = CommitWaiter()
        self._waiters.setdefault(queue, set()).add(waiter)
        self._changed(+1)
        try:
            yield waiter
        finally:
            waiters = self._waiters[queue]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[queue]
            self._changed(-1)

    def notify(self, queues: Iterable[str]) -> None:
        for queue in queues:
            for waiter in self._waiters.get(queue, ()):
                waiter.notify()

    def notify_all(self) -> None:
        self.notify(list(self._waiters))


#: Check again after this long: a notification may be late, or lost with its connection.
_CHECK_S: Final = 5.0

FindRecorded = Callable[[str, Sequence[JobKey]], Awaitable[set[JobKey]]]


class CommitSource(Protocol):
    """Where to wait for commits of a queue."""

    def listen(self, queue: str) -> AbstractContextManager[CommitWaiter]: ...


class _QueueWaiters:
    """The callers that wait for jobs of one queue."""

    def __init__(self) -> None:
        self.waiting: dict[JobKey, set[asyncio.Future[None]]] = {}
        self.commits: CommitWaiter | None = None
        self.task: asyncio.Task[None] | None = None


class RecordedWaiter:
    """Waits until jobs are recorded, on one store and event loop.

    `find` returns those of the given jobs of a queue that are in the ledger.
    """

    def __init__(self, find: FindRecorded, commits: CommitSource) -> None:
        self._find = find
        self._commits = commits
        self._queues: dict[str, _QueueWaiters] = {}

    async def wait(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        """Return the jobs that are in the ledger, once all are, or after `wait_ms`.

        Raises what `find` raises.
        """
        futures = {key: self._add(key) for key in set(keys)}
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await asyncio.gather(*futures.values())
        except TimeoutError:
            pass
        finally:
            for key, future in futures.items():
                self._remove(key, future)
        return {key for key, future in futures.items() if _is_recorded(future)}

    async def close(self) -> None:
        """Cancel all waiting callers."""
        tasks = [waiters.task for waiters in self._queues.values() if waiters.task is not None]
        for waiters in self._queues.values():
            for futures in waiters.waiting.values():
                for future in futures:
                    future.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, key: JobKey) -> asyncio.Future[None]:
        waiters = self._queues.setdefault(key.queue, _QueueWaiters())
        future = asyncio.get_running_loop().create_future()
        waiters.waiting.setdefault(key, set()).add(future)
        if waiters.task is None:
            waiters.task = asyncio.create_task(self._watch(key.queue, waiters), name="holdfast-ledger-presence")
        elif waiters.commits is not None:
            waiters.commits.notify()
        return future

    def _remove(self, key: JobKey, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            # Retrieved, or asyncio would log it: one error is raised for all.
            future.exception()
        waiters = self._queues.get(key.queue)
        if waiters is None or key not in waiters.waiting:
            return
        waiters.waiting[key].discard(future)
        if not waiters.waiting[key]:
            del waiters.waiting[key]

    async def _watch(self, queue: str, waiters: _QueueWaiters) -> None:
        try:
            await self._check_until_found(queue, waiters)
        finally:
            del self._queues[queue]

    async def _check_until_found(self, queue: str, waiters: _QueueWaiters) -> None:
        with self._commits.listen(queue) as waiters.commits:
            while waiters.waiting:
                try:
                    found = await self._find(queue, list(waiters.waiting))
                except Exception as exc:  # noqa: BLE001 - raised in every waiting caller
                    self._fail(waiters, exc)
                    break
                for key in found:
                    for future in waiters.waiting.pop(key, ()):
                        if not future.done():
                            future.set_result(None)
                if waiters.waiting:
                    await waiters.commits.wait(_CHECK_S)

    def _fail(self, waiters: _QueueWaiters, error: Exception) -> None:
        for futures in waiters.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        waiters.waiting.clear()


def _is_recorded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


async def wait_position_change(
    projection: ProjectionReadPort, commits: CommitSource, queue: str, than: FeedPosition, wait_ms: int
) -> FeedPosition:
    """`Projection.wait_position_change` on any store."""
    until = time.monotonic() + wait_ms / 1000
    with commits.listen(queue) as waiter:
        while True:
            position = await projection.position(queue)
            left_s = until - time.monotonic()
            if position != than or left_s <= 0:
                return position
            await waiter.wait(min(left_s, _CHECK_S))
