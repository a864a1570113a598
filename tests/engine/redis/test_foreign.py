"""Messages that other programs write with a plain XADD are submissions; malformed ones are dead letters (Q3, Q15)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Priority
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.core.verdict import MESSAGE_MALFORMED, RetryLater, SettleResult
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import QueueControl
from holdfast.testing.contract.harness import FAILURE, Rig, ids
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

QUEUE = "default"
WELL_FORMED = {"task_id": "j1", "type": "print", "payload": '{"n":1}'}


class Foreigner:
    """Another program, and the engine that must cope with it."""

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

    async def nothing_is_left(self) -> None:
        for stream in self.keys.streams:
            assert await self.redis.xlen(stream) == 0
        assert await self.rig.open_jobs() == 0


@pytest.fixture
async def foreigner(redis_harness: RedisHarness) -> Foreigner:
    return Foreigner(redis_harness, Rig(redis_harness, await redis_harness.make(), QUEUE))


async def test_a_plain_xadd_is_a_submission(foreigner: Foreigner) -> None:
    await foreigner.write(
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
    claim = await foreigner.rig.claim_one()
    assert (claim.job_id, claim.task, claim.payload, claim.attempt) == ("j1", "print", b'{"n":1}', 1)
    assert (claim.idempotency_key, claim.tenant_id, claim.trace_id) == ("order-17", "acme", "t-1")
    assert (claim.meta.max_retries, claim.meta.context) == (5, {"user": "u1"})
    assert foreigner.rig.engine.counters.adopted == 1

    view = await foreigner.rig.view("j1")
    assert (view.state, view.task, view.payload, view.worker) == (State.RUNNING, "print", b'{"n":1}', "w1")
    assert await foreigner.rig.succeed(claim) == [SettleResult.APPLIED]
    assert await foreigner.rig.event_types("j1") == ["task.created", "task.claimed", "task.succeeded"]
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


async def test_three_fields_are_enough(foreigner: Foreigner) -> None:
    await foreigner.write({"payload": "[1,2]", "type": "print", "task_id": "j1"})
    claim = await foreigner.rig.claim_one()
    assert (claim.payload, claim.tenant_id, claim.idempotency_key) == (b"[1,2]", "default", "j1")


async def test_the_stream_decides_the_priority(foreigner: Foreigner) -> None:
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
        await foreigner.write({**WELL_FORMED, "task_id": priority.name}, priority)
    claims = await foreigner.rig.claim()
    assert sorted(ids(claims)) == ["HIGH", "LOW", "NORMAL"]
    assert {claim.job_id: Priority(claim.meta.priority).name for claim in claims} == {
        name: name for name in ("HIGH", "NORMAL", "LOW")
    }


async def test_foreign_and_own_messages_share_a_line(foreigner: Foreigner) -> None:
    await foreigner.write(WELL_FORMED)
    own = await foreigner.rig.submit_one()
    await foreigner.write({**WELL_FORMED, "task_id": "j2"})
    claims = await foreigner.rig.claim()
    assert sorted(ids(claims)) == sorted(["j1", own, "j2"])
    assert await foreigner.rig.succeed(*claims) == [SettleResult.APPLIED] * 3
    check_history(await foreigner.rig.events(), ended=True)


async def test_it_waits_while_the_queue_is_paused(foreigner: Foreigner) -> None:
    await foreigner.rig.engine.set_control(QUEUE, QueueControl(paused=True))
    await foreigner.write(WELL_FORMED)
    assert await foreigner.rig.claim() == []
    await foreigner.rig.engine.set_control(QUEUE, QueueControl())
    assert ids(await foreigner.rig.claim()) == ["j1"]


# Its life goes on like any other ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(RetryVia))
async def test_a_foreign_job_can_retry(redis_harness: RedisHarness, mode: RetryVia) -> None:
    engine = await redis_harness.make(retry_via={QUEUE: mode})
    foreigner = Foreigner(redis_harness, Rig(redis_harness, engine, QUEUE))
    await foreigner.write(WELL_FORMED)
    claim = await foreigner.rig.claim_one()
    assert await foreigner.rig.settle(claim, RetryLater(1_000, FAILURE)) is SettleResult.APPLIED
    assert await foreigner.rig.state("j1") is State.RETRYING
    await redis_harness.advance(1_001)
    (again,) = await foreigner.rig.claim_due("w2")
    assert (again.job_id, again.attempt, again.meta.retry_count) == ("j1", 2, 1)
    assert (again.task, again.payload) == ("print", b'{"n":1}')
    assert await foreigner.rig.succeed(again) == [SettleResult.APPLIED]
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


async def test_a_foreign_job_can_be_taken_over(foreigner: Foreigner) -> None:
    await foreigner.write(WELL_FORMED)
    old = await foreigner.rig.claim_one("w1")
    await foreigner.rig.lose_leases()
    new = await foreigner.rig.reclaim_one("w2")
    assert (new.job_id, new.attempt) == ("j1", 2)
    assert await foreigner.rig.succeed(old, new) == [SettleResult.STALE, SettleResult.APPLIED]
    assert await foreigner.rig.event_types("j1") == ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"]
    check_history(await foreigner.rig.events(), ended=True)


async def test_a_foreign_job_whose_claim_was_never_adopted_is_not_lost(foreigner: Foreigner) -> None:
    """The worker died between reading the message and adopting it."""
    await foreigner.write(WELL_FORMED)
    await foreigner.rig.engine.set_control(QUEUE, QueueControl())
    stream = foreigner.keys.streams[Priority.NORMAL]
    assert await foreigner.rig.claim("nobody", 0) == []
    group = foreigner.harness.names.group
    await foreigner.redis.xgroup_create(stream, group, "0")
    await foreigner.redis.xreadgroup(group, "w1", {stream: ">"})
    await foreigner.rig.lose_leases()
    (claim,) = await foreigner.rig.claim_due("w2")
    assert claim.job_id == "j1"
    assert await foreigner.rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


async def test_a_foreign_job_can_be_resumed_after_a_lost_reply(foreigner: Foreigner) -> None:
    await foreigner.write(WELL_FORMED)
    lost = await foreigner.rig.claim_one("w1")
    (resumed,) = await foreigner.rig.engine.recover_claims("w1", [QUEUE], ())
    assert (resumed.lease, resumed.attempt) == (lost.lease, lost.attempt)
    assert await foreigner.rig.succeed(resumed) == [SettleResult.APPLIED]
    check_history(await foreigner.rig.events(), ended=True)


async def test_messages_with_equal_ids_in_two_queues_are_told_apart(foreigner: Foreigner) -> None:
    """Their leases have the same token: who holds the one does not hold the other, and does not beat for it."""
    engine, other = foreigner.rig.engine, Rig(foreigner.harness, foreigner.rig.engine, f"{QUEUE}-2")
    for queue in (QUEUE, other.queue):
        await foreigner.redis.xadd(foreigner.harness.keys(queue).streams[Priority.NORMAL], WELL_FORMED, id="5-1")
    held, lost = await foreigner.rig.claim_one("w1"), await other.claim_one("w1")
    assert held.lease.token == lost.lease.token
    (resumed,) = await engine.recover_claims("w1", [QUEUE, other.queue], {held.lease})
    assert resumed.lease == lost.lease
    assert await engine.renew([held.lease, lost.lease], {held.lease}) == []
    beats = [rig.queue for rig in (foreigner.rig, other) if HEARTBEAT_EVENT in await rig.event_types("j1")]
    assert beats == [QUEUE]
    assert await foreigner.rig.succeed(held) == await other.succeed(resumed) == [SettleResult.APPLIED]


async def test_a_foreign_job_can_be_cancelled_while_it_runs(foreigner: Foreigner) -> None:
    await foreigner.write(WELL_FORMED)
    claim = await foreigner.rig.claim_one()
    await foreigner.rig.move("j1", State.CANCELLED)
    assert await foreigner.rig.succeed(claim) == [SettleResult.STALE]
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


# The same again --------------------------------------------------------------------------------------


async def test_the_same_task_id_again_is_dropped(foreigner: Foreigner) -> None:
    await foreigner.write(WELL_FORMED)
    await foreigner.write(WELL_FORMED)
    claim = await foreigner.rig.claim_one()
    await foreigner.write(WELL_FORMED)
    assert await foreigner.rig.claim() == []
    await foreigner.rig.succeed(claim)
    await foreigner.write(WELL_FORMED)
    assert await foreigner.rig.claim() == []
    assert await foreigner.rig.state("j1") is State.SUCCEEDED
    assert (await foreigner.rig.event_types("j1")).count("task.duplicate") == 3
    assert foreigner.rig.engine.counters.skipped == 3
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


async def test_the_same_task_id_as_a_job_of_our_own_is_dropped(foreigner: Foreigner) -> None:
    own = await foreigner.rig.submit_one()
    await foreigner.write({**WELL_FORMED, "task_id": own})
    claims = await foreigner.rig.claim()
    assert [(claim.job_id, claim.payload) for claim in claims] == [(own, b'{"n":1}')]
    assert await foreigner.rig.succeed(*claims) == [SettleResult.APPLIED]
    await foreigner.nothing_is_left()


async def test_the_same_idempotency_key_again_is_dropped(foreigner: Foreigner) -> None:
    own = await foreigner.rig.submit_one(idempotency_key="k")
    await foreigner.write({**WELL_FORMED, "idempotency_key": "k"})
    await foreigner.write({**WELL_FORMED, "task_id": "j2", "idempotency_key": "k", "tenant_id": "acme"})
    assert sorted(ids(await foreigner.rig.claim())) == sorted([own, "j2"])
    duplicate = await foreigner.rig.engine.submit([foreigner.rig.envelope(idempotency_key="k", tenant_id="acme")])
    assert (duplicate[0].job_id, duplicate[0].duplicate) == ("j2", True)


# Malformed -------------------------------------------------------------------------------------------

MALFORMED: dict[str, dict[Any, Any]] = {
    "no type": {"task_id": "j1", "payload": "{}"},
    "no payload": {"task_id": "j1", "type": "print"},
    "payload is no JSON": {**WELL_FORMED, "payload": "{n:1"},
    "payload is a number": {**WELL_FORMED, "payload": "1"},
    "payload is no text": {**WELL_FORMED, "payload": b"\xff\xfe\x00"},
    "payload is nested too deep": {**WELL_FORMED, "payload": "[" * 100_000},
    "type is no text": {**WELL_FORMED, "type": b"\xff\xfe"},
    "max_retries is no number": {**WELL_FORMED, "max_retries": "many"},
    "max_retries is negative": {**WELL_FORMED, "max_retries": "-1"},
    "context is no object": {**WELL_FORMED, "context": "[1]"},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_message_is_a_dead_letter_at_once(foreigner: Foreigner, fields: dict[Any, Any]) -> None:
    await foreigner.write(fields)
    good = await foreigner.rig.submit_one()

    assert ids(await foreigner.rig.claim()) == [good]

    (dead,) = await foreigner.dead_letters()
    assert (dead["task_id"], dead["error_code"]) == ("j1", MESSAGE_MALFORMED)
    assert dead["error"]
    raw = json.loads(dead["payload"])
    assert raw["task_id"] == "j1"
    assert set(raw) == set(fields)
    view = await foreigner.rig.view("j1")
    assert view.state is State.FAILED
    assert view.failure is not None
    assert view.failure.code == MESSAGE_MALFORMED
    assert foreigner.rig.engine.counters.malformed == 1

    # Never round and round.
    await foreigner.rig.lose_leases()
    assert ids(await foreigner.rig.claim_due("w2")) == [good]
    assert await foreigner.rig.event_types("j1") == ["task.created", "task.dlq_pending", "task.dlq", "task.failed"]
    check_history(await foreigner.rig.events())


FORGED: dict[str, dict[Any, Any]] = {
    "forged marker": {"holdfast": "1 queued 0 0 0", "task_id": "j1"},
    "forged message": {
        "holdfast": "1 queued x y z", "task_id": "j1", "type": "print", "payload": "{}", "tenant_id": "acme",
        "idempotency_key": "k", "trace_id": "", "meta": "",
    },
    "forged meta": {
        "holdfast": "1 queued 0 0 0", "task_id": "j1", "type": "print", "payload": "{}", "tenant_id": "acme",
        "idempotency_key": "k", "trace_id": "", "meta": "{",
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
async def test_a_message_that_only_pretends_to_be_ours_ends_too(foreigner: Foreigner, fields: dict[Any, Any]) -> None:
    """Whoever forges the marker breaks the protocol; the line goes on all the same."""
    await foreigner.write(fields)
    good = await foreigner.rig.submit_one()
    (claim,) = await foreigner.rig.claim()
    assert claim.job_id == good
    (dead,) = await foreigner.dead_letters()
    assert dead["error_code"] == MESSAGE_MALFORMED
    assert json.loads(dead["payload"])["task_id"] == "j1"
    assert await foreigner.rig.state(dead["task_id"]) is State.FAILED
    await foreigner.rig.succeed(claim)
    await foreigner.rig.lose_leases()
    assert await foreigner.rig.claim_due("w2") == []
    assert await foreigner.rig.entries(), "the feed can still be read"
    await foreigner.nothing_is_left()


NO_ID: dict[str, dict[Any, Any]] = {
    "none": {"type": "print", "payload": "{}"},
    "empty": {**WELL_FORMED, "task_id": ""},
    "space": {**WELL_FORMED, "task_id": "a b"},
    "no text": {**WELL_FORMED, "task_id": b"\xff\x00"},
    "too long": {**WELL_FORMED, "task_id": "x" * 10_000},
    "nothing at all": {"": ""},
}


@pytest.mark.parametrize("fields", NO_ID.values(), ids=NO_ID.keys())
async def test_a_message_without_a_usable_id_gets_one(foreigner: Foreigner, fields: dict[Any, Any]) -> None:
    await foreigner.write(fields)
    assert await foreigner.rig.claim() == []
    (dead,) = await foreigner.dead_letters()
    assert dead["task_id"]
    assert dead["error_code"] == MESSAGE_MALFORMED
    assert len(json.loads(dead["payload"])) == len(fields)
    assert await foreigner.rig.state(dead["task_id"]) is State.FAILED
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


async def test_a_malformed_message_under_a_known_id_spares_the_job(foreigner: Foreigner) -> None:
    own = await foreigner.rig.submit_one()
    await foreigner.write({"task_id": own, "type": "print", "payload": "{"})
    (claim,) = await foreigner.rig.claim()
    assert claim.job_id == own
    assert len(await foreigner.dead_letters()) == 1
    assert await foreigner.rig.succeed(claim) == [SettleResult.APPLIED]
    check_history(await foreigner.rig.events(), ended=True)


async def test_with_a_ledger_a_malformed_message_waits_for_it(redis_harness: RedisHarness) -> None:
    engine = await redis_harness.make(ledger=True)
    foreigner = Foreigner(redis_harness, Rig(redis_harness, engine, QUEUE))
    await foreigner.write({"task_id": "j1", "type": "print", "tenant_id": "acme"})
    assert await foreigner.rig.claim() == []
    view = await foreigner.rig.view("j1")
    assert view.state is State.DLQ_PENDING
    assert json.loads(view.payload) == {"task_id": "j1", "type": "print", "tenant_id": "acme"}
    await foreigner.rig.move("j1", State.DLQ_RECORDED)
    await foreigner.rig.move("j1", State.FAILED)
    events = await foreigner.rig.events()
    check_history(events, ended=True)
    assert {event.tenant_id for event in events} == {"acme"}
    created, pending, recorded, failed = [event.data or {} for event in events]
    assert (created["task"], json.loads(created["payload"])["task_id"]) == ("print", "j1")
    assert "meta" not in created
    assert (pending["code"], pending["history"]) == (MESSAGE_MALFORMED, [])
    (letter,) = await foreigner.dead_letters()
    assert letter["dlq_id"] == pending["dlq_id"] == recorded["dlq_id"] == failed["dlq_id"] != ""


async def test_a_payload_over_the_limit_is_a_dead_letter(redis_harness: RedisHarness) -> None:
    foreigner = Foreigner(redis_harness, Rig(redis_harness, await redis_harness.make(payload_limit=100), QUEUE))
    await foreigner.write({**WELL_FORMED, "payload": json.dumps({"text": "x" * 100})})
    await foreigner.write({**WELL_FORMED, "task_id": "j2"})
    assert ids(await foreigner.rig.claim()) == ["j2"]
    (letter,) = await foreigner.dead_letters()
    assert (letter["task_id"], letter["error_code"]) == ("j1", MESSAGE_MALFORMED)
    assert "the limit is 100" in letter["error"]


async def test_a_batch_of_good_bad_and_double_messages(foreigner: Foreigner) -> None:
    for number in range(150):
        await foreigner.write({**WELL_FORMED, "task_id": f"good-{number}"})
        await foreigner.write({**WELL_FORMED, "task_id": f"good-{number}"})
        await foreigner.write({"task_id": f"bad-{number}", "payload": "{}"})
    claims = await foreigner.rig.claim(limit=500)
    assert sorted(ids(claims)) == sorted(f"good-{number}" for number in range(150))
    assert set(await foreigner.rig.succeed(*claims)) == {SettleResult.APPLIED}
    assert len(await foreigner.dead_letters()) == 150
    check_history(await foreigner.rig.events(), ended=True)
    await foreigner.nothing_is_left()


# What the ledger is told ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(RetryVia))
async def test_every_event_of_a_foreign_job_names_its_tenant_and_retries(
    redis_harness: RedisHarness, mode: RetryVia
) -> None:
    engine = await redis_harness.make(retry_via={QUEUE: mode})
    foreigner = Foreigner(redis_harness, Rig(redis_harness, engine, QUEUE))
    rig = foreigner.rig
    # Eight values, as many as a short message of ours has.
    await foreigner.write({**WELL_FORMED, "tenant_id": "acme"})
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


@pytest.mark.parametrize("first", ["own, in line", "own, ended", "foreign", "key"])
async def test_a_duplicate_is_told_of_the_job_that_was_there_first(foreigner: Foreigner, first: str) -> None:
    rig = foreigner.rig
    key = {"idempotency_key": "k"} if first == "key" else {}
    if first == "foreign":
        await foreigner.write({**WELL_FORMED, "tenant_id": "acme"})
    else:
        await rig.submit_one(job_id="first" if key else "j1", tenant_id="acme", **key)
    if first == "own, ended":
        await rig.succeed(*await rig.claim())
    await foreigner.write({**WELL_FORMED, "tenant_id": "acme" if key else "zeta", **key})
    await rig.claim()
    (event,) = [event for event in await rig.events() if event.type == "task.duplicate"]
    assert (event.job_id, event.tenant_id) == ("first" if key else "j1", "acme")
