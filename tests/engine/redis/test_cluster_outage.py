"""A Cluster node is unreachable: its own queues wait, those of the other nodes continue."""

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
from holdfast.engine.redis.net.errors import ConnectionLost
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract import Rig
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.engine_tasks import EnginePruner, Reclaimer
from holdfast.upkeep.loop import QueueSelection
from holdfast.verification.chaos.topologies import ClusterRedis
from tests.conftest import MakeCluster
from tests.engine.harness import RedisHarness, closing
from tests.engine.redis.cluster_outage import REPLY_S, OutageRig
from tests.engine.redis.cluster_outage import cluster as cluster
from tests.engine.redis.cluster_outage import outage as outage
from tests.worker.support import eventually, working

pytestmark = [pytest.mark.faults, pytest.mark.redis]


def _success(claim: Any) -> Settlement:
    return Settlement(claim, Succeed(b"1"), claim.claimed_at_ms)


async def test_claims_continue_while_a_node_is_down(outage: OutageRig, caplog: pytest.LogCaptureFixture) -> None:
    submitted = {queue: await outage.rig(queue).submit(20) for queue in outage.queues}
    outage.kill()
    claims = [claim for _ in range(4) for claim in await outage.claim()]
    assert {claim.job_id for claim in claims} == {*submitted[outage.up_queues[0]], *submitted[outage.up_queues[1]]}
    started = time.monotonic()
    assert await outage.claim(wait_ms=60_000) == []
    assert 0.3 < time.monotonic() - started < 30, "the dead node is probed at intervals, without a busy loop"
    job_id = (await outage.rig(outage.up_queues[0]).submit(1))[0]
    assert [claim.job_id for claim in await outage.claim(wait_ms=5_000)] == [job_id]
    assert len([line for line in caplog.messages if "unreachable, other queues continue" in line]) == 1
    await outage.heal()
    recovered = await outage.claim_all(20)
    assert {claim.job_id for claim in recovered} == set(submitted[outage.down_queue])
    assert len([line for line in caplog.messages if "recovered" in line]) == 1
    assert (
        await outage.engine.settle([_success(claim) for claim in (*claims, *recovered)]) == [SettleResult.APPLIED] * 60
    )


