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

    #: The connection breaks before the store receives the call.
    BEFORE = "before"
    #: The store has applied the call, and the process crashes before it reads the reply.
    AFTER = "after"
    #: The store has applied the call, and the connection breaks before the process reads the reply.
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
        numbered_call, _, way = text.rpartition(":")
        call, _, number = numbered_call.rpartition("#")
        return cls(call, int(number), Way(way))


class Call(NamedTuple):
    """A call that was made. Without `changes` it only read, or what it wrote is not committed yet."""

    name: str
    number: int
    changes: bool


class Seam:
    """Counts calls, and fails one. Used by one process at a time; call `restart` for the next one."""

    def __init__(self, point: Point | None = None) -> None:
        self.point = point
        #: Every call in order.
        self.calls: list[Call] = []
        self.fired = False
        self.crashed = False
        #: Set while calls are made that are not part of the scenario.
        self.disabled = False
        self._counts: Counter[str] = Counter()
        self._on_crash: Callable[[], object] = lambda: None
        #: Closes what a crashed process had open. Must run on the loop that opened it.
        self.abandon: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def restart(self, on_crash: Callable[[], object]) -> None:
        """Begin a new process; `on_crash` is called when it crashes."""
        self.crashed, self._on_crash = False, on_crash

    def way_of(self, name: str, *, changes: bool) -> Way | None:
        """Count a call and return how it fails, or None if it passes through."""
        if self.disabled:
            return None
        with self._lock:
            self._counts[name] += 1
            call = Call(name, self._counts[name], changes)
            self.calls.append(call)
            if self.point is not None and call[:2] == self.point[:2] and not self.fired:
                self.fired = True
                return self.point.way
        return None

    def crash(self) -> None:
        self.crashed = True
        self._on_crash()

    async def through(
        self,
        name: str,
        call: Callable[[], Awaitable[Any]],
        fail: Callable[[], BaseException],
        cut: Callable[[], None],
        *,
        changes: bool,
    ) -> Any:
        """Make the call, or fail it. `fail` makes the error of a connection that `cut` has broken."""
        if self.crashed:
            # A crashed process makes no calls.
            raise asyncio.CancelledError
        match self.way_of(name, changes=changes):
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
                self.crash()
                raise asyncio.CancelledError


def select_points(calls: Sequence[Call]) -> list[Point]:
    """Select the points to test, in order, without equivalent ones.

    A lost reply of a call that changes nothing is equivalent to a connection that breaks before it. A process that
    crashes between two changes of the stores crashes right after the first or right before the second, when everything
    that it does outside of the stores is done.
    """
    points = []
    for call, next_call in zip(calls, [*calls[1:], None], strict=True):
        points.append(Point(call.name, call.number, Way.BEFORE))
        if call.changes or next_call is None or next_call.changes:
            points.append(Point(call.name, call.number, Way.AFTER))
        if call.changes:
            points.append(Point(call.name, call.number, Way.LOST))
    return points
