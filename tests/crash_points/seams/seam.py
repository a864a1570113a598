"""A call to a store, by name and number, and how it fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


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


class Call(NamedTuple):
    """A call that was made. One that `leaves` nothing has changed no store: it has only read, or is not committed."""

    name: str
    number: int
    leaves: bool


class Seam:
    """Counts calls, and fails one. Used by one process at a time; `reborn` when the next one begins."""

    def __init__(self, point: Point | None = None) -> None:
        self.point = point
        #: Every call in order, for who wants to fail them all.
        self.calls: list[Call] = []
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

    def way_of(self, name: str, *, leaves: bool) -> Way | None:
        """What is to happen to this call: most go through."""
        if self.off:
            return None
        with self._lock:
            self._counts[name] += 1
            call = Call(name, self._counts[name], leaves)
            self.calls.append(call)
            if self.point is not None and call[:2] == self.point[:2] and not self.fired:
                self.fired = True
                return self.point.way
        return None

    def die(self) -> None:
        self.dead = True
        self._died()

    async def through(
        self,
        name: str,
        call: Callable[[], Awaitable[Any]],
        fail: Callable[[], BaseException],
        cut: Callable[[], None],
        *,
        leaves: bool,
    ) -> Any:
        """Make the call, or what becomes of it. `fail` makes the error of a connection that `cut` has broken."""
        if self.dead:
            # Nobody is there who could call.
            raise asyncio.CancelledError
        match self.way_of(name, leaves=leaves):
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


def points_of(calls: Sequence[Call]) -> list[Point]:
    """What is to be tried, in order, without what would be the same again.

    A lost reply of a call that leaves nothing is the same as a connection that breaks before it. And a process that
    dies between two changes of the stores dies at one of two places: right after the first, or right before the
    second, when all that it did outside of the stores is done.
    """
    found = []
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        found.append(Point(call.name, call.number, Way.BEFORE))
        if call.leaves or following is None or following.leaves:
            found.append(Point(call.name, call.number, Way.AFTER))
        if call.leaves:
            found.append(Point(call.name, call.number, Way.LOST))
    return found