async def test_claims_of_a_lost_reply_come_first_and_once(outage: OutageRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node granted jobs and crashed before its reply arrived."""
    known_ids = await outage.rig(outage.down_queue).submit(2)
    known = await outage.claim(limit=2)
    lost_ids = await outage.rig(outage.down_queue).submit(3)
    up_ids = await outage.rig(outage.up_queues[0]).submit(3)
    run = outage.engine._store.client.run

    async def lose(purpose: Any, script: Any, keys: Any, arguments: Any) -> Any:
        reply = await run(purpose, script, keys, arguments)
        if script.name == "claim" and keys[0] == outage.harness.keys(outage.down_queue).streams[0]:
            outage.kill()
            raise ConnectionLost("the connection was lost")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(outage.engine._store.client, "run", lose)
        assert {claim.job_id for claim in await outage.claim()} == set(up_ids)
    await outage.heal()
    late_ids = await outage.rig(outage.down_queue).submit(1)
    found = await outage.claim_all(4)
    assert [claim.job_id for claim in found] == [*lost_ids, *late_ids]
    assert {claim.attempt for claim in found} == {1}
    assert {claim.lease.deliveries for claim in found} == {1}
    assert {claim.job_id for claim in known} == set(known_ids)
    assert await outage.engine.settle([_success(claim) for claim in (*known, *found)]) == [SettleResult.APPLIED] * 6


async def test_a_hung_node_is_waited_for_once(outage: OutageRig) -> None:
    for queue in outage.queues:
        await outage.rig(queue).submit(1)
    await outage.claim_all(3)
    node = outage.cluster.node(outage.down_node)
    node.pause()
    try:
        durations = []
        for _ in range(20):
            for queue in outage.up_queues:
                await outage.rig(queue).submit(1)
            started = time.monotonic()
            assert len(await outage.claim()) == 2
            durations.append(time.monotonic() - started)
        assert durations[0] < REPLY_S + 1
        assert max(durations[1:]) < REPLY_S / 2
    finally:
        node.resume()


async def test_other_queues_accept_jobs_and_keep_their_leases(outage: OutageRig) -> None:
    up_queue = outage.up_queues[0]
    up, down = outage.rig(up_queue), outage.rig(outage.down_queue)
    claims = [await down.start_one(), await up.start_one()]
    # The test's own client has to learn the slots while all nodes are up.
    await outage.harness.age_queue(up_queue, 0)
    outage.kill()
    with pytest.raises(EngineUnavailable):
        await down.submit_one()
    # The list of queues is unreachable too, and the cached one is outdated.
    outage.engine._store._known[up_queue] = 0.0
    assert await up.submit_one()
    await outage.harness.age_queue(up_queue, 20_000)
    with pytest.raises(PartialFailure):
        await outage.engine.renew([claim.lease for claim in claims])
    stream = outage.harness.keys(up_queue).streams[1].decode()
    (row,) = await outage.send_command(up_queue, "XPENDING", stream, outage.harness.names.group, "-", "+", 10)
    assert row[2] < 20_000
    assert await up.succeed(claims[1]) == [SettleResult.APPLIED]


async def test_a_call_fails_only_if_no_node_answers(outage: OutageRig) -> None:
    await outage.rig(outage.down_queue).submit(1)
    outage.kill()
    only = [outage.down_queue]
    for call in (
        lambda: outage.engine.claim("w1", only, 10, 0, tuple),
        lambda: outage.engine.claim("w1", outage.queues, 10, 0),
        lambda: outage.engine.recover_claims("w1", only, ()),
        lambda: outage.engine.reclaim("w1", only, 10),
        lambda: outage.engine.promote(only, 10),
        lambda: outage.engine.prune(only),
        lambda: outage.engine.listen(only, 1),
    ):
        with pytest.raises(EngineUnavailable):
            await call()


async def test_verdicts_of_reachable_queues_are_settled(outage: OutageRig) -> None:
    for queue in outage.queues:
        await outage.rig(queue).submit(2)
    claims = await outage.claim_all(6)
    settlements = [_success(claim) for claim in claims]
    outage.kill()
    for applied in (SettleResult.APPLIED, SettleResult.ALREADY):
        with pytest.raises(PartialFailure, match=r"cannot reach|connection was lost") as raised:
            await outage.engine.settle(settlements)
        assert raised.value.completed == [None if item.queue == outage.down_queue else applied for item in claims]
    assert outage.engine.counters.succeeded == 4
    with pytest.raises(PartialFailure) as raised:
        await outage.engine.settle([item for item in settlements if item.claim.queue == outage.down_queue])
    assert raised.value.completed == [None, None]
    await outage.heal()
    answers: list[SettleResult] = []
    async with asyncio.timeout(10):
        while not answers:
            try:
                answers = await outage.engine.settle(settlements)
            except PartialFailure:
                await asyncio.sleep(0.02)
    assert Counter(answers) == {SettleResult.APPLIED: 2, SettleResult.ALREADY: 4}


async def test_upkeep_continues_while_a_node_is_down(outage: OutageRig) -> None:
    engine, harness = outage.engine, outage.harness
    for queue in outage.queues:
        await outage.rig(queue).submit(1)
    lost_claims = await outage.claim_all(3)
    for queue in outage.queues:
        await outage.rig(queue).submit(1, delay_ms=60_000)
        await harness.age_queue(queue, 120_000)
    assert await engine.queues() == sorted(outage.queues)
    assert await engine.listen(outage.queues, 1) is not None
    outage.kill()
    calls = _count_calls(engine._store.client, "call")
    for _ in range(3):
        assert await engine.queues() == sorted(outage.queues), "the list was on the dead node, and is cached"
    assert len(calls) == 1, "a hung node would be waited for each time"
    assert (await engine.promote(outage.queues, 10)).count == 2
    with pytest.raises(PartialFailure) as raised:
        await engine.renew([claim.lease for claim in lost_claims])
    assert raised.value.completed == []
    assert [info.queue for info in await engine.workers(outage.queues)] == sorted(outage.up_queues)
    for queue in outage.up_queues:
        await harness.age_queue(queue, 120_000)
    selection = QueueSelection(engine, outage.queues)
    reclaimer = Reclaimer(engine, selection, _settings(), "upkeep-1", lambda worker, job_id: False)
    await reclaimer._run_once()
    for queue in outage.up_queues:
        assert (await engine.stats(queue)).states[State.QUEUED] == 2, "released, and promoted"
    await EnginePruner(engine, QueueSelection(engine, outage.queues))._run_once()
    await engine.deregister_worker("w1", outage.queues)
    await BacklogMonitor(engine, QueueSelection(engine, outage.queues), _settings(backlog_alert=1), None).check()
    assert engine.counters.alerts == {f"backlog:{queue}" for queue in outage.up_queues}
    fresh = engine.clone()
    await fresh.open()
    assert await fresh.listen(outage.queues, 1) == []
    await fresh.close()


def _settings(**more: Any) -> Any:
    return Holdfast("sqlite:///unused.db", **more).settings


# A worker ------------------------------------------------------------------------------------------


async def test_a_worker_continues_while_a_node_is_down(outage: OutageRig, caplog: pytest.LogCaptureFixture) -> None:
    """Jobs of the other nodes run and are settled. The dead node's job keeps its verdict until the node recovers."""
    caplog.set_level(logging.WARNING)
    app = Holdfast(outage.cluster.url, namespace=outage.harness.names.namespace, reclaim_interval_s=0.2)
    gate, runs = asyncio.Event(), Counter[str]()

    @app.task
    async def work(name: str) -> str:
        runs[name] += 1
        if name.startswith("long"):
            await gate.wait()
        return name

    async with app, working(app, queues=outage.queues, concurrency=20) as worker:
        long = {queue: await work.options(queue=queue).submit(f"long-{queue}") for queue in outage.queues}
        await eventually(lambda: len(runs) == 3)
        outage.kill()
        gate.set()
        for queue in outage.up_queues:
            assert await long[queue].result(60) == f"long-{queue}"
        for number in range(20):
            queue = outage.up_queues[number % 2]
            started = time.monotonic()
            job = await work.options(queue=queue).submit(f"short-{number}")
            assert await job.result(60) == f"short-{number}"
            assert time.monotonic() - started < 10, "as long as a node may take to answer"
        assert worker.in_flight == 1
        assert worker.ready
        claims = _count_calls(app.engine, "claim")
        await asyncio.sleep(1)
        assert len(claims) < 20, "a busy loop"
        await outage.heal()
        assert await long[outage.down_queue].result(60) == f"long-{outage.down_queue}"
        job = await submit_eventually(work.options(queue=outage.down_queue), "after")
        assert await job.result(60) == "after"
        await eventually(lambda: worker.in_flight == 0)
    assert set(runs.values()) == {1}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("unreachable, other queues continue" in line for line in warnings) == 1, warnings
    assert sum("verdicts wait" in line for line in warnings) == 1, warnings
    assert len(warnings) < 8, warnings


def _count_calls(engine: Any, name: str) -> list[float]:
    calls: list[float] = []
    method = getattr(engine, name)

    async def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(time.monotonic())
        return await method(*arguments, **options)

    setattr(engine, name, counting)
    return calls


async def submit_eventually(task: Any, name: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                return await task.submit(name)
            except EngineUnavailable:
                await asyncio.sleep(0.05)


async def test_a_worker_starts_while_a_node_is_unreachable(outage: OutageRig) -> None:
    outage.kill()
    engine = RedisEngine(outage.cluster.url, outage.harness.names)
    await engine.open()
    assert await engine.claim("w1", outage.queues, 10, 10, tuple) == []
    await engine.close()


async def test_a_promoted_replica_is_found_without_a_redirection(make_cluster: MakeCluster, namespace: str) -> None:
    """A dead master never replies `MOVED`; the new address is learned from the other nodes."""
    cluster = await asyncio.to_thread(make_cluster, options={"cluster-require-full-coverage": "no"})
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        rig = Rig(harness, await harness.make(), "failed-over")
        idle = Rig(harness, await harness.make(), "failed-over")
        first = await rig.submit_one()
        assert await idle.engine.get("failed-over", [first]) != [None]
        owner = cluster.owner(harness.keys("failed-over").control.decode())
        await _wait_replicated(cluster, owner)
        try:
            assert await asyncio.to_thread(cluster.fail_over, target=owner) != owner
            for item in (rig, idle):
                info = await _get_eventually(item, first)
                assert info.state is State.QUEUED
            assert await rig.succeed(*await rig.claim()) == [SettleResult.APPLIED]
        finally:
            # The harness's own client queries only the first node.
            await asyncio.to_thread(cluster.heal)


async def _get_eventually(rig: Rig, job_id: str) -> Any:
    """Retry: the nodes learn of the new master at different moments."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await rig.engine.get(rig.queue, [job_id]))[0]
            except EngineUnavailable:
                await asyncio.sleep(0.02)


async def _wait_replicated(cluster: ClusterRedis, master: str) -> None:
    """Wait until everything so far has reached the replica."""
    assert await asyncio.to_thread(cluster.node(master).call, "WAIT", 1, 5_000) == 1
