"""Waiters are woken when the ledger has caught up, not before, and all share one reader."""

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
    """The part of a projection that is needed here. Only `move` changes its position."""

    def __init__(self) -> None:
        self.reads = 0
        self.down = False
        self._at = FeedPosition("3-0", "n")
        self._moved = asyncio.Condition()

    async def move(self, position: str) -> None:
        async with self._moved:
            self._at = FeedPosition(position, "n")
            self._moved.notify_all()
        await asyncio.sleep(0.01)

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        self.reads += 1
        if self.down:
            self.down = False
            raise LedgerUnavailable("unreachable")
        async with self._moved:
            await self._moved.wait_for(lambda: self._at != than)
            return self._at


class _Waiter:
    def __init__(self) -> None:
        self.wakes = 0
        self.woken = asyncio.Event()

    def wake(self) -> None:
        self.wakes += 1
        self.woken.set()


async def test_waiters_are_woken_with_the_ledger_and_not_before() -> None:
    ledger: Any = _Ledger()
    watch, waiters = LedgerWatch(ledger), [_Waiter() for _ in range(100)]
    for waiter in waiters:
        watch.notify_at("q", parse_position("5-0.1"), waiter)
        watch.notify_at("q", parse_position("7-0.0"), waiter)
    await ledger.move("4-0")
    assert {waiter.wakes for waiter in waiters} == {0}
    await ledger.move("5-0")
    assert {waiter.wakes for waiter in waiters} == {1}
    watch.cancel("q", waiters[0])
    await ledger.move("9-0")
    assert [waiter.wakes for waiter in waiters] == [1] + [2] * 99
    # Once at the start, and once for each move but the last, when no waiter was left.
    assert ledger.reads <= 4
    await watch.close()


async def test_an_unreachable_ledger_is_waited_for() -> None:
    ledger: Any = _Ledger()
    ledger.down = True
    watch, waiter = LedgerWatch(ledger), _Waiter()
    watch.notify_at("q", parse_position("3-0"), waiter)
    async with asyncio.timeout(20):
        await waiter.woken.wait()
    await watch.close()


async def test_an_embedded_ledger_is_never_behind() -> None:
    watch, waiter = LedgerWatch(None), _Waiter()
    watch.notify_at("q", parse_position("5-0"), waiter)
    assert waiter.wakes == 1


async def test_a_jobs_event_wakes_its_follower_once_the_ledger_has_it() -> None:
    ledger: Any = _Ledger()
    watch = LedgerWatch(ledger)
    follower = JobFollower(StreamFilter(None, job_id="j"), lambda: None, watch)
    watch.notify_at("q", START, follower)
    assert await follower.wait(0)
    event = Event(type="task.claimed", job_id="j", at_ms=1, tenant_id="t")
    follower.on_event(StreamEvent("q", event, parse_position("5-0.0"), "nonce"))
    await ledger.move("4-0")
    assert not await follower.wait(0.01)
    await ledger.move("5-0")
    assert await follower.wait(5)
    await watch.close()
