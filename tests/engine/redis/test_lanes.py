"""Lanes on Redis: whose they are, when they come and go, and that only declared keys are touched (H5, Q13)."""

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

#: A worker that nobody wakes looks again after this long.
NOT_WOKEN_S = 5.0
EVERYONE = [f"t{number:02}" for number in range(MAX_TENANTS)]


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


@pytest.fixture
def keys(redis_harness: RedisHarness) -> QueueKeys:
    return redis_harness.keys(QUEUE)


async def seats(harness: RedisHarness) -> dict[str, str]:
    found = await harness.redis.hgetall(harness.keys(QUEUE).lanes)
    return {tenant.decode(): lane.decode() for tenant, lane in found.items()}


async def in_use(harness: RedisHarness) -> set[int]:
    return {int(lane) for lane in (await harness.redis.hget(harness.keys(QUEUE).control, "lanes") or b"").split()}


async def at_once(waiting: asyncio.Task[list[Claim]]) -> list[Claim]:
    """What it gets, well before a worker that was not woken would look again by itself."""
    return await asyncio.wait_for(waiting, NOT_WOKEN_S / 2)


# Whose they are --------------------------------------------------------------------------------------


async def test_the_default_tenant_and_other_programs_are_in_lane_0(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    await rig.submit(2)
    foreign = {"task_id": "j1", "type": "print", "payload": "{}", "tenant_id": "acme"}
    await redis_harness.redis.xadd(keys.streams[Priority.NORMAL], foreign)
    assert len(await rig.claim()) == 3
    assert (await seats(redis_harness), await in_use(redis_harness)) == ({}, set())


async def test_each_other_tenant_has_a_lane_by_name(redis_harness: RedisHarness, rig: Rig, keys: QueueKeys) -> None:
    await rig.submit(2, tenant_id="acme")
    await rig.submit(1, tenant_id="zeta", meta=Meta(priority=Priority.HIGH))
    assert await seats(redis_harness) == {"acme": "1", "zeta": "2"}
    task = keys.streams[Priority.NORMAL]
    assert await redis_harness.redis.xlen(task + b":lane:1") == 2
    assert await redis_harness.redis.xlen(task + b":lane:2:high") == 1
    assert await redis_harness.redis.xlen(task) == 0


async def test_an_empty_lane_is_given_back_with_its_consumers(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    claim = await rig.start_one("w1", tenant_id="acme")
    taken = await rig.engine.claim_job("w9", QUEUE, await rig.submit_one(tenant_id="acme"))
    assert await rig.claim() == []
    assert await in_use(redis_harness) == {1}
    await rig.succeed(claim, taken)
    assert await rig.claim() == []
    assert await in_use(redis_harness) == set()
    assert await redis_harness.redis.exists(*keys.lane(1)) == 0
    # It is still acme's, and opens again.
    again = await rig.start_one(tenant_id="acme")
    assert again.lease.position.startswith("5:")
    assert await rig.succeed(again, claim) == [SettleResult.APPLIED, SettleResult.ALREADY]


async def test_a_lane_that_nobody_uses_goes_to_whoever_needs_one(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in EVERYONE:
        await rig.submit_one(tenant_id=tenant)
    # Nobody has claimed since it became empty: only its streams say so.
    (claim,) = [claim for claim in await rig.claim(limit=500) if claim.tenant_id == "t07"]
    lane = (await seats(redis_harness))["t07"]
    await rig.succeed(claim)
    await rig.submit_one(tenant_id="late")
    found = await seats(redis_harness)
    assert found["late"] == lane
    assert "t07" not in found
    assert [claim.tenant_id for claim in await rig.claim()] == ["late"]


async def test_whoever_finds_no_lane_shares_the_shortest_one_for_a_while(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in EVERYONE:
        await rig.submit(1 if tenant == "t40" else 3, tenant_id=tenant)
    late = await rig.submit(2, tenant_id="late")
    found = await seats(redis_harness)
    lane, _, until = found["late"].partition(" ")
    assert lane == found["t40"]
    assert int(until) > await rig.engine.now_ms()
    assert set(late) <= set(ids(await rig.claim(limit=2 * MAX_TENANTS + 2)))
    # Once the time is over it looks again; meanwhile lanes have become free.
    await redis_harness.redis.hset(redis_harness.keys(QUEUE).lanes, "late", f"{lane} 1000")
    while claims := await rig.claim(limit=500):
        await rig.succeed(*claims)
    await rig.submit_one(tenant_id="late")
    assert " " not in (await seats(redis_harness))["late"]


async def test_a_named_tenants_lane_is_never_given_away(redis_harness: RedisHarness, rig: Rig) -> None:
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(weight=2)}))
    lane = (await seats(redis_harness))["acme"]
    for tenant in EVERYONE:
        await rig.succeed(await rig.start_one(tenant_id=tenant))
    await rig.submit(1, tenant_id="late")
    found = await seats(redis_harness)
    assert found["acme"] == lane
    assert [tenant for tenant, seat in found.items() if seat == lane] == ["acme"]


async def test_a_tenant_that_is_named_late_gets_a_lane_all_the_same(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in EVERYONE:
        await rig.submit_one(tenant_id=tenant)
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=5)}))
    found = await seats(redis_harness)
    assert found["acme"].isdigit()
    # Nobody else's is taken for it.
    assert set(found) == {*EVERYONE, "acme"}
    await rig.submit_one(tenant_id="acme")
    assert Counter(claim.tenant_id for claim in await rig.claim(limit=500)) == Counter([*EVERYONE, "acme"])


