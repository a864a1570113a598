"""A node of a Cluster is away: its own queues wait, those of the others go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import pytest

from holdfast import Holdfast, State
from holdfast.core.verdict import Settlement, SettleResult, Succeed
from holdfast.engine.port import PartialFailure
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.net.client import ConnectionLost
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract import Rig
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.engine_tasks import EnginePruner, Reclaimer
from holdfast.upkeep.loop import QueueSelection
from holdfast.verification.chaos.topologies import ClusterRedis
from tests.conftest import MakeCluster
from tests.contract.outage import REPLY_S, Scene
from tests.contract.outage import cluster as cluster
from tests.contract.outage import scene as scene
from tests.harness import RedisHarness, closing
from tests.worker.support import eventually, working

pytestmark = [pytest.mark.faults, pytest.mark.redis]


def _done(claim: Any) -> Settlement:
    return Settlement(claim, Succeed(b"1"), claim.claimed_at_ms)


async def test_claims_go_on_around_a_dead_node(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    submitted = {queue: await scene.rig(queue).submit(20) for queue in scene.queues}
    scene.kill()
    claims = [claim for _ in range(4) for claim in await scene.claim()]
    assert {claim.job_id for claim in claims} == {*submitted[scene.well[0]], *submitted[scene.well[1]]}
    began = time.monotonic()
    assert await scene.claim(wait_ms=60_000) == []
    assert 0.3 < time.monotonic() - began < 30, "it looks for the dead node now and then, and does not spin"
    job_id = (await scene.rig(scene.well[0]).submit(1))[0]
    assert [claim.job_id for claim in await scene.claim(wait_ms=5_000)] == [job_id]
    assert len([line for line in caplog.messages if "unreachable, other queues continue" in line]) == 1
    await scene.heal()
    back = await scene.claim_all(20)
    assert {claim.job_id for claim in back} == set(submitted[scene.hit])
    assert len([line for line in caplog.messages if "recovered" in line]) == 1
    assert await scene.engine.settle([_done(claim) for claim in (*claims, *back)]) == [SettleResult.APPLIED] * 60


async def test_what_a_lost_reply_had_granted_comes_first_and_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node granted jobs and died with the reply."""
    before = await scene.rig(scene.hit).submit(2)
    known = await scene.claim(limit=2)
    lost = await scene.rig(scene.hit).submit(3)
    there = await scene.rig(scene.well[0]).submit(3)
    run = scene.engine._store.client.run

    async def lose(purpose: Any, script: Any, keys: Any, arguments: Any) -> Any:
        reply = await run(purpose, script, keys, arguments)
        if script.name == "claim" and keys[0] == scene.harness.keys(scene.hit).streams[0]:
            scene.kill()
            raise ConnectionLost("the connection was lost")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(scene.engine._store.client, "run", lose)
        assert {claim.job_id for claim in await scene.claim()} == set(there)
    await scene.heal()
    late = await scene.rig(scene.hit).submit(1)
    found = await scene.claim_all(4)
    assert [claim.job_id for claim in found] == [*lost, *late]
    assert {claim.attempt for claim in found} == {1}
    assert {claim.lease.deliveries for claim in found} == {1}
    assert {claim.job_id for claim in known} == set(before)
    assert await scene.engine.settle([_done(claim) for claim in (*known, *found)]) == [SettleResult.APPLIED] * 6


async def test_a_hung_node_is_waited_for_once(scene: Scene) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    await scene.claim_all(3)
    node = scene.cluster.node(scene.down)
    node.pause()
    try:
        took = []
        for _ in range(20):
            for queue in scene.well:
                await scene.rig(queue).submit(1)
            began = time.monotonic()
            assert len(await scene.claim()) == 2
            took.append(time.monotonic() - began)
        assert took[0] < REPLY_S + 1
        assert max(took[1:]) < REPLY_S / 2
    finally:
        node.resume()


