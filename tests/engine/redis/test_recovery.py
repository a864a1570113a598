"""Coming back after a wipe of Redis: on the old cut nothing is restored, on a new one everything (L4)."""

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
from holdfast.testing.contract.harness import LONG_WAIT_MS, Rig, ids, soon
from tests.conftest import MakeServer
from tests.engine.harness import RedisHarness, closing

pytestmark = pytest.mark.redis


@pytest.fixture
async def harness(make_redis: MakeServer) -> AsyncIterator[RedisHarness]:
    """On a server of its own: it will be wiped."""
    async with closing(RedisHarness(make_redis().url, "")) as harness:
        yield harness


@pytest.fixture
async def rig(harness: RedisHarness) -> Rig:
    return await Rig.on(harness, ledger=True)


async def open_views(rig: Rig) -> list[JobInfo]:
    """One job in every open state; the queued one last, or a claim would take it."""
    states = [*sorted(set(State) - FINAL - {State.QUEUED}), State.QUEUED]
    made = [(await rig.put_in(state, tenant_id="acme"))[0] for state in states]
    return [await rig.view(job_id) for job_id in made]


@pytest.mark.parametrize("refilled", [False, True], ids=["an empty feed", "another feed"])
async def test_a_wipe_between_cut_and_restore_restores_nothing(harness: RedisHarness, rig: Rig, refilled: bool) -> None:
    views = await open_views(rig)
    cut = await rig.engine.snapshot(rig.queue, [view.job_id for view in views])
    await harness.redis.flushall()
    if refilled:
        await rig.engine.attach_reader(rig.queue)
        await rig.submit_one()
    before = await rig.entries()
    assert await rig.engine.restore(rig.queue, cut, views) == [False] * len(views)
    assert [view for view in await rig.engine.get(rig.queue, [view.job_id for view in views]) if view] == []
    assert await rig.entries() == before


async def test_a_feed_that_filled_up_again_at_the_same_position_is_another_one(harness: RedisHarness, rig: Rig) -> None:
    views = await open_views(rig)
    cut = await rig.engine.snapshot(rig.queue, [])
    entry = (await harness.redis.xrange(harness.keys(rig.queue).feed, cut.position, cut.position))[0][1]
    await harness.redis.flushall()
    await harness.redis.xadd(harness.keys(rig.queue).feed, {**entry, b"nonce": b"another"}, id=cut.position)
    assert await rig.engine.restore(rig.queue, cut, views) == [False] * len(views)


async def test_after_a_wipe_a_new_cut_brings_every_job_back(harness: RedisHarness, rig: Rig) -> None:
    views = await open_views(rig)
    assert len(await rig.claim("w2")) == 1
    waiting = asyncio.create_task(rig.engine.claim("idle", [rig.queue], 10, LONG_WAIT_MS))
    await harness.redis.flushall()
    with pytest.raises(FeedDetached):
        await rig.submit_one()
    await rig.engine.attach_reader(rig.queue)
    cut = await rig.engine.snapshot(rig.queue, [view.job_id for view in views])
    assert cut.unknown == [view.job_id for view in views]
    assert await rig.engine.restore(rig.queue, cut, views) == [True] * len(views)
    states = {view.job_id: view.state for view in await rig.engine.get(rig.queue, cut.unknown) if view}
    running = {view.job_id for view in views if view.state is State.RUNNING}
    queued = {view.job_id for view in views if view.state is State.QUEUED}
    claimed = set(ids(await soon(waiting))) | set(ids(await rig.claim("w9")))
    assert claimed == running | queued
    assert {job_id: state for job_id, state in states.items() if job_id not in claimed} == {
        view.job_id: view.state for view in views if view.job_id not in claimed
    }
    assert await rig.engine.queues() == [rig.queue]


async def test_restore_and_survey_touch_only_declared_keys(harness: RedisHarness, rig: Rig) -> None:
    views = await open_views(rig)
    keys = {key async for key in harness.redis.scan_iter()}
    await harness.redis.flushall()
    cut = await rig.engine.snapshot(rig.queue, [view.job_id for view in views])
    await rig.engine.restore(rig.queue, cut, views)
    assert {key async for key in harness.redis.scan_iter()} <= keys


async def test_waiting_for_a_feed_does_not_poll(harness: RedisHarness, rig: Rig) -> None:
    waiting = asyncio.create_task(rig.engine.wait_feed({rig.queue: ""}, LONG_WAIT_MS))
    assert await rig.engine.wait_feed({rig.queue: ""}, 300) == []
    stats: dict[str, Any] = await harness.redis.info("commandstats")
    # One that waits and has not been answered yet, and one that was.
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


async def test_a_feed_of_another_type_costs_no_lease(harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    keys = QueueKeys(rig.queue, harness.names)
    await harness.redis.rename(keys.feed, "kept")
    await harness.redis.set(keys.feed, "a string")
    with pytest.raises(EngineUnavailable):
        await rig.engine.renew([claim.lease], [claim.lease])
    await harness.redis.rename("kept", keys.feed)
    assert await rig.engine.renew([claim.lease], [claim.lease]) == []
    assert await rig.succeed(claim) == ["applied"]


async def test_with_a_ledger_nothing_is_dropped_before_its_reader_is_back(harness: RedisHarness) -> None:
    """Workers go on after a wipe; what they say must still be there when the projector comes."""
    rig = await Rig.on(harness, ledger=True, feed_limit=20, finished_ttl_ms=1)
    await rig.submit(300)
    await harness.redis.hdel(harness.keys(rig.queue).control, "reader")
    for _ in range(300):
        await rig.succeed(await rig.claim_one())
    await rig.engine.prune([rig.queue])
    assert len(await rig.events()) == 900


async def test_a_full_redis_keeps_leases_and_restores_nothing_by_halves(harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one()
    lost = Rig(harness, rig.engine, "lost")
    views = [msgspec.structs.replace(view, queue=lost.queue) for view in await open_views(rig)]
    cut = await rig.engine.snapshot(lost.queue, [view.job_id for view in views])
    await harness.redis.config_set("maxmemory", "1")
    assert await rig.engine.renew([claim.lease], [claim.lease]) == []
    assert (await rig.entries())[-1].events[0].type == "task.heartbeat"
    with pytest.raises(EngineUnavailable, match="Redis is full"):
        await rig.engine.restore(lost.queue, cut, views)
    assert await lost.entries() == []
    await harness.redis.config_set("maxmemory", "0")
    assert await rig.engine.restore(lost.queue, cut, views) == [True] * len(views)
