"""Recovery after a wipe of Redis: an old snapshot restores nothing, a new one everything (L4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from holdfast.core.job import JobInfo
from holdfast.core.states import FINAL, State
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.errors import EngineUnavailable, FeedDetached
from holdfast.testing.contract.harness import LONG_WAIT_MS, Rig, ids, open_queue, soon
from tests.conftest import MakeServer
from tests.engine.harness import RedisHarness, closing

pytestmark = pytest.mark.redis


@pytest.fixture
async def harness(make_redis: MakeServer) -> AsyncIterator[RedisHarness]:
    """On a separate server, because it is wiped."""
    async with closing(RedisHarness(make_redis().url, "")) as harness:
        yield harness


@pytest.fixture
async def rig(harness: RedisHarness) -> Rig:
    return await Rig.on(harness, ledger=True)


async def make_open_jobs(rig: Rig) -> list[JobInfo]:
    """Put one job in every open state; the queued one last, so that no claim leases it."""
    states = [*sorted(set(State) - FINAL - {State.QUEUED}), State.QUEUED]
    job_ids = [(await rig.put_in(state, tenant_id="acme"))[0] for state in states]
    return [await rig.view(job_id) for job_id in job_ids]


@pytest.mark.parametrize("refilled", [False, True], ids=["an empty feed", "another feed"])
async def test_a_wipe_between_snapshot_and_restore_restores_nothing(
    harness: RedisHarness, rig: Rig, refilled: bool
) -> None:
    infos = await make_open_jobs(rig)
    snapshot = await rig.engine.snapshot(rig.queue, [info.job_id for info in infos])
    await harness.redis.flushall()
    if refilled:
        await open_queue(rig.engine, rig.queue)
        await rig.submit_one()
    before = await rig.entries()
    assert await rig.engine.restore(rig.queue, snapshot, infos) == [False] * len(infos)
    assert [info for info in await rig.engine.get(rig.queue, [info.job_id for info in infos]) if info] == []
    assert await rig.entries() == before


async def test_a_refilled_feed_at_the_same_position_is_another_feed(harness: RedisHarness, rig: Rig) -> None:
    infos = await make_open_jobs(rig)
    snapshot = await rig.engine.snapshot(rig.queue, [])
    entry = (await harness.redis.xrange(harness.keys(rig.queue).feed, snapshot.position, snapshot.position))[0][1]
    await harness.redis.flushall()
    await harness.redis.xadd(harness.keys(rig.queue).feed, {**entry, b"nonce": b"another"}, id=snapshot.position)
    assert await rig.engine.restore(rig.queue, snapshot, infos) == [False] * len(infos)


async def test_after_a_wipe_a_new_snapshot_restores_every_job(harness: RedisHarness, rig: Rig) -> None:
    infos = await make_open_jobs(rig)
    assert len(await rig.claim("w2")) == 1
    waiting = asyncio.create_task(rig.engine.claim("idle", [rig.queue], 10, LONG_WAIT_MS))
    await harness.redis.flushall()
    with pytest.raises(FeedDetached):
        await rig.submit_one()
    await open_queue(rig.engine, rig.queue)
    snapshot = await rig.engine.snapshot(rig.queue, [info.job_id for info in infos])
    assert snapshot.unknown == [info.job_id for info in infos]
    assert await rig.engine.restore(rig.queue, snapshot, infos) == [True] * len(infos)
    states = {info.job_id: info.state for info in await rig.engine.get(rig.queue, snapshot.unknown) if info}
    running = {info.job_id for info in infos if info.state is State.RUNNING}
    queued = {info.job_id for info in infos if info.state is State.QUEUED}
    claimed = set(ids(await soon(waiting))) | set(ids(await rig.claim("w9")))
    assert claimed == running | queued
    assert {job_id: state for job_id, state in states.items() if job_id not in claimed} == {
        info.job_id: info.state for info in infos if info.job_id not in claimed
    }
    assert await rig.engine.queues() == [rig.queue]


async def test_restore_and_snapshot_touch_only_declared_keys(harness: RedisHarness, rig: Rig) -> None:
    infos = await make_open_jobs(rig)
    keys = {key async for key in harness.redis.scan_iter()}
    await harness.redis.flushall()
    snapshot = await rig.engine.snapshot(rig.queue, [info.job_id for info in infos])
    await rig.engine.restore(rig.queue, snapshot, infos)
    assert {key async for key in harness.redis.scan_iter()} <= keys


async def test_waiting_for_a_feed_does_not_poll(harness: RedisHarness, rig: Rig) -> None:
    waiting = asyncio.create_task(rig.engine.wait_feed({rig.queue: ""}, LONG_WAIT_MS))
    assert await rig.engine.wait_feed({rig.queue: ""}, 300) == []
    stats: dict[str, Any] = await harness.redis.info("commandstats")
    # One that still waits, and one that was answered.
    assert stats["cmdstat_xread"]["calls"] <= 2
    await rig.submit_one()
    assert await soon(waiting) == [rig.queue]


async def test_closing_the_engine_ends_a_wait(harness: RedisHarness) -> None:
    engine = RedisEngine(harness.url, KeyNames(), EngineOptions())
    await engine.open()
    waiting = asyncio.create_task(engine.wait_feed({"orders": ""}, LONG_WAIT_MS))
    assert await engine.wait_feed({"orders": ""}, 20) == []
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await soon(waiting)


async def test_a_feed_of_another_type_loses_no_lease(harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    keys = QueueKeys(rig.queue, harness.names)
    await harness.redis.rename(keys.feed, "kept")
    await harness.redis.set(keys.feed, "a string")
    with pytest.raises(EngineUnavailable):
        await rig.engine.renew([claim.lease], [claim.lease])
    await harness.redis.rename("kept", keys.feed)
    assert await rig.engine.renew([claim.lease], [claim.lease]) == []
    assert await rig.succeed(claim) == ["applied"]


async def test_with_a_ledger_nothing_is_dropped_before_a_reader_attaches(harness: RedisHarness) -> None:
    """Workers continue after a wipe; their events must still be in the feed when the projector attaches."""
    rig = await Rig.on(harness, ledger=True, feed_limit=20, finished_ttl_ms=1)
    await rig.submit(300)
    await harness.redis.hdel(harness.keys(rig.queue).control, "reader")
    for _ in range(300):
        await rig.succeed(await rig.claim_one())
    await rig.engine.prune([rig.queue])
    assert len(await rig.events()) == 900


async def test_a_full_redis_keeps_leases_and_restores_nothing_partially(harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    lost = Rig(harness, rig.engine, "lost")
    infos = [msgspec.structs.replace(info, queue=lost.queue) for info in await make_open_jobs(rig)]
    snapshot = await rig.engine.snapshot(lost.queue, [info.job_id for info in infos])
    await harness.redis.config_set("maxmemory", "1")
    assert await rig.engine.renew([claim.lease], [claim.lease]) == []
    assert (await rig.entries())[-1].events[0].type == "task.heartbeat"
    with pytest.raises(EngineUnavailable, match="Redis is full"):
        await rig.engine.restore(lost.queue, snapshot, infos)
    assert await lost.entries() == []
    await harness.redis.config_set("maxmemory", "0")
    assert await rig.engine.restore(lost.queue, snapshot, infos) == [True] * len(infos)