async def test_other_queues_take_jobs_and_keep_their_leases(scene: Scene) -> None:
    alive = scene.well[0]
    healthy, hit = scene.rig(alive), scene.rig(scene.hit)
    claims = [await hit.start_one(), await healthy.start_one()]
    # The test's own client has to find the way while all are there.
    await scene.harness.age_queue(alive, 0)
    scene.kill()
    with pytest.raises(EngineUnavailable):
        await hit.submit_one()
    # The list of queues is gone, too; it was looked at long ago.
    scene.engine._store._known[alive] = 0.0
    assert await healthy.submit_one()
    await scene.harness.age_queue(alive, 20_000)
    with pytest.raises(PartialFailure):
        await scene.engine.renew([claim.lease for claim in claims])
    stream = scene.harness.keys(alive).streams[1].decode()
    (row,) = await scene.raw(alive, "XPENDING", stream, scene.harness.names.group, "-", "+", 10)
    assert row[2] < 20_000
    assert await healthy.succeed(claims[1]) == [SettleResult.APPLIED]


async def test_only_if_no_node_answers_a_call_fails(scene: Scene) -> None:
    await scene.rig(scene.hit).submit(1)
    scene.kill()
    only = [scene.hit]
    for call in (
        lambda: scene.engine.claim("w1", only, 10, 0, tuple),
        lambda: scene.engine.claim("w1", scene.queues, 10, 0),
        lambda: scene.engine.recover_claims("w1", only, ()),
        lambda: scene.engine.reclaim("w1", only, 10),
        lambda: scene.engine.promote(only, 10),
        lambda: scene.engine.prune(only),
        lambda: scene.engine.listen(only, 1),
    ):
        with pytest.raises(EngineUnavailable):
            await call()


async def test_verdicts_are_settled_where_they_can_be(scene: Scene) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(2)
    claims = await scene.claim_all(6)
    settlements = [_done(claim) for claim in claims]
    scene.kill()
    for applied in (SettleResult.APPLIED, SettleResult.ALREADY):
        with pytest.raises(PartialFailure, match=r"cannot reach|connection was lost") as raised:
            await scene.engine.settle(settlements)
        assert raised.value.completed == [None if each.queue == scene.hit else applied for each in claims]
    assert scene.engine.counts.succeeded == 4
    with pytest.raises(PartialFailure) as raised:
        await scene.engine.settle([each for each in settlements if each.claim.queue == scene.hit])
    assert raised.value.completed == [None, None]
    await scene.heal()
    answers: list[SettleResult] = []
    async with asyncio.timeout(10):
        while not answers:
            try:
                answers = await scene.engine.settle(settlements)
            except PartialFailure:
                await asyncio.sleep(0.02)
    assert Counter(answers) == {SettleResult.APPLIED: 2, SettleResult.ALREADY: 4}


async def test_upkeep_goes_on_around_a_dead_node(scene: Scene) -> None:
    engine, harness = scene.engine, scene.harness
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    lost = await scene.claim_all(3)
    for queue in scene.queues:
        await scene.rig(queue).submit(1, delay_ms=60_000)
        await harness.age_queue(queue, 120_000)
    assert await engine.queues() == sorted(scene.queues)
    assert await engine.listen(scene.queues, 1) is not None
    scene.kill()
    asked = _counted(engine._store.client, "call")
    for _ in range(3):
        assert await engine.queues() == sorted(scene.queues), "the list was on the dead node, and is remembered"
    assert len(asked) == 1, "a node that hangs would be waited for each time"
    assert (await engine.promote(scene.queues, 10)).count == 2
    with pytest.raises(PartialFailure) as raised:
        await engine.renew([claim.lease for claim in lost])
    assert raised.value.completed == []
    assert [view.queue for view in await engine.workers(scene.queues)] == sorted(scene.well)
    for queue in scene.well:
        await harness.age_queue(queue, 120_000)
    reclaimer = Reclaimer(engine, QueueSelection(engine, scene.queues), _settings(), "upkeep-1")
    await reclaimer._run_once()
    for queue in scene.well:
        assert (await engine.stats(queue)).states[State.QUEUED] == 2, "given back, and promoted"
    await EnginePruner(engine, QueueSelection(engine, scene.queues))._run_once()
    await engine.deregister_worker("w1", scene.queues)
    await BacklogMonitor(engine, QueueSelection(engine, scene.queues), _settings(backlog_alert=1), None).check()
    assert engine.counts.alerts == {f"backlog:{queue}" for queue in scene.well}
    fresh = engine.clone()
    await fresh.open()
    assert await fresh.listen(scene.queues, 1) == []
    await fresh.close()


