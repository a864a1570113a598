"""The messages in hand: order per key, without one slow key holding up the rest (requirement T6.7).

Of each key one message at a time is out; those behind it wait for `done`. What waits for a retry keeps its key, and
nobody else: it is in no worker's hands. Messages without a key wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """What stands in a line."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


class Lines(Generic[T]):
    """Filled by one consumer, emptied by any number of workers. One event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: so many may be in hand before `room` makes the consumer wait."""
        self._limit = limit
        self._ready: deque[T] = deque()
        #: By key, those behind the one that is out.
        self._behind: dict[str, deque[T]] = {}
        self._takers: deque[asyncio.Future[None]] = deque()
        self._room: asyncio.Future[None] | None = None
        self._shut: set[str] = set()
        self._closed = False
        #: Everything that has been put and is not done.
        self.size = 0

    def put(self, item: T) -> None:
        """A new one, behind all others of its key."""
        self.size += 1
        if item.key:
            behind = self._behind.get(item.key)
            if behind is not None:
                behind.append(item)
                return
            self._behind[item.key] = deque()
        self._ready.append(item)
        self._wake()

    async def room(self) -> None:
        """Until fewer than the limit are in hand."""
        while self.size >= self._limit:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def take(self) -> T | None:
        """The next one whose turn it is; None once the lines are closed."""
        while not self._closed:
            if self._ready and not self._shut:
                return self._ready.popleft()
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            try:
                await taker
            except asyncio.CancelledError:
                if taker.done() and not taker.cancelled():
                    # Woken and cancelled in one moment: somebody else must see to it.
                    self._wake()
                raise
        return None

    def back(self, item: T) -> None:
        """One that was out, again: it still has its key, and comes before those that have not begun."""
        self._ready.appendleft(item)
        self._wake()

    def done(self, item: T) -> None:
        """It is off: the next of its key may go."""
        self.size -= 1
        if item.key:
            behind = self._behind[item.key]
            if behind:
                self._ready.append(behind.popleft())
                self._wake()
            else:
                del self._behind[item.key]
        if self._room is not None and self.size < self._limit and not self._room.done():
            self._room.set_result(None)

    def ready(self) -> list[T]:
        """Those whose turn it is, and that nobody has taken."""
        return list(self._ready)

    def shut(self, why: str) -> None:
        """Nothing is taken until `open` says that this reason is gone."""
        self._shut.add(why)

    def open(self, why: str) -> None:
        self._shut.discard(why)
        if not self._shut:
            for _ in range(len(self._ready)):
                self._wake()

    def close(self) -> None:
        """Nothing is taken any more."""
        self._closed = True
        while self._takers:
            self._wake()

    def _wake(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return
