"""What only holdfast may state cannot be written by a program that may only append to a stream (Q1–Q3, Q15).

The name of a native message's first field is the queue's marker, a secret in `queue:control`. A message with any other
marker is foreign, unless its job's record proves that holdfast wrote it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from redis.asyncio import Redis

from holdfast.core.history import check_history
from holdfast.core.job import Approval, Attempt, Claim, Meta
from holdfast.core.verdict import RetryLater, SettleResult
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.redis import wire
from holdfast.testing.contract.harness import FAILURE, Rig, ids
from tests.engine.harness import RedisHarness
from tests.engine.redis.test_foreign import QUEUE, WELL_FORMED, ForeignWriter

pytestmark = pytest.mark.redis

INVENTED: Final = Meta(
    retry_count=7,
    lost_leases=3,
    approved_hash="ab" * 32,
    approvals={"send it?": Approval("a-1", ("bob", "cy"), 1_700_000_000_000)},
    history=(Attempt(1, "w9", 1, 2, "retrying"),),
    submitted_by="admin",
)
LONG: Final = {
    "holdfast": "1 retrying 5 4 1700000000000",
    **WELL_FORMED,
    "tenant_id": "acme",
    "idempotency_key": "k",
    "trace_id": "t-1",
    "meta": wire.encode_meta(INVENTED),
}


def with_marker(marker: str) -> dict[str, str]:
    return {marker if name == "holdfast" else name: value for name, value in LONG.items()}


FORGED: Final[dict[str, dict[Any, Any]]] = {
    "of the previous version": LONG,
    "short": {"holdfast": "1 queued 5 0 1700000000000", **WELL_FORMED},
    "guessed": with_marker("holdfast:0000000000000000000000"),
    "empty": with_marker("holdfast:"),
    "not verified": with_marker("holdfast?"),
    "not a header": {**LONG, "holdfast": "1 queued x y z"},
    "unreadable meta": {**LONG, "meta": "{"},
    "further fields": {**LONG, "more": "1"},
    "not first": {**WELL_FORMED, "holdfast": "1 queued 5 0 0", "meta": LONG["meta"]},
}


@pytest.fixture
async def foreign(redis_harness: RedisHarness) -> ForeignWriter:
    rig = Rig(redis_harness, await redis_harness.make(), QUEUE)
    await rig.succeed(await rig.start_one())  # the queue has a marker
    return ForeignWriter(redis_harness, rig)


async def marker_of(foreign: ForeignWriter) -> bytes:
    marker: bytes = await foreign.redis.hget(foreign.keys.control, "marker")
    return marker


async def rotate(foreign: ForeignWriter) -> None:
    await foreign.redis.hdel(foreign.keys.control, "marker")


def own_fields(claim: Claim) -> tuple[Any, ...]:
    return claim.attempt, msgspec.structs.replace(claim.meta, key_fingerprint=""), claim.task, claim.payload


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
async def test_a_message_with_a_forged_marker_is_foreign(foreign: ForeignWriter, fields: dict[Any, Any]) -> None:
    """Its counters, history and approvals are ignored, at the first delivery and after a lost lease."""
    await foreign.write(fields)
    claim = await foreign.rig.claim_one()
    assert own_fields(claim) == (1, Meta(), "print", b'{"n":1}')
    info = await foreign.rig.view("j1")
    assert (info.attempt, info.meta.approvals, info.meta.retry_count) == (1, None, 0)
    await foreign.rig.lose_leases()
    again = await foreign.rig.reclaim_one("w2")
    assert own_fields(again) == (2, Meta(), "print", b'{"n":1}')
    await foreign.rig.engine.renew([again.lease], [again.lease])
    assert await foreign.rig.succeed(again) == [SettleResult.APPLIED]
    events = await foreign.rig.events("j1")
    assert [(event.type, event.attempt, event.retry_count) for event in events] == [
        ("task.created", 0, 0),
        ("task.claimed", 1, 0),
        ("task.reclaimed", 2, 0),
        ("task.heartbeat", 2, 0),
        ("task.succeeded", 2, 0),
    ]
    check_history(events, ended=True)
    await foreign.assert_nothing_left()


@pytest.mark.parametrize("mode", RetryVia)
async def test_a_forged_marker_stays_foreign_after_a_retry(redis_harness: RedisHarness, mode: RetryVia) -> None:
    rig = Rig(redis_harness, await redis_harness.make(retry_via={QUEUE: mode}, pending_idle_ms=0), QUEUE)
    foreign = ForeignWriter(redis_harness, rig)
    await foreign.write(LONG)
    await rig.settle(await rig.claim_one(), RetryLater(0, FAILURE))
    await redis_harness.advance(1)
    (claim,) = await rig.claim_due("w2")
    assert (claim.attempt, claim.meta.approvals, claim.meta.approved_hash) == (2, None, "")
    assert (await rig.view("j1")).attempt == 2
    assert await rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await rig.events(), ended=True)


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("state", ["ready", "running", "retrying", "ended"])
async def test_a_forged_message_with_a_known_id_is_dropped(
    foreign: ForeignWriter, fields: dict[Any, Any], state: str
) -> None:
    """Nothing is written into the history of a job of another tenant."""
    rig = foreign.rig
    await rig.submit_one(job_id="j1", tenant_id="zeta")
    claims = await rig.claim() if state != "ready" else []
    for claim in claims:
        if state == "retrying":
            await rig.settle(claim, RetryLater(60_000, FAILURE))
        elif state == "ended":
            await rig.succeed(claim)
    before = await rig.events("j1")
    await foreign.write(fields)
    found = await rig.claim("w2")
    assert [claim.tenant_id for claim in found] == (["zeta"] if state == "ready" else [])
    await rig.lose_leases()
    after = [event for event in await rig.events("j1") if event.type not in ("task.claimed", "task.reclaimed")]
    assert after == [event for event in before if event.type != "task.claimed"]
    assert await foreign.redis.xlen(foreign.keys.streams[1]) == 0


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
async def test_a_forged_message_with_a_known_id_is_dropped_by_a_reclaim(
    foreign: ForeignWriter, fields: dict[Any, Any]
) -> None:
    """The worker that had read it died before it adopted it."""
    rig, stream = foreign.rig, foreign.keys.streams[1]
    await rig.submit_one(job_id="j1", tenant_id="zeta")
    first = await rig.claim_one("w1")
    await foreign.write(fields)
    assert await foreign.redis.xreadgroup(foreign.harness.names.group, "w1", {stream: ">"})
    await rig.lose_leases()
    found = await rig.reclaim("w2")
    assert [(claim.job_id, claim.tenant_id, claim.attempt) for claim in found] == [("j1", "zeta", first.attempt + 1)]
    assert [event.type for event in await rig.events("j1")] == ["task.created", "task.claimed", "task.reclaimed"]
    assert await foreign.redis.xlen(stream) == 0


async def test_a_duplicate_of_another_tenants_job_is_not_an_event(foreign: ForeignWriter) -> None:
    await foreign.rig.submit_one(job_id="j1", tenant_id="zeta")
    await foreign.write({**WELL_FORMED, "tenant_id": "acme"})
    assert ids(await foreign.rig.claim()) == ["j1"]
    assert await foreign.rig.event_types("j1") == ["task.created", "task.claimed"]
    assert foreign.rig.engine.counters.skipped == 1


# markers that were replaced ------------------------------------------------------------------------


async def submit_with_approval(rig: Rig) -> Meta:
    meta = Meta(approvals=INVENTED.approvals, max_retries=5)
    await rig.submit_one(job_id="j1", tenant_id="zeta", meta=meta)
    return meta


async def test_a_rotated_marker_changes_no_job(foreign: ForeignWriter) -> None:
    rig = foreign.rig
    meta = await submit_with_approval(rig)
    old = await marker_of(foreign)
    await rotate(foreign)
    assert (await rig.view("j1")).meta.approvals == meta.approvals
    claim = await rig.claim_one()
    assert (claim.attempt, claim.meta.approvals, claim.tenant_id) == (1, meta.approvals, "zeta")
    # The reply was lost: the claim is not recorded twice.
    (same,) = await rig.engine.recover_claims("w1", [QUEUE], ())
    assert same.meta.approvals == meta.approvals
    await rig.lose_leases()
    again = await rig.reclaim_one("w2")
    assert (again.attempt, again.meta.approvals) == (2, meta.approvals)
    await rig.engine.renew([again.lease], [again.lease])
    await rig.settle(again, RetryLater(0, FAILURE))
    await foreign.harness.advance(1)
    (last,) = await rig.claim_due("w3")
    assert (last.attempt, last.meta.approvals) == (3, meta.approvals)
    assert await rig.succeed(last) == [SettleResult.APPLIED]
    assert await marker_of(foreign) not in (None, old)
    check_history(await rig.events(), ended=True)


async def test_a_job_with_a_rotated_marker_can_be_claimed_by_id(foreign: ForeignWriter) -> None:
    meta = await submit_with_approval(foreign.rig)
    await rotate(foreign)
    claim = await foreign.rig.engine.claim_job("w1", QUEUE, "j1")
    assert (claim.attempt, claim.meta.approvals) == (1, meta.approvals)
    assert await foreign.rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await foreign.rig.events(), ended=True)


async def test_each_queue_has_its_own_marker(foreign: ForeignWriter) -> None:
    other = Rig(foreign.harness, foreign.rig.engine, "other")
    await other.succeed(await other.start_one())
    markers = [await foreign.redis.hget(foreign.harness.keys(queue).control, "marker") for queue in (QUEUE, "other")]
    assert len(set(markers)) == 2
    assert all(len(marker) == len(b"holdfast:") + 22 for marker in markers)
    await foreign.write(with_marker(markers[1].decode()))
    assert own_fields(await foreign.rig.claim_one()) == (1, Meta(), "print", b'{"n":1}')


async def test_the_marker_is_in_messages_and_in_the_control_hash_only(foreign: ForeignWriter) -> None:
    """Claims, records, results, dead letters and the feed do not reveal it."""
    rig = foreign.rig
    marker = await marker_of(foreign)
    await foreign.write(FORGED["unreadable meta"] | {"type": ""})
    await rig.submit_one(job_id="j2")
    for claim in await rig.claim():
        assert marker not in repr(claim).encode()
        await rig.succeed(claim)
    await rig.submit_one(job_id="j3")
    found = {key async for key in foreign.redis.scan_iter() if marker in await dump(foreign.redis, key)}
    assert found == {foreign.keys.control, foreign.keys.streams[1]}


async def dump(redis: Redis, key: bytes) -> bytes:
    """All values of a key; the serialised form may be compressed."""
    kind = await redis.type(key)
    match kind:
        case b"string":
            value: Any = await redis.get(key)
        case b"hash":
            value = await redis.hgetall(key)
        case b"stream":
            value = await redis.xrange(key)
        case b"zset":
            value = await redis.zrange(key, 0, -1)
        case _:
            value = await redis.smembers(key)
    return repr(value).encode()


async def test_the_first_marker_stays(foreign: ForeignWriter) -> None:
    marker = await marker_of(foreign)
    second = Rig(foreign.harness, await foreign.harness.make(), QUEUE)
    await second.succeed(await second.start_one())
    assert await marker_of(foreign) == marker