def _settings(**more: Any) -> Any:
    return Holdfast("sqlite:///unused.db", **more).settings


# A worker ------------------------------------------------------------------------------------------


async def test_a_worker_goes_on_around_a_dead_node(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Jobs of the other nodes run and are settled; a run of the dead node's keeps its verdict until it is back."""
    caplog.set_level(logging.WARNING)
    app = Holdfast(scene.cluster.url, namespace=scene.harness.names.namespace, reclaim_interval_s=0.2)
    gate, runs = asyncio.Event(), Counter[str]()

    @app.task
    async def work(name: str) -> str:
        runs[name] += 1
        if name.startswith("long"):
            await gate.wait()
        return name

    async with app, working(app, queues=scene.queues, concurrency=20) as worker:
        long = {queue: await work.options(queue=queue).submit(f"long-{queue}") for queue in scene.queues}
        await eventually(lambda: len(runs) == 3)
        scene.kill()
        gate.set()
        for queue in scene.well:
            assert await long[queue].result(60) == f"long-{queue}"
        for number in range(20):
            queue = scene.well[number % 2]
            began = time.monotonic()
            job = await work.options(queue=queue).submit(f"short-{number}")
            assert await job.result(60) == f"short-{number}"
            assert time.monotonic() - began < 10, "as long as a node may take to answer"
        assert worker.in_flight == 1
        assert worker.ready
        claims = _counted(app.engine, "claim")
        await asyncio.sleep(1)
        assert len(claims) < 20, "a busy loop"
        await scene.heal()
        assert await long[scene.hit].result(60) == f"long-{scene.hit}"
        job = await eventually_submitted(work.options(queue=scene.hit), "after")
        assert await job.result(60) == "after"
        await eventually(lambda: worker.in_flight == 0)
    assert set(runs.values()) == {1}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("unreachable, other queues continue" in line for line in said) == 1, said
    assert sum("verdicts wait" in line for line in said) == 1, said
    assert len(said) < 8, said


def _counted(engine: Any, name: str) -> list[float]:
    called: list[float] = []
    method = getattr(engine, name)

    async def counting(*arguments: Any, **options: Any) -> Any:
        called.append(time.monotonic())
        return await method(*arguments, **options)

    setattr(engine, name, counting)
    return called


async def eventually_submitted(task: Any, name: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                return await task.submit(name)
            except EngineUnavailable:
                await asyncio.sleep(0.05)


async def test_a_worker_starts_while_a_node_is_away(scene: Scene) -> None:
    scene.kill()
    engine = RedisEngine(scene.cluster.url, scene.harness.names)
    await engine.open()
    assert await engine.claim("w1", scene.queues, 10, 10, tuple) == []
    await engine.close()


async def test_a_replica_that_takes_over_is_found_without_a_word_from_the_dead_master(
    make_cluster: MakeCluster, namespace: str
) -> None:
    """A dead master never says `MOVED`: whoever had its address learns the new one from the others."""
    cluster = await asyncio.to_thread(make_cluster, options={"cluster-require-full-coverage": "no"})
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        rig = Rig(harness, await harness.make(), "taken-over")
        idle = Rig(harness, await harness.make(), "taken-over")
        first = await rig.submit_one()
        assert await idle.engine.get("taken-over", [first]) != [None]
        owner = cluster.owner(harness.keys("taken-over").control.decode())
        await _replicated(cluster, owner)
        try:
            assert await asyncio.to_thread(cluster.fail_over, target=owner) != owner
            for each in (rig, idle):
                view = await _answered(each, first)
                assert view.state is State.QUEUED
            assert await rig.succeed(*await rig.claim()) == [SettleResult.APPLIED]
        finally:
            # The harness's own client asks the first node only.
            await asyncio.to_thread(cluster.heal)


async def _answered(rig: Rig, job_id: str) -> Any:
    """The nodes tell each other of the new master within moments, and not all at the same one."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await rig.engine.get(rig.queue, [job_id]))[0]
            except EngineUnavailable:
                await asyncio.sleep(0.02)


async def _replicated(cluster: ClusterRedis, master: str) -> None:
    """Everything so far has reached its replica."""
    assert await asyncio.to_thread(cluster.node(master).call, "WAIT", 1, 5_000) == 1