@pytest.mark.parametrize("named", ["acme", "t40"])
async def test_what_is_allowed_to_a_named_tenant_binds_nobody_else(
    redis_harness: RedisHarness, rig: Rig, named: str
) -> None:
    """Not even while every lane is busy, and some have guests."""
    for tenant in EVERYONE:
        await rig.submit(1 if tenant == "t40" else 2, tenant_id=tenant)
    guests = await rig.submit(2, tenant_id="late")
    assert (await seats(redis_harness))["late"].startswith((await seats(redis_harness))["t40"] + " ")
    await rig.engine.set_control(QUEUE, QueueControl(tenants={named: TenantControl(concurrency=0)}))
    # The guest's place was good for some seconds more.
    guests += await rig.submit(1, tenant_id="late")
    mine = await rig.submit(1, tenant_id=named)
    given: Counter[str] = Counter()
    while claims := await rig.claim(limit=500):
        assert not set(mine) & set(ids(claims))
        given.update(claim.tenant_id for claim in claims)
        await rig.succeed(*claims)
    others = [tenant for tenant in EVERYONE if tenant not in (named, "t40")]
    assert {tenant: given[tenant] for tenant in others} == dict.fromkeys(others, 2)
    assert given["late"] == len(guests)


async def test_a_guest_leaves_a_lane_that_has_become_a_named_tenants(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in EVERYONE:
        await rig.submit(1 if tenant == "t00" else 2, tenant_id=tenant)
    await rig.submit_one(tenant_id="late")
    while claims := await rig.claim(limit=500):
        await rig.succeed(*claims)
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=0)}))
    found = await seats(redis_harness)
    assert found["late"].startswith(found["acme"] + " ")
    guest = await rig.submit_one(tenant_id="late")
    assert ids(await rig.claim()) == [guest]


async def test_a_batch_does_not_give_a_lane_away_that_it_uses(redis_harness: RedisHarness, rig: Rig) -> None:
    for tenant in EVERYONE:
        await rig.succeed(await rig.start_one(tenant_id=tenant))
    # All are free again; the first of the batch has one still.
    await rig.claim()
    await rig.engine.submit([rig.envelope(tenant_id="t00"), rig.envelope(tenant_id="late")])
    found = await seats(redis_harness)
    assert found["t00"] != found["late"]


