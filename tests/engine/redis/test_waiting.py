"""Waiting for a job's end on Redis: few round trips, since each of them may have to wait for a core."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.states import State
from holdfast.engine.redis.net.connection import PipelinedConnection, PubSubConnection
from holdfast.testing.contract.harness import QUEUE, Rig
from tests.engine.harness import RedisHarness
from tests.outbox.support import until

pytestmark = pytest.mark.redis


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that this process sends and waits for, in order."""
    sent: list[str] = []
    real = PipelinedConnection.call

    def call(self: PipelinedConnection, *command: Any, blocks_s: float = 0.0) -> asyncio.Future[Any]:
        sent.append(command[0].decode())
        return real(self, *command, blocks_s=blocks_s)

    monkeypatch.setattr(PipelinedConnection, "call", call)
    return sent


async def is_registered(redis_harness: RedisHarness, job_id: str) -> bool:
    return bool(await redis_harness.redis.hexists(redis_harness.keys(QUEUE).waiters, job_id))


async def test_waiting_for_a_final_job_takes_one_round_trip(rig: Rig, calls: list[str]) -> None:
    first, second = await rig.start_one(), await rig.start_one()
    await rig.succeed(first, second)
    # The first call opens connections and loads scripts.
    await rig.engine.wait_final(QUEUE, first.job_id, 10_000)
    calls.clear()
    info = await rig.engine.wait_final(QUEUE, second.job_id, 10_000)
    assert info is not None
    assert info.state is State.SUCCEEDED
    assert [call for call in calls if call != "SUBSCRIBE"] == ["EVALSHA"]


async def test_waiting_for_a_running_job_takes_three_round_trips(
    redis_harness: RedisHarness, rig: Rig, calls: list[str]
) -> None:
    before, claim = await rig.start_one(), await rig.start_one()
    await rig.succeed(before)
    await rig.engine.wait_final(QUEUE, before.job_id, 10_000)
    calls.clear()
    waiting = asyncio.create_task(rig.engine.wait_final(QUEUE, claim.job_id, 60_000))
    await until(lambda: is_registered(redis_harness, claim.job_id))
    # The subscription is under way while the job is read; the second read registers as well.
    assert calls == ["SUBSCRIBE", "EVALSHA", "EVALSHA"]
    calls.clear()
    await rig.succeed(claim)
    info = await waiting
    assert info is not None
    assert info.state is State.SUCCEEDED
    # One to settle, one to read the result; the rig itself reads the time.
    assert [call for call in calls if call != "TIME"] == ["EVALSHA", "EVALSHA"]
    assert await redis_harness.redis.hlen(redis_harness.keys(QUEUE).waiters) == 0


async def test_a_waiter_is_registered_once_its_subscription_is_confirmed(
    redis_harness: RedisHarness, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, the end of the job would be published without a subscriber."""
    claim = await rig.start_one()
    confirmed = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(PubSubConnection, "call", lambda *_: confirmed)
    waiting = asyncio.create_task(rig.engine.wait_final(QUEUE, claim.job_id, 60_000))
    for _ in range(20):
        await rig.engine.get(QUEUE, [claim.job_id])
        assert not await is_registered(redis_harness, claim.job_id)
    confirmed.set_result(None)
    await until(lambda: is_registered(redis_harness, claim.job_id))
    waiting.cancel()


async def test_a_cancelled_waiter_keeps_the_subscription_of_the_others(
    redis_harness: RedisHarness, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = await rig.start_one()
    confirmed = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(PubSubConnection, "call", lambda *_: confirmed)
    first, second = (asyncio.create_task(rig.engine.wait_final(QUEUE, claim.job_id, 60_000)) for _ in range(2))
    for _ in range(20):
        await rig.engine.get(QUEUE, [claim.job_id])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    confirmed.set_result(None)
    await until(lambda: is_registered(redis_harness, claim.job_id))
    second.cancel()


async def test_two_waiters_for_one_job_are_both_woken(redis_harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    both = [asyncio.create_task(rig.engine.wait_final(QUEUE, claim.job_id, 60_000)) for _ in range(2)]
    await until(lambda: is_registered(redis_harness, claim.job_id))
    await rig.succeed(claim)
    assert [info.state for info in await asyncio.gather(*both) if info] == [State.SUCCEEDED] * 2


async def test_a_lost_subscription_is_renewed(redis_harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    waiting = asyncio.create_task(rig.engine.wait_final(QUEUE, claim.job_id, 60_000))
    await until(lambda: is_registered(redis_harness, claim.job_id))
    engine: Any = rig.engine
    engine._completion.close()
    await rig.succeed(claim)
    info = await waiting
    assert info is not None
    assert info.state is State.SUCCEEDED


async def test_an_unknown_job_is_not_waited_for(redis_harness: RedisHarness, rig: Rig) -> None:
    assert await rig.engine.wait_final(QUEUE, "unknown", 60_000) is None
    assert await redis_harness.redis.hlen(redis_harness.keys(QUEUE).waiters) == 0
