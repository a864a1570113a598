"""Waiting for a ledger to move, without polling: who waits for a queue is woken after a commit that concerns it.

A waiter looks, waits, and looks again; being woken for nothing is allowed, missing something is not:

    with store.news.of(queue) as turn:
        while not await look():
            if not await turn.wait(timeout_s):
                break
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Turn:
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

    def tell(self) -> None:
        self._event.set()


class WaitingRoom:
    """Who waits for which queue. `changed` is called with +1 and -1 as people come and go."""

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._turns: dict[str, set[Turn]] = {}

    @contextmanager
    def of(self, queue: str) -> Iterator[Turn]:
        """Be told when this queue's feed has moved in the ledger."""
        turn = Turn()
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

    def tell(self, queues: Iterable[str]) -> None:
        for queue in queues:
            for turn in self._turns.get(queue, ()):
                turn.tell()

    def tell_all(self) -> None:
        self.tell(list(self._turns))
