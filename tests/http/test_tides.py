"""Who waits for the ledger is rung when it is there, not before, and all share one who asks."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.core.job import Event
from holdfast.errors import LedgerUnavailable
from holdfast.http.listening import Told, Wish
from holdfast.http.places import NOWHERE, parsed
from holdfast.http.routes.stream import Bell
from holdfast.http.tides import Tides
from holdfast.ledger.port import Position


class _Ledger:
    """As much of a projection as is needed: it moves when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.down = False
        self._at = Position("3-0", "n")
        self._moved = asyncio.Condition()

    async def move(self, position: str) -> None:
        async with self._moved:
            self._at = Position(position, "n")
            self._moved.notify_all()
        await asyncio.sleep(0.01)

    async def wait_moved(self, queue: str, than: Position, wait_ms: int) -> Position:
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

    def ring(self) -> None:
        self.rings += 1
        self.rang.set()


async def test_a_ring_comes_with_the_ledger_and_not_before() -> None:
    ledger: Any = _Ledger()
    tides, waiters = Tides(ledger), [_Waiter() for _ in range(100)]
    for waiter in waiters:
        tides.when("q", parsed("5-0.1"), waiter)
        tides.when("q", parsed("7-0.0"), waiter)
    await ledger.move("4-0")
    assert {waiter.rings for waiter in waiters} == {0}
    await ledger.move("5-0")
    assert {waiter.rings for waiter in waiters} == {1}
    tides.forget("q", waiters[0])
    await ledger.move("9-0")
    assert [waiter.rings for waiter in waiters] == [1] + [2] * 99
    # Once at the beginning, and once for each move but the last, when nobody was left.
    assert ledger.asked <= 4
    await tides.close()


async def test_a_ledger_that_is_away_is_waited_for() -> None:
    ledger: Any = _Ledger()
    ledger.down = True
    tides, waiter = Tides(ledger), _Waiter()
    tides.when("q", parsed("3-0"), waiter)
    async with asyncio.timeout(20):
        await waiter.rang.wait()
    await tides.close()


async def test_a_ledger_of_the_engines_own_is_never_behind() -> None:
    tides, waiter = Tides(None), _Waiter()
    tides.when("q", parsed("5-0"), waiter)
    assert waiter.rings == 1


async def test_a_jobs_event_rings_its_bell_once_the_ledger_has_it() -> None:
    ledger: Any = _Ledger()
    tides = Tides(ledger)
    bell = Bell(Wish(None, job_id="j"), lambda: None, tides)
    tides.when("q", NOWHERE, bell)
    assert await bell.rung(0)
    event = Event(type="task.claimed", job_id="j", at_ms=1, tenant_id="t")
    bell.hear(Told("q", event, parsed("5-0.0"), "5-0", {}), None)
    await ledger.move("4-0")
    assert not await bell.rung(0.01)
    await ledger.move("5-0")
    assert await bell.rung(5)
    await tides.close()
