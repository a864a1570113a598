"""A claim that stands behind a wait on the same connection. On a Cluster it does not: a wait may span its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from holdfast.core.job import Claim, Priority
from holdfast.engine.port import Control
from holdfast.testing.contract.harness import LONG_WAIT_MS, QUEUE, Rig, ids, soon
from tests.faults.support import eventually
from tests.harness import RedisHarness, closing

pytestmark = pytest.mark.redis


@pytest.fixture(params=["redis_url", "redis_62_url", "redis_60_url"], ids=["current", "6.2", "6.0.9"])
async def harness(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[RedisHarness]:
    async with closing(RedisHarness(request.getfixturevalue(request.param), namespace)) as harness:
        yield harness


@pytest.fixture
async def rig(harness: RedisHarness) -> Rig:
    return await Rig.on(harness)


async def waiting_for_work(rig: Rig, harness: RedisHarness) -> asyncio.Task[list[Claim]]:
    """A worker that Redis has put to sleep."""
    waiting = asyncio.create_task(rig.engine.claim("w1", [QUEUE], 10, LONG_WAIT_MS))

    async def sleeps() -> bool:
        return bool((await harness.redis.info("clients"))["blocked_clients"])

    await eventually(sleeps, "the worker to sleep")
    return waiting


async def test_a_job_is_leased_to_whoever_waits_the_moment_it_comes(harness: RedisHarness, rig: Rig) -> None:
    """Before the worker has said anything: it cannot, its loop stands still meanwhile."""
    waiting = await waiting_for_work(rig, harness)
    keys, group = harness.keys(QUEUE), harness.names.group
    message = {"task_id": "j1", "type": "print", "payload": "{}"}
    with redis.Redis.from_url(harness.url) as other:
        other.xadd(keys.streams[Priority.NORMAL], message)
        assert other.xpending(keys.streams[Priority.NORMAL], group)["consumers"] == [{"name": b"w1", "pending": 1}]
    assert ids(await soon(waiting)) == ["j1"]


async def test_a_wait_that_is_given_up_takes_nothing(harness: RedisHarness, rig: Rig) -> None:
    waiting = await waiting_for_work(rig, harness)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    job_id = await rig.submit_one()
    (claim,) = await rig.claim("w2")
    assert (claim.job_id, claim.lease.deliveries) == (job_id, 1)
    assert await rig.engine.resume("w1", [QUEUE], ()) == []


async def test_scripts_that_are_flushed_during_a_wait_are_loaded_again(harness: RedisHarness, rig: Rig) -> None:
    waiting = await waiting_for_work(rig, harness)
    await harness.redis.script_flush()
    job_id = await rig.submit_one()
    assert ids(await soon(waiting)) == [job_id]


async def test_a_lane_that_opens_during_a_wait_is_served(harness: RedisHarness, rig: Rig) -> None:
    """The claim that waits does not name its streams."""
    waiting = await waiting_for_work(rig, harness)
    elsewhere = Rig(harness, await harness.make(), QUEUE)
    job_id = await elsewhere.submit_one(tenant_id="acme")
    assert ids(await soon(waiting)) == [job_id]


async def test_who_waits_for_a_queue_that_was_paused_before_anybody_worked_there_does_not_spin(
    harness: RedisHarness, rig: Rig
) -> None:
    await rig.engine.set_control(QUEUE, Control(paused=True))
    # The first wait finds no group, and makes it; the second one is ended by the nudge of the pause itself.
    for _ in range(3):
        assert await rig.engine.claim("w1", [QUEUE], 10, 20) == []
    waiting = await waiting_for_work(rig, harness)
    await rig.engine.set_control(QUEUE, Control())
    job_id = await rig.submit_one()
    assert ids(await soon(waiting) or await soon(rig.engine.claim("w1", [QUEUE], 10, LONG_WAIT_MS))) == [job_id]
