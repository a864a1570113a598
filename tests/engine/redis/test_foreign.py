"""Messages that other programs write with a plain XADD are submissions; malformed ones are dead letters (Q3, Q15)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Priority, decode_meta
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.core.verdict import MESSAGE_MALFORMED, RetryLater, SettleResult
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import IdempotencyKeyReused
from holdfast.testing.contract.harness import FAILURE, Rig, ids, open_queue
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

QUEUE = "default"
WELL_FORMED = {"task_id": "j1", "type": "print", "payload": '{"n":1}'}


class ForeignWriter:
    """Another program that writes to a queue, and a rig on that queue."""

    def __init__(self, harness: RedisHarness, rig: Rig) -> None:
        self.redis = harness.redis
        self.harness = harness
        self.rig = rig
        self.keys = harness.keys(QUEUE)

    async def write(self, fields: dict[Any, Any], priority: Priority = Priority.NORMAL) -> str:
        message_id: bytes = await self.redis.xadd(self.keys.streams[priority], fields)
        return message_id.decode()

    async def dead_letters(self) -> list[dict[str, str]]:
        entries = await self.redis.xrange(self.keys.dlq)
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in entries]

    async def assert_nothing_left(self) -> None:
        for stream in self.keys.streams:
            assert await self.redis.xlen(stream) == 0
        assert await self.rig.open_jobs() == 0


@pytest.fixture
async def foreign(redis_harness: RedisHarness) -> ForeignWriter:
    return ForeignWriter(redis_harness, Rig(redis_harness, await redis_harness.make(), QUEUE))


async def test_a_plain_xadd_is_a_submission(foreign: ForeignWriter) -> None:
    await foreign.write(
        {
            **WELL_FORMED,
            "idempotency_key": "order-17",
            "tenant_id": "acme",
            "trace_id": "t-1",
            "max_retries": "5",
            "context": '{"user":"u1"}',
            "colour": "ignored",
        }
    )
    claim = await foreign.rig.claim_one()
    assert (claim.job_id, claim.task, claim.payload, claim.attempt) == ("j1", "print", b'{"n":1}', 1)
    assert (claim.idempotency_key, claim.tenant_id, claim.trace_id) == ("order-17", "acme", "t-1")
    assert (claim.meta.max_retries, claim.meta.context) == (5, {"user": "u1"})
    assert foreign.rig.engine.counters.adopted == 1

    info = await foreign.rig.view("j1")
    assert (info.state, info.task, info.payload, info.worker) == (State.RUNNING, "print", b'{"n":1}', "w1")
    assert await foreign.rig.succeed(claim) == [SettleResult.APPLIED]
    assert await foreign.rig.event_types("j1") == ["task.created", "task.claimed", "task.succeeded"]
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


async def test_three_fields_are_enough(foreign: ForeignWriter) -> None:
    await foreign.write({"payload": "[1,2]", "type": "print", "task_id": "j1"})
    claim = await foreign.rig.claim_one()
    assert (claim.payload, claim.tenant_id, claim.idempotency_key) == (b"[1,2]", "default", "j1")


async def test_the_stream_decides_the_priority(foreign: ForeignWriter) -> None:
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
        await foreign.write({**WELL_FORMED, "task_id": priority.name}, priority)
    claims = await foreign.rig.claim()
    assert sorted(ids(claims)) == ["HIGH", "LOW", "NORMAL"]
    assert {claim.job_id: Priority(claim.meta.priority).name for claim in claims} == {
        name: name for name in ("HIGH", "NORMAL", "LOW")
    }


async def test_foreign_and_own_messages_share_a_stream(foreign: ForeignWriter) -> None:
    await foreign.write(WELL_FORMED)
    own = await foreign.rig.submit_one()
    await foreign.write({**WELL_FORMED, "task_id": "j2"})
    claims = await foreign.rig.claim()
    assert sorted(ids(claims)) == sorted(["j1", own, "j2"])
    assert await foreign.rig.succeed(*claims) == [SettleResult.APPLIED] * 3
    check_history(await foreign.rig.events(), ended=True)


async def test_a_foreign_message_waits_while_the_queue_is_paused(foreign: ForeignWriter) -> None:
    await foreign.rig.engine.set_control(QUEUE, QueueControl(paused=True))
    await foreign.write(WELL_FORMED)
    assert await foreign.rig.claim() == []
    await foreign.rig.engine.set_control(QUEUE, QueueControl())
    assert ids(await foreign.rig.claim()) == ["j1"]


# After adoption ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(RetryVia))
async def test_a_foreign_job_can_retry(redis_harness: RedisHarness, mode: RetryVia) -> None:
    engine = await redis_harness.make(retry_via={QUEUE: mode})
    foreign = ForeignWriter(redis_harness, Rig(redis_harness, engine, QUEUE))
    await foreign.write(WELL_FORMED)
    claim = await foreign.rig.claim_one()
    assert await foreign.rig.settle(claim, RetryLater(1_000, FAILURE)) is SettleResult.APPLIED
    assert await foreign.rig.state("j1") is State.RETRYING
    await redis_harness.advance(1_001)
    (retried,) = await foreign.rig.claim_due("w2")
    assert (retried.job_id, retried.attempt, retried.meta.retry_count) == ("j1", 2, 1)
    assert (retried.task, retried.payload) == ("print", b'{"n":1}')
    assert await foreign.rig.succeed(retried) == [SettleResult.APPLIED]
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


async def test_a_foreign_job_can_be_reclaimed(foreign: ForeignWriter) -> None:
    await foreign.write(WELL_FORMED)
    old = await foreign.rig.claim_one("w1")
    await foreign.rig.lose_leases()
    new = await foreign.rig.reclaim_one("w2")
    assert (new.job_id, new.attempt) == ("j1", 2)
    assert await foreign.rig.succeed(old, new) == [SettleResult.STALE, SettleResult.APPLIED]
    assert await foreign.rig.event_types("j1") == ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"]
    check_history(await foreign.rig.events(), ended=True)


async def test_a_foreign_job_whose_claim_was_never_adopted_is_not_lost(foreign: ForeignWriter) -> None:
    """The worker crashed between reading the message and adopting it."""
    await foreign.write(WELL_FORMED)
    await foreign.rig.engine.set_control(QUEUE, QueueControl())
    stream = foreign.keys.streams[Priority.NORMAL]
    assert await foreign.rig.claim("other", 0) == []
    group = foreign.harness.names.group
    await foreign.redis.xgroup_create(stream, group, "0")
    await foreign.redis.xreadgroup(group, "w1", {stream: ">"})
    await foreign.rig.lose_leases()
    (claim,) = await foreign.rig.claim_due("w2")
    assert claim.job_id == "j1"
    assert await foreign.rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


async def test_a_foreign_job_can_be_resumed_after_a_lost_reply(foreign: ForeignWriter) -> None:
    await foreign.write(WELL_FORMED)
    lost = await foreign.rig.claim_one("w1")
    (resumed,) = await foreign.rig.engine.recover_claims("w1", [QUEUE], ())
    assert (resumed.lease, resumed.attempt) == (lost.lease, lost.attempt)
    assert await foreign.rig.succeed(resumed) == [SettleResult.APPLIED]
    check_history(await foreign.rig.events(), ended=True)


async def test_messages_with_equal_ids_in_two_queues_are_distinguished(foreign: ForeignWriter) -> None:
    """Their leases have the same token. A lease on one is not a lease on the other, and does not renew it."""
    engine, other = foreign.rig.engine, Rig(foreign.harness, foreign.rig.engine, f"{QUEUE}-2")
    for queue in (QUEUE, other.queue):
        await foreign.redis.xadd(foreign.harness.keys(queue).streams[Priority.NORMAL], WELL_FORMED, id="5-1")
    known, lost = await foreign.rig.claim_one("w1"), await other.claim_one("w1")
    assert known.lease.token == lost.lease.token
    (resumed,) = await engine.recover_claims("w1", [QUEUE, other.queue], {known.lease})
    assert resumed.lease == lost.lease
    assert await engine.renew([known.lease, lost.lease], {known.lease}) == []
    with_heartbeat = [rig.queue for rig in (foreign.rig, other) if HEARTBEAT_EVENT in await rig.event_types("j1")]
    assert with_heartbeat == [QUEUE]
    assert await foreign.rig.succeed(known) == await other.succeed(resumed) == [SettleResult.APPLIED]


async def test_a_foreign_job_can_be_cancelled_while_it_runs(foreign: ForeignWriter) -> None:
    await foreign.write(WELL_FORMED)
    claim = await foreign.rig.claim_one()
    await foreign.rig.move("j1", State.CANCELLED)
    assert await foreign.rig.succeed(claim) == [SettleResult.STALE]
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


# Duplicates ------------------------------------------------------------------------------------------


async def test_the_same_task_id_again_is_dropped(foreign: ForeignWriter) -> None:
    await foreign.write(WELL_FORMED)
    await foreign.write(WELL_FORMED)
    claim = await foreign.rig.claim_one()
    await foreign.write(WELL_FORMED)
    assert await foreign.rig.claim() == []
    await foreign.rig.succeed(claim)
    await foreign.write(WELL_FORMED)
    assert await foreign.rig.claim() == []
    assert await foreign.rig.state("j1") is State.SUCCEEDED
    assert (await foreign.rig.event_types("j1")).count("task.duplicate") == 3
    assert foreign.rig.engine.counters.skipped == 3
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


async def test_the_task_id_of_an_own_job_is_dropped(foreign: ForeignWriter) -> None:
    own = await foreign.rig.submit_one()
    await foreign.write({**WELL_FORMED, "task_id": own})
    claims = await foreign.rig.claim()
    assert [(claim.job_id, claim.payload) for claim in claims] == [(own, b'{"n":1}')]
    assert await foreign.rig.succeed(*claims) == [SettleResult.APPLIED]
    await foreign.assert_nothing_left()


async def test_the_same_idempotency_key_again_is_dropped(foreign: ForeignWriter) -> None:
    own = await foreign.rig.submit_one(idempotency_key="k")
    await foreign.write({**WELL_FORMED, "idempotency_key": "k"})
    await foreign.write({**WELL_FORMED, "task_id": "j2", "idempotency_key": "k", "tenant_id": "acme"})
    assert sorted(ids(await foreign.rig.claim())) == sorted([own, "j2"])
    duplicate = await foreign.rig.engine.submit([foreign.rig.envelope(idempotency_key="k", tenant_id="acme")])
    assert (duplicate[0].job_id, duplicate[0].duplicate) == ("j2", True)


async def test_a_message_with_the_key_of_another_request_is_recorded(foreign: ForeignWriter) -> None:
    await foreign.write({**WELL_FORMED, "idempotency_key": "k"})
    # The same request: numbers and the order of keys are compared as values.
    await foreign.write({**WELL_FORMED, "task_id": "j2", "idempotency_key": "k", "payload": '{"n": 1.0}'})
    await foreign.write({**WELL_FORMED, "task_id": "j3", "idempotency_key": "k", "payload": '{"n": 2}'})
    await foreign.write({**WELL_FORMED, "task_id": "j4", "idempotency_key": "k", "type": "scan"})
    claims = await foreign.rig.claim()
    assert ids(claims) == ["j1"]
    events = [event for event in await foreign.rig.events("j1") if event.type == "task.duplicate"]
    assert [(event.data or {}).get("arguments_differ") for event in events] == [None, True, True]
    assert all((event.data or {})["message_id"] for event in events)
    # The key of an adopted message has a fingerprint, too; it reaches the feed, and so the ledger.
    with pytest.raises(IdempotencyKeyReused):
        await foreign.rig.engine.submit([foreign.rig.envelope(idempotency_key="k", payload=b'{"n":2}')])
    again = foreign.rig.envelope(idempotency_key="k", task=WELL_FORMED["type"], payload=WELL_FORMED["payload"].encode())
    assert (await foreign.rig.engine.submit([again]))[0].duplicate
    (created,) = [event for event in await foreign.rig.events("j1") if event.type == "task.created"]
    assert decode_meta((created.data or {})["meta"]).key_fingerprint


@pytest.mark.parametrize("tenant", ["default", "acme"])
async def test_a_key_that_is_the_id_of_a_job_without_a_key(foreign: ForeignWriter, tenant: str) -> None:
    own = await foreign.rig.submit_one(tenant_id=tenant)
    await foreign.write({**WELL_FORMED, "idempotency_key": own, "tenant_id": tenant})
    await foreign.write({**WELL_FORMED, "task_id": "j2", "idempotency_key": own, "tenant_id": "other"})
    assert sorted(ids(await foreign.rig.claim())) == sorted([own, "j2"])
    assert (await foreign.rig.event_types(own)).count("task.duplicate") == 1
    await foreign.write({**WELL_FORMED, "task_id": "j3", "tenant_id": tenant})
    await foreign.write({**WELL_FORMED, "task_id": "j4", "idempotency_key": "j3", "tenant_id": tenant})
    assert ids(await foreign.rig.claim()) == ["j3"]


# Malformed -------------------------------------------------------------------------------------------

MALFORMED: dict[str, dict[Any, Any]] = {
    "no type": {"task_id": "j1", "payload": "{}"},
    "no payload": {"task_id": "j1", "type": "print"},
    "payload is not JSON": {**WELL_FORMED, "payload": "{n:1"},
    "payload is a number": {**WELL_FORMED, "payload": "1"},
    "payload is not text": {**WELL_FORMED, "payload": b"\xff\xfe\x00"},
    "payload is nested too deep": {**WELL_FORMED, "payload": "[" * 100_000},
    "type is not text": {**WELL_FORMED, "type": b"\xff\xfe"},
    "max_retries is not a number": {**WELL_FORMED, "max_retries": "many"},
    "max_retries is negative": {**WELL_FORMED, "max_retries": "-1"},
    "context is not an object": {**WELL_FORMED, "context": "[1]"},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_message_is_a_dead_letter_at_once(foreign: ForeignWriter, fields: dict[Any, Any]) -> None:
    await foreign.write(fields)
    good = await foreign.rig.submit_one()

    assert ids(await foreign.rig.claim()) == [good]

    (dead_letter,) = await foreign.dead_letters()
    assert (dead_letter["task_id"], dead_letter["error_code"]) == ("j1", MESSAGE_MALFORMED)
    assert dead_letter["error"]
    raw = json.loads(dead_letter["payload"])
    assert raw["task_id"] == "j1"
    assert set(raw) == set(fields)
    info = await foreign.rig.view("j1")
    assert info.state is State.FAILED
    assert info.failure is not None
    assert info.failure.code == MESSAGE_MALFORMED
    assert foreign.rig.engine.counters.malformed == 1

    # It is not delivered again.
    await foreign.rig.lose_leases()
    assert ids(await foreign.rig.claim_due("w2")) == [good]
    assert await foreign.rig.event_types("j1") == ["task.created", "task.dlq_pending", "task.dlq", "task.failed"]
    check_history(await foreign.rig.events())


NO_ID: dict[str, dict[Any, Any]] = {
    "none": {"type": "print", "payload": "{}"},
    "empty": {**WELL_FORMED, "task_id": ""},
    "space": {**WELL_FORMED, "task_id": "a b"},
    "not text": {**WELL_FORMED, "task_id": b"\xff\x00"},
    "too long": {**WELL_FORMED, "task_id": "x" * 10_000},
    "nothing at all": {"": ""},
}


@pytest.mark.parametrize("fields", NO_ID.values(), ids=NO_ID.keys())
async def test_a_message_without_a_usable_id_gets_one(foreign: ForeignWriter, fields: dict[Any, Any]) -> None:
    await foreign.write(fields)
    assert await foreign.rig.claim() == []
    (dead_letter,) = await foreign.dead_letters()
    assert dead_letter["task_id"]
    assert dead_letter["error_code"] == MESSAGE_MALFORMED
    assert len(json.loads(dead_letter["payload"])) == len(fields)
    assert await foreign.rig.state(dead_letter["task_id"]) is State.FAILED
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


async def test_a_malformed_message_under_a_known_id_does_not_affect_the_job(foreign: ForeignWriter) -> None:
    own = await foreign.rig.submit_one()
    await foreign.write({"task_id": own, "type": "print", "payload": "{"})
    (claim,) = await foreign.rig.claim()
    assert claim.job_id == own
    assert len(await foreign.dead_letters()) == 1
    assert await foreign.rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await foreign.rig.events(), ended=True)


async def test_with_a_ledger_a_malformed_message_stays_dlq_pending(redis_harness: RedisHarness) -> None:
    engine = await redis_harness.make(ledger=True)
    await open_queue(engine, QUEUE)
    foreign = ForeignWriter(redis_harness, Rig(redis_harness, engine, QUEUE))
    await foreign.write({"task_id": "j1", "type": "print", "tenant_id": "acme"})
    assert await foreign.rig.claim() == []
    info = await foreign.rig.view("j1")
    assert info.state is State.DLQ_PENDING
    assert json.loads(info.payload) == {"task_id": "j1", "type": "print", "tenant_id": "acme"}
    await foreign.rig.move("j1", State.DLQ_RECORDED)
    await foreign.rig.move("j1", State.FAILED)
    events = await foreign.rig.events()
    check_history(events, ended=True)
    assert {event.tenant_id for event in events} == {"acme"}
    created, pending, recorded, failed = [event.data or {} for event in events]
    assert (created["task"], json.loads(created["payload"])["task_id"]) == ("print", "j1")
    assert "meta" not in created
    assert (pending["code"], pending["history"]) == (MESSAGE_MALFORMED, [])
    (dead_letter,) = await foreign.dead_letters()
    assert dead_letter["dlq_id"] == pending["dlq_id"] == recorded["dlq_id"] == failed["dlq_id"] != ""


async def test_a_payload_over_the_limit_is_a_dead_letter(redis_harness: RedisHarness) -> None:
    foreign = ForeignWriter(redis_harness, Rig(redis_harness, await redis_harness.make(payload_limit=100), QUEUE))
    await foreign.write({**WELL_FORMED, "payload": json.dumps({"text": "x" * 100})})
    await foreign.write({**WELL_FORMED, "task_id": "j2"})
    assert ids(await foreign.rig.claim()) == ["j2"]
    (dead_letter,) = await foreign.dead_letters()
    assert (dead_letter["task_id"], dead_letter["error_code"]) == ("j1", MESSAGE_MALFORMED)
    assert "the limit is 100" in dead_letter["error"]


async def test_a_batch_of_good_malformed_and_duplicate_messages(foreign: ForeignWriter) -> None:
    for number in range(150):
        await foreign.write({**WELL_FORMED, "task_id": f"good-{number}"})
        await foreign.write({**WELL_FORMED, "task_id": f"good-{number}"})
        await foreign.write({"task_id": f"bad-{number}", "payload": "{}"})
    claims = await foreign.rig.claim(limit=500)
    assert sorted(ids(claims)) == sorted(f"good-{number}" for number in range(150))
    assert set(await foreign.rig.succeed(*claims)) == {SettleResult.APPLIED}
    assert len(await foreign.dead_letters()) == 150
    check_history(await foreign.rig.events(), ended=True)
    await foreign.assert_nothing_left()


# Events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(RetryVia))
async def test_every_event_of_a_foreign_job_names_its_tenant_and_retries(
    redis_harness: RedisHarness, mode: RetryVia
) -> None:
    engine = await redis_harness.make(retry_via={QUEUE: mode})
    foreign = ForeignWriter(redis_harness, Rig(redis_harness, engine, QUEUE))
    rig = foreign.rig
    # Eight values, as many as a short message of the engine has.
    await foreign.write({**WELL_FORMED, "tenant_id": "acme"})
    claim = await rig.claim_one("w1")
    await rig.engine.renew([claim.lease], [claim.lease])
    await rig.settle(claim, RetryLater(0, FAILURE))
    await redis_harness.advance(1)
    await rig.claim_due("w1")
    await rig.lose_leases()
    claim = await rig.reclaim_one("w2")
    await rig.engine.renew([claim.lease], [claim.lease])
    await rig.succeed(claim)
    events = await rig.events()
    assert {event.tenant_id for event in events} == {"acme"}
    assert [(event.type, event.attempt, event.retry_count) for event in events] == [
        ("task.created", 0, 0),
        ("task.claimed", 1, 0),
        ("task.heartbeat", 1, 0),
        ("task.retrying", 1, 1),
        ("task.claimed", 2, 1),
        ("task.reclaimed", 3, 1),
        ("task.heartbeat", 3, 1),
        ("task.succeeded", 3, 1),
    ]
    check_history(events, ended=True)


@pytest.mark.parametrize("first", ["own, ready", "own, ended", "foreign", "key"])
async def test_a_duplicate_event_names_the_first_job(foreign: ForeignWriter, first: str) -> None:
    rig = foreign.rig
    key = {"idempotency_key": "k"} if first == "key" else {}
    if first == "foreign":
        await foreign.write({**WELL_FORMED, "tenant_id": "acme"})
    else:
        await rig.submit_one(job_id="first" if key else "j1", tenant_id="acme", **key)
    if first == "own, ended":
        await rig.succeed(*await rig.claim())
    await foreign.write({**WELL_FORMED, "tenant_id": "acme", **key})
    await rig.claim()
    (event,) = [event for event in await rig.events() if event.type == "task.duplicate"]
    assert (event.job_id, event.tenant_id) == ("first" if key else "j1", "acme")


@pytest.mark.parametrize("with_ledger", [False, True])
async def test_a_message_that_became_unreadable_is_a_dead_letter(
    redis_harness: RedisHarness, with_ledger: bool
) -> None:
    """It was adopted under a higher limit; its worker died."""
    rig = Rig(redis_harness, await redis_harness.make(ledger=with_ledger), QUEUE)
    if with_ledger:
        await open_queue(rig.engine, QUEUE)
    foreign = ForeignWriter(redis_harness, rig)
    await foreign.write({**WELL_FORMED, "payload": json.dumps({"text": "x" * 2_000})})
    await rig.claim_one()
    stricter = Rig(redis_harness, await redis_harness.make(ledger=with_ledger, payload_limit=1_000), QUEUE)
    await rig.lose_leases()
    assert await stricter.reclaim() == []
    info = await stricter.view("j1")
    assert info.state is (State.DLQ_PENDING if with_ledger else State.FAILED)
    assert info.failure is not None
    assert info.failure.code == MESSAGE_MALFORMED
    types = await rig.event_types("j1")
    assert types[:4] == ["task.created", "task.claimed", "task.reclaimed", "task.dlq_pending"]
    assert await foreign.redis.xlen(foreign.keys.streams[1]) == 0
