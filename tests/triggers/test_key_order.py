"""Order per key; keys do not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from holdfast.triggers.receiver import KeyedQueue
from tests.triggers.rig import Recorder, Rig, until


class _Item:
    def __init__(self, key: str, number: int) -> None:
        self.key = key
        self.number = number


async def test_one_item_per_key_at_a_time() -> None:
    queue: KeyedQueue[_Item] = KeyedQueue(10)
    for number, key in enumerate("aab"):
        queue.put(_Item(key, number))
    queue.put(_Item("", 3))
    taken = [await queue.next_item() for _ in range(3)]
    assert [item.number for item in taken if item] == [0, 2, 3]
    waiting = asyncio.ensure_future(queue.next_item())
    await asyncio.sleep(0)
    assert not waiting.done()
    first = taken[0]
    assert first is not None
    queue.requeue(first)
    assert await waiting is first
    queue.done(first)
    second = await queue.next_item()
    assert second is not None
    assert second.number == 1
    assert queue.size == 3


async def test_a_cancelled_taker_wakes_another() -> None:
    queue: KeyedQueue[_Item] = KeyedQueue(10)
    takers = [asyncio.ensure_future(queue.next_item()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.put(_Item("", 1))
    takers[0].cancel()
    taken = await asyncio.wait_for(takers[1], 1)
    assert taken is not None
    assert taken.number == 1


async def test_a_queue_blocked_twice_and_closed() -> None:
    queue: KeyedQueue[_Item] = KeyedQueue(2)
    queue.block("a")
    queue.block("b")
    queue.put(_Item("", 1))
    taker = asyncio.ensure_future(queue.next_item())
    await asyncio.sleep(0)
    queue.unblock("a")
    await asyncio.sleep(0)
    assert not taker.done()
    queue.unblock("b")
    taken = await asyncio.wait_for(taker, 1)
    assert taken is not None
    queue.put(_Item("", 2))
    room = asyncio.ensure_future(queue.wait_for_capacity())
    await asyncio.sleep(0)
    assert not room.done()
    queue.done(taken)
    await asyncio.wait_for(room, 1)
    queue.close()
    assert await queue.next_item() is None


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_order_is_kept_through_failures(concurrency: int) -> None:
    random = Random(7)
    handled: dict[str, list[int]] = {}
    running: set[str] = set()

    async def act(context: Mapping[str, Any]) -> str:
        key, number = context["message"]
        assert key not in running, "two messages of one key ran concurrently"
        running.add(key)
        try:
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            if random.random() < 0.2:
                raise RuntimeError("again")
            handled.setdefault(key, []).append(number)
        finally:
            running.discard(key)
        return ""

    rig = Rig(Recorder(act), concurrency=concurrency, prefetch=20, max_retries=100)
    for number in range(300):
        key = f"k{random.randrange(12)}"
        rig.write([key, number], key)
    await rig.run(300)
    assert sum(map(len, handled.values())) == 300
    assert all(numbers == sorted(numbers) for numbers in handled.values())
    assert rig.slept, "nothing was retried, so the test proves nothing"


async def test_a_message_waiting_for_its_retry_blocks_only_its_key() -> None:
    """Also with a single worker."""
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
        await rig.wait_handled(2)
        assert runtime.messages == [0, 2, 3]
        retry.set()
        await rig.wait_handled(4)
    assert runtime.messages == [0, 2, 3, 0, 1]


async def test_concurrency_is_limited() -> None:
    running, highest = 0, 0
    go = asyncio.Event()

    async def act(_: Mapping[str, Any]) -> str:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await go.wait()
        running -= 1
        return ""

    rig = Rig(Recorder(act), concurrency=3, prefetch=5)
    for number in range(10):
        rig.write(number)
    async with rig.trigger:
        await until(lambda: running == 3)
        await until(lambda: rig.trigger.in_flight == 5)
        go.set()
        await rig.wait_handled(10)
    assert highest == 3