def test_what_a_process_knows_of_lanes_is_bounded() -> None:
    lanes = LaneCache()
    lanes.set_in_use(" ".join(map(str, range(1, 40))).encode())
    assert len(lanes.all()) == 39
    lanes.set_in_use(b"1 2")
    assert set(lanes.all()) == {1, 2}
    lanes.set_in_use(b"")
    assert set(lanes.all()) == {1, 2}, "a tenant that comes and goes is not asked for again"
    for number in range(2_000):
        lanes.add([f"t{number}".encode(), number % 64])
    assert len(lanes.of_tenants(f"t{number}" for number in range(2_000))) <= 64
    assert len(lanes._by_tenant) <= 1_000


# What goes on in them ----------------------------------------------------------------------------------


async def test_a_waiting_worker_hears_of_a_job_in_any_lane(rig: Rig) -> None:
    for tenant in ("acme", "zeta", "acme"):
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.claim("w2", [QUEUE], 10, LONG_WAIT_MS))
        # Its first look has been in vain once this one has been.
        assert await rig.engine.claim("w3", [QUEUE], 1, 50) == []
        job_id = await rig.submit_one(tenant_id=tenant)
        claims = await at_once(waiting)
        assert ids(claims) == [job_id]
        await rig.succeed(*claims)


async def test_a_place_that_becomes_free_is_told_to_whoever_waits(rig: Rig) -> None:
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=1)}))
    _, two, three = await rig.submit(3, tenant_id="acme")
    claim = await rig.claim_one("w1")
    for ending, expected in ((rig.succeed, two), (lambda each: rig.move(each.job_id, State.CANCELLED), three)):
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.claim("w2", [QUEUE], 1, LONG_WAIT_MS))
        assert await rig.engine.claim("w3", [QUEUE], 1, 50) == []
        await ending(claim)
        (claim,) = await at_once(waiting)
        assert claim.job_id == expected


async def test_a_lane_whose_group_was_destroyed_goes_on(redis_harness: RedisHarness, rig: Rig, keys: QueueKeys) -> None:
    one, two = await rig.submit(2, tenant_id="acme")
    await rig.claim_one("w1")
    taken = await rig.engine.claim_job("w9", QUEUE, two)
    for stream in keys.lane(1):
        await redis_harness.redis.xgroup_destroy(stream, redis_harness.names.group)
    # As on lane 0: nobody knows any more that it was running.
    assert ids(await rig.claim("w2")) == [one]
    assert await rig.succeed(taken) == [SettleResult.STALE]
    # Nobody claims from where it is: it comes back as a lost lease.
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
    while again := await rig.reclaim():
        assert len(again) == 1
        assert await rig.reclaim() == await rig.claim() == []
        assert await rig.succeed(*again) == [SettleResult.APPLIED]
        done += ids(again)
    assert sorted(done) == sorted(ids(claims))


async def test_retries_that_may_not_run_hide_no_others(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, retry_via={QUEUE: RetryVia.PENDING})
    claims = [await rig.start_one(tenant_id="acme") for _ in range(5)]
    claims += [await rig.start_one(tenant_id="beta")]
    for claim in claims:
        await rig.settle(claim, RetryLater(1_000, FAILURE))
    await rig.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(concurrency=0)}))
    await redis_harness.advance(60_000)
    # Room for fewer than wait before it.
    (again,) = await rig.engine.reclaim("w2", [QUEUE], 2)
    assert again.tenant_id == "beta"


