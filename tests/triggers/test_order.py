"""Order per key, and nobody waits for another's key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from holdfast.triggers.consumer import KeyedQueue
from tests.triggers.rig import Recorder, Rig, until


class _One:
    def __init__(self, key: str, number: int) -> None:
        self.key = key
        self.number = number


async def test_of_each_key_one_at_a_time() -> None:
    lines: KeyedQueue[_One] = KeyedQueue(10)
    for number, key in enumerate("aab"):
        lines.put(_One(key, number))
    lines.put(_One("", 3))
    taken = [await lines.next_item() for _ in range(3)]
    assert [one.number for one in taken if one] == [0, 2, 3]
    waiting = asyncio.ensure_future(lines.next_item())
    await asyncio.sleep(0)
    assert not waiting.done()
    first = taken[0]
    assert first is not None
    lines.requeue(first)
    assert await waiting is first
    lines.done(first)
    second = await lines.next_item()
    assert second is not None
    assert second.number == 1
    assert lines.size == 3


async def test_a_cancelled_taker_wakes_another() -> None:
    lines: KeyedQueue[_One] = KeyedQueue(10)
    takers = [asyncio.ensure_future(lines.next_item()) for _ in range(2)]
    await asyncio.sleep(0)
    lines.put(_One("", 1))
    takers[0].cancel()
    taken = await asyncio.wait_for(takers[1], 1)
    assert taken is not None
    assert taken.number == 1


async def test_shut_for_two_reasons_and_closed() -> None:
    lines: KeyedQueue[_One] = KeyedQueue(2)
    lines.block("a")
    lines.block("b")
    lines.put(_One("", 1))
    taker = asyncio.ensure_future(lines.next_item())
    await asyncio.sleep(0)
    lines.unblock("a")
    await asyncio.sleep(0)
    assert not taker.done()
    lines.unblock("b")
    taken = await asyncio.wait_for(taker, 1)
    assert taken is not None
    lines.put(_One("", 2))
    room = asyncio.ensure_future(lines.wait_for_capacity())
    await asyncio.sleep(0)
    assert not room.done()
    lines.done(taken)
    await asyncio.wait_for(room, 1)
    lines.close()
    assert await lines.next_item() is None


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_order_holds_through_failures(concurrency: int) -> None:
    random = Random(7)
    seen: dict[str, list[int]] = {}
    out: set[str] = set()

    async def act(context: Mapping[str, Any]) -> str:
        key, number = context["message"]
        assert key not in out, "two of one key at once"
        out.add(key)
        try:
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            if random.random() < 0.2:
                raise RuntimeError("again")
            seen.setdefault(key, []).append(number)
        finally:
            out.discard(key)
        return ""

    rig = Rig(Recorder(act), concurrency=concurrency, prefetch=20, max_retries=100)
    for number in range(300):
        key = f"k{random.randrange(12)}"
        rig.write([key, number], key)
    await rig.run(300)
    assert sum(map(len, seen.values())) == 300
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert rig.slept, "nothing was retried: the test shows nothing"


async def test_one_that_waits_for_its_retry_holds_only_its_key() -> None:
    """Even with a single worker."""
    retry = asyncio.Event()
    failed: list[int] = []

    def act(context: Mapping[str, Any]) -> str:
        if context["message"] == 0 and not failed:
            failed.append(0)
            raise RuntimeError("not yet")
        return ""

    async def sleep(_: float) -> None:
        await retry.wait()

    runtime = Recorder(act)
    rig = Rig(runtime, concurrency=1, sleep=sleep)
    for number, key in enumerate(["slow", "slow", "quick", ""]):
        rig.write(number, key)
    async with rig.trigger:
        await rig.off(2)
        assert runtime.messages == [0, 2, 3]
        retry.set()
        await rig.off(4)
    assert runtime.messages == [0, 2, 3, 0, 1]


async def test_no_more_at_once_than_concurrency() -> None:
    now, most = 0, 0
    go = asyncio.Event()

    async def act(_: Mapping[str, Any]) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1
        return ""

    rig = Rig(Recorder(act), concurrency=3, prefetch=5)
    for number in range(10):
        rig.write(number)
    async with rig.trigger:
        await until(lambda: now == 3)
        await until(lambda: rig.trigger.in_flight == 5)
        go.set()
        await rig.off(10)
    assert most == 3
