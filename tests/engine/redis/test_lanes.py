"""Lanes on Redis: how they are assigned, opened and closed; and that only declared keys are touched (H5, Q13)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from urllib.parse import urlsplit

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Approval, Claim, Meta, Priority
from holdfast.core.states import State
from holdfast.core.verdict import Hold, Release, RetryLater, SettleResult, Suspend, Verdict
from holdfast.engine.port.jobs import MAX_TENANTS, RetryVia
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.redis.keys import LaneCache, QueueKeys
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract.harness import FAILURE, LONG_WAIT_MS, QUEUE, Rig, ids, soon
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

#: A worker that is not woken polls after this time.
NOT_WOKEN_S = 5.0
ALL_TENANTS = [f"t{number:02}" for number in range(MAX_TENANTS)]


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


@pytest.fixture
def keys(redis_harness: RedisHarness) -> QueueKeys:
    return redis_harness.keys(QUEUE)


async def lane_assignments(harness: RedisHarness) -> dict[str, str]:
    assignments = await harness.redis.hgetall(harness.keys(QUEUE).lanes)
    return {tenant.decode(): lane.decode() for tenant, lane in assignments.items()}


async def lanes_in_use(harness: RedisHarness) -> set[int]:
    return {int(lane) for lane in (await harness.redis.hget(harness.keys(QUEUE).control, "lanes") or b"").split()}


async def claims_when_woken(waiting: asyncio.Task[list[Claim]]) -> list[Claim]:
    """Wait for the claims, for less time than a worker that is not woken needs."""
    return await asyncio.wait_for(waiting, NOT_WOKEN_S / 2)


# Assignment ------------------------------------------------------------------------------------------


async def test_the_default_tenant_and_other_programs_are_in_lane_0(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    await rig.submit(2)
    foreign = {"task_id": "j1", "type": "print", "payload": "{}", "tenant_id": "acme"}
    await redis_harness.redis.xadd(keys.streams[Priority.NORMAL], foreign)
    assert len(await rig.claim()) == 3
    assert (await lane_assignments(redis_harness), await lanes_in_use(redis_harness)) == ({}, set())


async def test_each_other_tenant_has_a_lane_by_name(redis_harness: RedisHarness, rig: Rig, keys: QueueKeys) -> None:
    await rig.submit(2, tenant_id="acme")
    await rig.submit(1, tenant_id="zeta", meta=Meta(priority=Priority.HIGH))
    assert await lane_assignments(redis_harness) == {"acme": "1", "zeta": "2"}
    task = keys.streams[Priority.NORMAL]
    assert await redis_harness.redis.xlen(task + b":lane:1") == 2
    assert await redis_harness.redis.xlen(task + b":lane:2:high") == 1
    assert await redis_harness.redis.xlen(task) == 0


async def test_an_empty_lane_is_freed_with_its_consumers(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    claim = await rig.start_one("w1", tenant_id="acme")
    claimed = await rig.engine.claim_job("w9", QUEUE, await rig.submit_one(tenant_id="acme"))
    assert await rig.claim() == []
    assert await lanes_in_use(redis_harness) == {1}
    await rig.succeed(claim, claimed)
    assert await rig.claim() == []
    assert await lanes_in_use(redis_harness) == set()
    assert await redis_harness.redis.exists(*keys.lane(1)) == 0
    # It is still assigned to acme, and opens again.
    reclaimed = await rig.start_one(tenant_id="acme")
    assert reclaimed.lease.position.startswith("5:")
    assert await rig.succeed(reclaimed, claim) == [SettleResult.APPLIED, SettleResult.ALREADY]


async def test_an_unused_lane_is_assigned_to_another_tenant(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in ALL_TENANTS:
        await rig.submit_one(tenant_id=tenant)
    # No claim has found it empty yet: only its streams are.
    (claim,) = [claim for claim in await rig.claim(limit=500) if claim.tenant_id == "t07"]
    lane = (await lane_assignments(redis_harness))["t07"]
    await rig.succeed(claim)
    await rig.submit_one(tenant_id="late")
    assignments = await lane_assignments(redis_harness)
    assert assignments["late"] == lane
    assert "t07" not in assignments
    assert [claim.tenant_id for claim in await rig.claim()] == ["late"]


async def test_a_tenant_without_a_lane_shares_the_shortest_one_for_a_while(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    for tenant in ALL_TENANTS:
        await rig.submit(1 if tenant == "t40" else 3, tenant_id=tenant)
    delayed_id = await rig.submit(2, tenant_id="late")
    assignments = await lane_assignments(redis_harness)
    lane, _, expires_at = assignments["late"].partition(" ")
    assert lane == assignments["t40"]
    assert int(expires_at) > await rig.engine.now_ms()
    assert set(delayed_id) <= set(ids(await rig.claim(limit=2 * MAX_TENANTS + 2)))
    # The assignment has expired; meanwhile lanes have become free.
    await redis_harness.redis.hset(redis_harness.keys(QUEUE).lanes, "late", f"{lane} 1000")
    while claims := await rig.claim(limit=500):
        await rig.succeed(*claims)
    await rig.submit_one(tenant_id="late")
    assert " " not in (await lane_assignments(redis_harness))["late"]


async def test_a_named_tenants_lane_is_never_reassigned(redis_harness: RedisHarness, rig: Rig) -> None:
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(weight=2)}))
    lane = (await lane_assignments(redis_harness))["acme"]
    for tenant in ALL_TENANTS:
        await rig.succeed(await rig.start_one(tenant_id=tenant))
    await rig.submit(1, tenant_id="late")
    assignments = await lane_assignments(redis_harness)
    assert assignments["acme"] == lane
    assert [tenant for tenant, assignment in assignments.items() if assignment == lane] == ["acme"]


async def test_a_tenant_named_while_all_lanes_are_busy_gets_a_lane(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in ALL_TENANTS:
        await rig.submit_one(tenant_id=tenant)
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=5)}))
    assignments = await lane_assignments(redis_harness)
    assert assignments["acme"].isdigit()
    # No other tenant loses its lane.
    assert set(assignments) == {*ALL_TENANTS, "acme"}
    await rig.submit_one(tenant_id="acme")
    assert Counter(claim.tenant_id for claim in await rig.claim(limit=500)) == Counter([*ALL_TENANTS, "acme"])


@pytest.mark.parametrize("named", ["acme", "t40"])
async def test_limits_of_a_named_tenant_do_not_affect_other_tenants(
    redis_harness: RedisHarness, rig: Rig, named: str
) -> None:
    """Not even while every lane is busy, and some are shared."""
    for tenant in ALL_TENANTS:
        await rig.submit(1 if tenant == "t40" else 2, tenant_id=tenant)
    shared_ids = await rig.submit(2, tenant_id="late")
    assert (await lane_assignments(redis_harness))["late"].startswith(
        (await lane_assignments(redis_harness))["t40"] + " "
    )
    await rig.engine.set_control(QUEUE, QueueControl(tenants={named: TenantControl(concurrency=0)}))
    # The shared assignment was valid for some seconds more.
    shared_ids += await rig.submit(1, tenant_id="late")
    blocked_ids = await rig.submit(1, tenant_id=named)
    claimed_by_tenant: Counter[str] = Counter()
    while claims := await rig.claim(limit=500):
        assert not set(blocked_ids) & set(ids(claims))
        claimed_by_tenant.update(claim.tenant_id for claim in claims)
        await rig.succeed(*claims)
    others = [tenant for tenant in ALL_TENANTS if tenant not in (named, "t40")]
    assert {tenant: claimed_by_tenant[tenant] for tenant in others} == dict.fromkeys(others, 2)
    assert claimed_by_tenant["late"] == len(shared_ids)


async def test_a_shared_lane_that_becomes_a_named_tenants_is_left_by_the_others(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    for tenant in ALL_TENANTS:
        await rig.submit(1 if tenant == "t00" else 2, tenant_id=tenant)
    await rig.submit_one(tenant_id="late")
    while claims := await rig.claim(limit=500):
        await rig.succeed(*claims)
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=0)}))
    assignments = await lane_assignments(redis_harness)
    assert assignments["late"].startswith(assignments["acme"] + " ")
    job_id = await rig.submit_one(tenant_id="late")
    assert ids(await rig.claim()) == [job_id]


async def test_a_batch_does_not_reassign_a_lane_that_it_uses(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in ALL_TENANTS:
        await rig.succeed(await rig.start_one(tenant_id=tenant))
    # All lanes are free again; the first tenant of the batch still has one.
    await rig.claim()
    await rig.engine.submit([rig.envelope(tenant_id="t00"), rig.envelope(tenant_id="late")])
    assignments = await lane_assignments(redis_harness)
    assert assignments["t00"] != assignments["late"]


def test_the_lane_cache_is_bounded() -> None:
    lanes = LaneCache()
    lanes.set_in_use(" ".join(map(str, range(1, 40))).encode())
    assert len(lanes.all()) == 39
    lanes.set_in_use(b"1 2")
    assert set(lanes.all()) == {1, 2}
    lanes.set_in_use(b"")
    assert set(lanes.all()) == {1, 2}, "the lanes of a tenant that returns are still cached"
    for number in range(2_000):
        lanes.add([f"t{number}".encode(), number % 64])
    assert len(lanes.find_lanes(f"t{number}" for number in range(2_000))) <= 64
    assert len(lanes._by_tenant) <= 1_000


# Claims in lanes ---------------------------------------------------------------------------------------


async def test_a_waiting_worker_is_woken_by_a_job_in_any_lane(rig: Rig) -> None:
    for tenant in ("acme", "zeta", "acme"):
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.claim("w2", [QUEUE], 10, LONG_WAIT_MS))
        # Once this claim has found nothing, the first poll of the other has too.
        assert await rig.engine.claim("w3", [QUEUE], 1, 50) == []
        job_id = await rig.submit_one(tenant_id=tenant)
        claims = await claims_when_woken(waiting)
        assert ids(claims) == [job_id]
        await rig.succeed(*claims)


async def test_a_waiting_worker_is_woken_when_concurrency_becomes_free(rig: Rig) -> None:
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=1)}))
    _, two, three = await rig.submit(3, tenant_id="acme")
    claim = await rig.claim_one("w1")
    for ending, expected in (
        (rig.succeed, two),
        (lambda ended_claim: rig.move(ended_claim.job_id, State.CANCELLED), three),
    ):
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.claim("w2", [QUEUE], 1, LONG_WAIT_MS))
        assert await rig.engine.claim("w3", [QUEUE], 1, 50) == []
        await ending(claim)
        (claim,) = await claims_when_woken(waiting)
        assert claim.job_id == expected


async def test_a_lane_whose_group_was_destroyed_is_claimed_from_again(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    one, two = await rig.submit(2, tenant_id="acme")
    await rig.claim_one("w1")
    claimed = await rig.engine.claim_job("w9", QUEUE, two)
    for stream in keys.lane(1):
        await redis_harness.redis.xgroup_destroy(stream, redis_harness.names.group)
    # As on lane 0: that it was running is lost.
    assert ids(await rig.claim("w2")) == [one]
    assert await rig.succeed(claimed) == [SettleResult.STALE]
    # It is not claimed from its stream, but reclaimed as a lost lease.
    await rig.lose_leases()
    assert two in ids(await rig.reclaim("w2"))


async def test_retries_in_the_pending_list_respect_a_tenants_concurrency(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, retry_via={QUEUE: RetryVia.PENDING})
    claims = [await rig.start_one(tenant_id="acme") for _ in range(3)]
    for claim in claims:
        await rig.settle(claim, RetryLater(1_000, FAILURE))
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=1)}))
    await redis_harness.advance(60_000)
    done: list[str] = []
    while claimed := await rig.claim_due():
        assert len(claimed) == 1
        assert await rig.reclaim() == await rig.claim() == []
        assert await rig.succeed(*claimed) == [SettleResult.APPLIED]
        done += ids(claimed)
    assert sorted(done) == sorted(ids(claims))


async def test_blocked_retries_do_not_hide_others(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, retry_via={QUEUE: RetryVia.PENDING})
    claims = [await rig.start_one(tenant_id="acme") for _ in range(5)]
    claims += [await rig.start_one(tenant_id="beta")]
    for claim in claims:
        await rig.settle(claim, RetryLater(1_000, FAILURE))
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=0)}))
    await redis_harness.advance(60_000)
    # The limit is lower than the number of retries before it.
    (reclaimed,) = await rig.engine.reclaim("w2", [QUEUE], 2)
    assert reclaimed.tenant_id == "beta"


async def test_jobs_that_the_last_release_left_in_lane_0_are_processed(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    """Jobs of all tenants used to be in the default tenant's streams; their records say so."""
    redis = redis_harness.redis
    names = [f"old{number}" for number in range(5)]
    for name in names:
        fields = {"holdfast": "1 queued 0 0 1700000000000", "task_id": name, "type": "print", "payload": "{}"}
        fields |= {"tenant_id": "acme", "idempotency_key": name, "trace_id": "", "meta": ""}
        message_id = await redis.xadd(keys.streams[Priority.NORMAL], fields)
        await redis.set(keys.job(name), b"1:" + message_id + b" queued -")
    await redis.hset(keys.control, "reader", "1")
    new = await rig.submit_one(tenant_id="acme")
    assert [await rig.state(name) for name in (*names, new)] == [State.QUEUED] * 6
    await rig.move("old0", State.CANCELLED)
    await rig.move("old1", State.SUSPENDED)
    await rig.move("old1", State.QUEUED)
    claimed = await rig.engine.claim_job("w9", QUEUE, "old4")
    claims = {claim.job_id: claim for claim in await rig.claim()}
    assert set(claims) == {"old1", "old2", "old3", new}
    assert await rig.settle(claims["old2"], Release("draining")) is SettleResult.APPLIED
    assert await rig.succeed(claims["old1"], claims["old3"], claimed) == [SettleResult.APPLIED] * 3
    (reclaimed,) = await rig.claim()
    assert (reclaimed.job_id, reclaimed.lease.position.partition(":")[0]) == ("old2", "5")
    assert await rig.succeed(reclaimed, claims[new]) == [SettleResult.APPLIED] * 2
    assert await rig.open_jobs() == 0


