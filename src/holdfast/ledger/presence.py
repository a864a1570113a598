"""Waiting until jobs are in the ledger: however many callers wait, one look-up for all of them after each commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from holdfast.ledger.keys import JobKey
from holdfast.ledger.news import Turn
from holdfast.ledger.port import Position, Projection

#: News may be late or lost (a connection broke): look again after this long all the same.
_LOOK_S: Final = 5.0

Look = Callable[[str, Sequence[JobKey]], Awaitable[set[JobKey]]]


class News(Protocol):
    """Where to wait for a queue."""

    def of(self, queue: str) -> AbstractContextManager[Turn]: ...


class _Hall:
    """Who waits for jobs of one queue."""

    def __init__(self) -> None:
        self.waiting: dict[JobKey, set[asyncio.Future[None]]] = {}
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None


class Presence:
    """Of one store, on one event loop. `look` says which of some jobs of a queue are there."""

    def __init__(self, look: Look, news: News) -> None:
        self._look = look
        self._news = news
        self._halls: dict[str, _Hall] = {}

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
        hall = self._halls.setdefault(key.queue, _Hall())
        future = asyncio.get_running_loop().create_future()
        hall.waiting.setdefault(key, set()).add(future)
        if hall.task is None:
            hall.task = asyncio.create_task(self._watch(key.queue, hall), name="holdfast-ledger-presence")
        elif hall.turn is not None:
            hall.turn.tell()
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

    async def _watch(self, queue: str, hall: _Hall) -> None:
        try:
            await self._look_again_and_again(queue, hall)
        finally:
            del self._halls[queue]

    async def _look_again_and_again(self, queue: str, hall: _Hall) -> None:
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

    def _fail(self, hall: _Hall, error: Exception) -> None:
        for futures in hall.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        hall.waiting.clear()


def _is_there(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


async def wait_moved(projection: Projection, news: News, queue: str, than: Position, wait_ms: int) -> Position:
    """`Projection.wait_moved` on any store."""
    until = time.monotonic() + wait_ms / 1000
    with news.of(queue) as turn:
        while True:
            now_at = await projection.position(queue)
            left_s = until - time.monotonic()
            if now_at != than or left_s <= 0:
                return now_at
            await turn.wait(min(left_s, _LOOK_S))