async def test_jobs_that_the_last_release_left_in_lane_0_go_on(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    """Another tenant's jobs used to be in the default tenant's streams; their records say so."""
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
    taken = await rig.engine.claim_job("w9", QUEUE, "old4")
    claims = {claim.job_id: claim for claim in await rig.claim()}
    assert set(claims) == {"old1", "old2", "old3", new}
    assert await rig.settle(claims["old2"], Release("draining")) is SettleResult.APPLIED
    assert await rig.succeed(claims["old1"], claims["old3"], taken) == [SettleResult.APPLIED] * 3
    (again,) = await rig.claim()
    assert (again.job_id, again.lease.position.partition(":")[0]) == ("old2", "5")
    assert await rig.succeed(again, claims[new]) == [SettleResult.APPLIED] * 2
    assert await rig.open_jobs() == 0


async def test_a_full_redis_drains_every_lane_and_opens_no_new_one(
    redis_harness: RedisHarness, rig: Rig, keys: QueueKeys
) -> None:
    back, parked, taken, last = [await rig.start_one(tenant_id="acme") for _ in range(4)]
    delayed = await rig.submit_one(tenant_id="zeta", delay_ms=1)
    await rig.submit(3, tenant_id="acme")
    await asyncio.sleep(0.002)
    await redis_harness.configure("maxmemory", 1)
    try:
        with pytest.raises(EngineUnavailable):
            await rig.submit(1, tenant_id="new")
        assert set(await seats(redis_harness)) == {"acme"}
        assert await rig.settle(back, Release("draining")) is SettleResult.APPLIED
        assert await rig.settle(parked, Suspend(FAILURE)) is SettleResult.APPLIED
        await rig.move(parked.job_id, State.QUEUED)
        assert await rig.promote() == 1
        await rig.engine.set_control(QUEUE, QueueControl(tenants={"omega": TenantControl(weight=3)}))
        assert await rig.settle(taken, RetryLater(60_000, FAILURE)) is SettleResult.APPLIED
        await rig.engine.expedite(QUEUE, taken.job_id, actor="ann", reason="now", audit="operator.retry")
        again = await rig.engine.claim_job("w9", QUEUE, taken.job_id)
        claims = await rig.claim()
        assert delayed in ids(claims)
        assert len(claims) == 6
        assert set(await rig.succeed(*claims, again, last)) == {SettleResult.APPLIED}
        assert await rig.claim() == []
        assert await rig.open_jobs() == 0
    finally:
        await redis_harness.configure("maxmemory", 0)


# Keys ----------------------------------------------------------------------------------------------------


async def test_scripts_touch_only_what_they_declare(redis_url: str, namespace: str) -> None:
    """Every verb, over several lanes, with the server telling what each script does (rule of Redis Cluster)."""
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
    scripts, seen = 0, set()
    for line in lines:
        words = re.findall(rb'"((?:[^"\\]|\\.)*)"', line)
        if words[0].upper() == b"EVALSHA":
            declared, scripts = set(words[3 : 3 + int(words[2])]), scripts + 1
        elif b" lua] " in line:
            touched = keys_of(words)
            assert touched <= declared, f"{line[:200]!r}: {touched - declared} is not declared"
            seen |= touched
    assert scripts > 30
    assert any(b":lane:2" in key for key in seen)


def keys_of(words: list[bytes]) -> set[bytes]:
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
        held = await rig.submit_one(tenant_id=tenant, hold=True)
        await rig.move(held, State.QUEUED, approval=Approval("a", ("b",), 1), audit="operator.approve")
        late = await rig.submit_one(tenant_id=tenant, delay_ms=60_000)
        await engine.expedite(QUEUE, late, actor="a", reason="b", audit="operator.retry")
        far = await rig.submit_one(tenant_id=tenant, delay_ms=60_000)
        await rig.succeed(await engine.claim_job("w9", QUEUE, far))
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
    view = await rig.view(claims[-2].job_id)
    await harness.redis.delete(keys.job(view.job_id))
    await engine.restore(QUEUE, await engine.snapshot(QUEUE, [view.job_id]), [view])
    await engine.trim_feed(QUEUE, (await rig.entries())[-1].position)
    await engine.prune([QUEUE])
    await engine.deregister_worker("w1", [QUEUE])


async def test_a_long_story_over_lanes_is_legal(rig: Rig) -> None:
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
