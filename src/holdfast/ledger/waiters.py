"""Waiting for ledger commits without busy polling: a queue's waiters are woken after a commit that concerns it.

A waiter checks, waits, and checks again. It may be woken for nothing, but never misses a commit (`source` is a
`CommitSource`):

    with source.of(queue) as waiter:
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
from holdfast.ledger.port.ledger import FeedPosition, Projection


class CommitWaiter:
    """Somebody's place in the waiting room."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for news since the last call; False if none came in time."""
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
    """Who waits for which queue. `changed` is called with +1 and -1 as people come and go."""

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._turns: dict[str, set[CommitWaiter]] = {}

    @contextmanager
    def waiting_for(self, queue: str) -> Iterator[CommitWaiter]:
        """Be told when this queue's feed has moved in the ledger."""
        turn = CommitWaiter()
        self._turns.setdefault(queue, set()).add(turn)
        self._changed(+1)
        try:
            yield turn
        finally:
            turns = self._turns[queue]
            turns.discard(turn)
            if not turns:
                del self._turns[queue]
            self._changed(-1)

    def notify(self, queues: Iterable[str]) -> None:
        for queue in queues:
            for turn in self._turns.get(queue, ()):
                turn.notify()

    def notify_all(self) -> None:
        self.notify(list(self._turns))


#: News may be late or lost (a connection broke): look again after this long all the same.
_LOOK_S: Final = 5.0

Look = Callable[[str, Sequence[JobKey]], Awaitable[set[JobKey]]]


class CommitSource(Protocol):
    """Where to wait for a queue."""

    def of(self, queue: str) -> AbstractContextManager[CommitWaiter]: ...


class _QueueWaiters:
    """Who waits for jobs of one queue."""

    def __init__(self) -> None:
        self.waiting: dict[JobKey, set[asyncio.Future[None]]] = {}
        self.turn: CommitWaiter | None = None
        self.task: asyncio.Task[None] | None = None


class RecordedWaiter:
    """Of one store, on one event loop. `look` says which of some jobs of a queue are there."""

    def __init__(self, look: Look, news: CommitSource) -> None:
        self._look = look
        self._news = news
        self._halls: dict[str, _QueueWaiters] = {}

    async def wait(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        """Those that are there, once all are, or after `wait_ms`. Raises what `look` raises."""
        futures = {key: self._enter(key) for key in set(keys)}
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await asyncio.gather(*futures.values())
        except TimeoutError:
            pass
        finally:
            for key, future in futures.items():
                self._leave(key, future)
        return {key for key, future in futures.items() if _is_there(future)}

    async def close(self) -> None:
        """Nobody waits any longer: those who do are cancelled."""
        tasks = [hall.task for hall in self._halls.values() if hall.task is not None]
        for hall in self._halls.values():
            for futures in hall.waiting.values():
                for future in futures:
                    future.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _enter(self, key: JobKey) -> asyncio.Future[None]:
        hall = self._halls.setdefault(key.queue, _QueueWaiters())
        future = asyncio.get_running_loop().create_future()
        hall.waiting.setdefault(key, set()).add(future)
        if hall.task is None:
            hall.task = asyncio.create_task(self._watch(key.queue, hall), name="holdfast-ledger-presence")
        elif hall.turn is not None:
            hall.turn.notify()
        return future

    def _leave(self, key: JobKey, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            # Looked at, so that nobody complains about it: one error is raised for all.
            future.exception()
        hall = self._halls.get(key.queue)
        if hall is None or key not in hall.waiting:
            return
        hall.waiting[key].discard(future)
        if not hall.waiting[key]:
            del hall.waiting[key]

    async def _watch(self, queue: str, hall: _QueueWaiters) -> None:
        try:
            await self._look_again_and_again(queue, hall)
        finally:
            del self._halls[queue]

    async def _look_again_and_again(self, queue: str, hall: _QueueWaiters) -> None:
        with self._news.of(queue) as hall.turn:
            while hall.waiting:
                try:
                    found = await self._look(queue, list(hall.waiting))
                except Exception as exc:  # noqa: BLE001 - handed to everyone who waits
                    self._fail(hall, exc)
                    break
                for key in found:
                    for future in hall.waiting.pop(key, ()):
                        if not future.done():
                            future.set_result(None)
                if hall.waiting:
                    await hall.turn.wait(_LOOK_S)

    def _fail(self, hall: _QueueWaiters, error: Exception) -> None:
        for futures in hall.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        hall.waiting.clear()


def _is_there(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


async def wait_position_change(
    projection: Projection, news: CommitSource, queue: str, than: FeedPosition, wait_ms: int
) -> FeedPosition:
    """`Projection.wait_moved` on any store."""
    until = time.monotonic() + wait_ms / 1000
    with news.of(queue) as turn:
        while True:
            now_at = await projection.position(queue)
            left_s = until - time.monotonic()
            if now_at != than or left_s <= 0:
                return now_at
            await turn.wait(min(left_s, _LOOK_S))
