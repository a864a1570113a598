"""Who waits for the ledger is rung when it is there, not before, and all share one who asks."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.core.job import Event
from holdfast.errors import LedgerUnavailable
from holdfast.http.routes.stream import JobFollower
from holdfast.http.sse import LedgerWatch
from holdfast.http.subscribers import START, StreamEvent, StreamFilter, parse_position
from holdfast.ledger.port.ledger import FeedPosition


class _Ledger:
    """As much of a projection as is needed: it moves when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.down = False
        self._at = FeedPosition("3-0", "n")
        self._moved = asyncio.Condition()

    async def move(self, position: str) -> None:
        async with self._moved:
            self._at = FeedPosition(position, "n")
            self._moved.notify_all()
        await asyncio.sleep(0.01)

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        self.asked += 1
        if self.down:
            self.down = False
            raise LedgerUnavailable("away")
        async with self._moved:
            await self._moved.wait_for(lambda: self._at != than)
            return self._at


class _Waiter:
    def __init__(self) -> None:
        self.rings = 0
        self.rang = asyncio.Event()

    def wake(self) -> None:
        self.rings += 1
        self.rang.set()


async def test_a_ring_comes_with_the_ledger_and_not_before() -> None:
    ledger: Any = _Ledger()
    tides, waiters = LedgerWatch(ledger), [_Waiter() for _ in range(100)]
    for waiter in waiters:
        tides.notify_at("q", parse_position("5-0.1"), waiter)
        tides.notify_at("q", parse_position("7-0.0"), waiter)
    await ledger.move("4-0")
    assert {waiter.rings for waiter in waiters} == {0}
    await ledger.move("5-0")
    assert {waiter.rings for waiter in waiters} == {1}
    tides.cancel("q", waiters[0])
    await ledger.move("9-0")
    assert [waiter.rings for waiter in waiters] == [1] + [2] * 99
    # Once at the beginning, and once for each move but the last, when nobody was left.
    assert ledger.asked <= 4
    await tides.close()


async def test_a_ledger_that_is_away_is_waited_for() -> None:
    ledger: Any = _Ledger()
    ledger.down = True
    tides, waiter = LedgerWatch(ledger), _Waiter()
    tides.notify_at("q", parse_position("3-0"), waiter)
    async with asyncio.timeout(20):
        await waiter.rang.wait()
    await tides.close()


async def test_a_ledger_of_the_engines_own_is_never_behind() -> None:
    tides, waiter = LedgerWatch(None), _Waiter()
    tides.notify_at("q", parse_position("5-0"), waiter)
    assert waiter.rings == 1


async def test_a_jobs_event_rings_its_bell_once_the_ledger_has_it() -> None:
    ledger: Any = _Ledger()
    tides = LedgerWatch(ledger)
    bell = JobFollower(StreamFilter(None, job_id="j"), lambda: None, tides)
    tides.notify_at("q", START, bell)
    assert await bell.wait(0)
    event = Event(type="task.claimed", job_id="j", at_ms=1, tenant_id="t")
    bell.on_event(StreamEvent("q", event, parse_position("5-0.0"), "5-0", {}), None)
    await ledger.move("4-0")
    assert not await bell.wait(0.01)
    await ledger.move("5-0")
    assert await bell.wait(5)
    await tides.close()