async def test_a_full_redis_drains_every_lane_and_opens_no_new_one(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    released, parked, claimed, last = [await rig.start_one(tenant_id="acme") for _ in range(4)]
    delayed = await rig.submit_one(tenant_id="zeta", delay_ms=1)
    await rig.submit(3, tenant_id="acme")
    await asyncio.sleep(0.002)
    await redis_harness.configure("maxmemory", 1)
    try:
        with pytest.raises(EngineUnavailable):
            await rig.submit(1, tenant_id="new")
        assert set(await lane_assignments(redis_harness)) == {"acme"}
        assert await rig.settle(released, Release("draining")) is SettleResult.APPLIED
        assert await rig.settle(parked, Suspend(FAILURE)) is SettleResult.APPLIED
        await rig.move(parked.job_id, State.QUEUED)
        assert await rig.promote() == 1
        await rig.engine.set_control(QUEUE, QueueControl(tenants={"omega": TenantControl(weight=3)}))
        assert await rig.settle(claimed, RetryLater(60_000, FAILURE)) is SettleResult.APPLIED
        await rig.engine.expedite(QUEUE, claimed.job_id, actor="ann", reason="now", audit="operator.retry")
        reclaimed = await rig.engine.claim_job("w9", QUEUE, claimed.job_id)
        claims = await rig.claim()
        assert delayed in ids(claims)
        assert len(claims) == 6
        assert set(await rig.succeed(*claims, reclaimed, last)) == {SettleResult.APPLIED}
        assert await rig.claim() == []
        assert await rig.open_jobs() == 0
    finally:
        await redis_harness.configure("maxmemory", 0)


# Keys ----------------------------------------------------------------------------------------------------


async def test_scripts_touch_only_what_they_declare(redis_url: str, namespace: str) -> None:
    """Every verb, over several lanes, watched with MONITOR (a rule of Redis Cluster)."""
    harness = RedisHarness(redis_url, namespace)
    rig = await Rig.on(harness, ledger=True, retry_via={QUEUE: RetryVia.PENDING}, feed_tail=2)
    address = urlsplit(redis_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**24)
    lines: list[bytes] = []
    try:
        writer.write(b"MONITOR\r\n")
        assert await reader.readline() == b"+OK\r\n"
        await use_every_verb(rig, harness)
        await harness.redis.echo("the end")
        while not lines or b"the end" not in lines[-1]:
            lines.append(await soon(reader.readline()))
    finally:
        writer.close()
        await writer.wait_closed()
        await harness.close()
    declared: set[bytes] = set()
    scripts, touched_keys = 0, set()
    for line in lines:
        words = re.findall(rb'"((?:[^"\\]|\\.)*)"', line)
        if words[0].upper() == b"EVALSHA":
            declared, scripts = set(words[3 : 3 + int(words[2])]), scripts + 1
        elif b" lua] " in line:
            touched = command_keys(words)
            assert touched <= declared, f"{line[:200]!r}: {touched - declared} is not declared"
            touched_keys |= touched
    assert scripts > 30
    assert any(b":lane:2" in key for key in touched_keys)


def command_keys(words: list[bytes]) -> set[bytes]:
    """The keys of one command."""
    name = words[0].upper().decode()
    if name in ("TIME", "PUBLISH"):
        return set()
    if name in ("MGET", "DEL"):
        return set(words[1:])
    if name == "MSET":
        return set(words[1::2])
    if name == "XREADGROUP":
        after = words[[word.upper() for word in words].index(b"STREAMS") + 1 :]
        return set(after[: len(after) // 2])
    return {words[2 if name in ("XGROUP", "XINFO", "MEMORY") else 1]}


async def use_every_verb(rig: Rig, harness: RedisHarness) -> None:
    engine, keys = rig.engine, harness.keys(QUEUE)
    limits = {"acme": TenantControl(weight=2, concurrency=50, intake_limit=100)}
    await engine.set_control(QUEUE, QueueControl(tenants=limits, intake_limit=500), actor="a", audit="operator.limit")
    for tenant in ("default", "acme", "zeta"):
        await rig.submit(8, tenant_id=tenant, idempotency_key="")
        await rig.submit(1, tenant_id=tenant, delay_ms=1)
        held_id = await rig.submit_one(tenant_id=tenant, hold=True)
        await rig.move(held_id, State.QUEUED, approval=Approval("a", ("b",), 1), audit="operator.approve")
        delayed_id = await rig.submit_one(tenant_id=tenant, delay_ms=60_000)
        await engine.expedite(QUEUE, delayed_id, actor="a", reason="b", audit="operator.retry")
        claimed_id = await rig.submit_one(tenant_id=tenant, delay_ms=60_000)
        await rig.succeed(await engine.claim_job("w9", QUEUE, claimed_id))
    foreign = {"task_id": "f", "type": "print", "payload": "{}", "tenant_id": "acme"}
    await harness.redis.xadd(keys.streams[Priority.NORMAL], foreign)
    await rig.promote()
    claims = await rig.claim(limit=100)
    assert len(claims) >= 30
    await engine.renew([claim.lease for claim in claims], [claims[0].lease])
    await engine.recover_claims("w1", [QUEUE], ())
    verdicts: list[Verdict] = [Release("later"), RetryLater(1, FAILURE), Hold("?"), Suspend(FAILURE)]
    verdicts.append(Release("sleeps", 1))
    for claim, verdict in zip(claims, verdicts * 3, strict=False):
        await rig.settle(claim, verdict)
    await rig.harness.advance(60_000)
    await rig.reclaim("w2")
    await rig.claim_due("w2")
    await rig.move(claims[-1].job_id, State.CANCELLED, audit="operator.cancel")
    await rig.view(claims[0].job_id)
    await engine.find(QUEUE, list(State), 10)
    await engine.stats(QUEUE)
    await engine.workers([QUEUE])
    info = await rig.view(claims[-2].job_id)
    await harness.redis.delete(keys.job(info.job_id))
    await engine.restore(QUEUE, await engine.snapshot(QUEUE, [info.job_id]), [info])
    await engine.trim_feed(QUEUE, (await rig.entries())[-1].position)
    await engine.prune([QUEUE])
    await engine.deregister_worker("w1", [QUEUE])


async def test_a_long_history_over_lanes_is_legal(rig: Rig) -> None:
    for tenant in ("default", "acme", "zeta"):
        await rig.submit(20, tenant_id=tenant)
    for number in range(6):
        claims = await rig.claim(f"w{number}", 10)
        await rig.settle(claims[0], Release("draining"))
        await rig.settle(claims[1], RetryLater(0, FAILURE))
        await rig.succeed(*claims[2:])
        await rig.engine.claim_job("w9", QUEUE, (await rig.engine.find(QUEUE, [State.QUEUED], 1))[0].job_id)
        await rig.lose_leases()
        await rig.succeed(*await rig.reclaim("w8"))
        await rig.promote()
    while claims := await rig.claim():
        await rig.succeed(*claims)
    assert await rig.open_jobs() == 0
    check_history(await rig.events(), ended=True)
