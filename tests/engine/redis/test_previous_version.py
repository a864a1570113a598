"""Jobs that the previous version left on Redis: this version reads, finishes and explains all of them.

`data/redis_before.json` has a `DUMP` of every key that holdfast at commit a1549ca wrote there: a job in every state in
queue `orders`, two retries of the pending list in queue `parked`, and a feed that no reader has read.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Approval, ApprovalRequest, Claim, Event, decode_meta
from holdfast.core.rebuild import rebuild_job
from holdfast.core.states import State
from holdfast.core.verdict import SettleResult
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import TenantControl
from holdfast.engine.redis import wire
from holdfast.engine.redis.claims import merge_record
from holdfast.engine.redis.keys import STREAMS_PER_LANE
from holdfast.testing.contract.harness import Rig, open_queue
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

DUMP_FILE = Path(__file__).parent / "data" / "redis_before.json"
GUARD = ApprovalRequest(
    approval_id="approval-1",
    payload_hash="ab" * 32,
    reason="more than 100 €",
    policies=("large-sums",),
    quorum=2,
    requested_by="ada",
    details={"sum": 120},
)
TASK = ApprovalRequest(approval_id="approval-2", payload_hash="ab" * 32, name="send it?", requested_by="ada")
STATES = {
    "acme": State.QUEUED,
    "asked": State.WAITING_APPROVAL,
    "cancelled": State.CANCELLED,
    "cleared": State.QUEUED,
    "consented": State.QUEUED,
    "delayed": State.QUEUED,
    "dlq_pending": State.DLQ_PENDING,
    "dlq_recorded": State.DLQ_RECORDED,
    "durable": State.QUEUED,
    "expedited": State.QUEUED,
    "failed": State.FAILED,
    "held": State.WAITING_APPROVAL,
    "queued": State.QUEUED,
    "retrying": State.RETRYING,
    "running": State.RUNNING,
    "succeeded": State.SUCCEEDED,
    "suspended": State.SUSPENDED,
}


@pytest.fixture
async def harness(redis_url: str) -> AsyncIterator[RedisHarness]:
    namespace = f"before-{secrets.token_hex(4)}"
    harness = RedisHarness(redis_url, namespace)
    for key, value in json.loads(DUMP_FILE.read_text())["keys"].items():
        await harness.redis.restore(key.replace("before:", f"{namespace}:", 1), 0, base64.b64decode(value))
    yield harness
    await harness.close()


async def rigs(harness: RedisHarness) -> tuple[Rig, Rig]:
    via = {"orders": RetryVia.SCHEDULE, "parked": RetryVia.PENDING}
    engine = await harness.make(ledger=True, retry_via=via, pending_idle_ms=0)
    for queue in via:
        # As after a fail-over: the epoch is not the one in which they were written.
        await open_queue(engine, queue)
    return Rig(harness, engine, "orders"), Rig(harness, engine, "parked")


async def test_every_job_has_its_state(harness: RedisHarness) -> None:
    orders, parked = await rigs(harness)
    assert set(STATES.values()) == set(State)
    infos_by_id = dict(zip(STATES, await orders.engine.get("orders", list(STATES)), strict=True))
    assert {job_id: info and info.state for job_id, info in infos_by_id.items()} == STATES
    metas = {job_id: info.meta for job_id, info in infos_by_id.items() if info is not None}
    assert (metas["held"].approval_request, metas["asked"].approval_request) == (GUARD, TASK)
    assert metas["cleared"].approved_hash == GUARD.payload_hash
    assert metas["consented"].approvals == {"send it?": Approval("approval-2", ("bob",), 1_700_000_000_000)}
    infos = await parked.engine.get("parked", ["retaken", "waits"])
    assert [info and info.state for info in infos] == [State.RUNNING, State.RETRYING]
    control = await orders.engine.get_control("orders")
    assert (control.concurrency, control.worker_concurrency) == (None, 5)
    assert control.tenants == {"acme": TenantControl(concurrency=1, weight=2)}


async def test_the_whole_feed_is_read_and_rebuilds_every_job(harness: RedisHarness) -> None:
    orders, parked = await rigs(harness)
    for rig in (orders, parked):
        entries = await rig.engine.read_feed(rig.queue, "", 1_000)
        events = [event for entry in entries for event in entry.events]
        check_history(events)
        if rig is orders:
            assert any(entry.urgent for entry in entries)
            assert {event.type for event in events} >= {"approval.requested", "approval.approved", "operator.retry"}
        for job_id in {event.job_id for event in events if event.to_state}:
            (info,) = await rig.engine.get(rig.queue, [job_id])
            assert info is not None
            rebuilt = rebuild_job(rig.queue, [event for event in events if event.job_id == job_id])
            assert _key_fields(rebuilt) == _key_fields(info), job_id


def _key_fields(info: Any) -> tuple[Any, ...]:
    meta = info.meta
    return info.state, info.attempt, meta.approval_request, meta.approved_hash, meta.approvals, meta.retry_count


async def leases_of_previous_version(harness: RedisHarness, queue: str) -> list[Claim]:
    """The claims that worker `w-old` of the previous version has in its memory."""
    claims, keys = [], harness.keys(queue)
    for index, stream in [*enumerate(keys.streams), *enumerate(keys.lane(1), STREAMS_PER_LANE)]:
        if not await harness.redis.exists(stream) or not await harness.redis.xinfo_groups(stream):
            continue
        for row in await harness.redis.xpending_range(stream, harness.names.group, "-", "+", 100, "w-old"):
            message_id, deliveries = row["message_id"], row["times_delivered"]
            ((_, fields),) = await harness.redis.xrange(stream, message_id, message_id)
            entry = (message_id, [part for pair in fields.items() for part in pair])
            claim = wire.parse_entry(entry, index, queue, "w-old", deliveries, 0)
            claims.append(merge_record(claim, await harness.redis.get(keys.job(claim.job_id))))
    return claims


async def test_all_open_jobs_can_be_finished(harness: RedisHarness) -> None:
    orders, parked = await rigs(harness)
    # A worker of the previous version is still running: its leases are valid.
    leases = [claim for rig in (orders, parked) for claim in await leases_of_previous_version(harness, rig.queue)]
    assert sorted(claim.job_id for claim in leases) == ["retaken", "running"]
    assert await orders.succeed(*leases) == [SettleResult.APPLIED] * 2
    approval = Approval("approval-1", ("bob", "cy"), 1_700_000_000_000)
    await orders.move("held", State.QUEUED, approval=approval, event="approval.approved", approval_id="approval-1")
    await orders.move("asked", State.QUEUED, approval=Approval("approval-2", ("bob",), 1), approval_id="approval-2")
    await orders.move("suspended", State.QUEUED)
    await orders.move("dlq_pending", State.DLQ_RECORDED)
    for job_id in ("dlq_pending", "dlq_recorded"):
        await orders.move(job_id, State.FAILED)
    await harness.advance(3_600_001)
    done = []
    for rig in (orders, parked):
        while claims := await rig.claim_due("w-new"):
            done += [claim.job_id for claim in claims]
            assert set(await rig.succeed(*claims)) == {SettleResult.APPLIED}
    waiting = {"acme", "asked", "cleared", "consented", "delayed", "durable", "expedited", "held", "queued", "retrying"}
    assert sorted(done) == sorted(waiting | {"suspended", "waits"})
    for rig in (orders, parked):
        assert sum((await rig.engine.stats(rig.queue)).states.values()) == 0
        check_history(await rig.events())


async def test_its_idempotency_keys_are_known(harness: RedisHarness) -> None:
    orders, _ = await rigs(harness)
    (receipt,) = await orders.engine.submit([orders.envelope(idempotency_key="k1")])
    assert (receipt.job_id, receipt.duplicate) == ("queued", True)


def test_current_keys_are_written_and_both_are_read() -> None:
    meta = decode_meta('{"ask": {"approval_id": "a", "payload_hash": "h"}, "cleared": "c", "consents": {}}')
    assert meta == decode_meta(msgspec.json.encode(meta))
    assert sorted(msgspec.json.decode(msgspec.json.encode(meta))) == ["approval_request", "approvals", "approved_hash"]
    # Nested keys of the same name belong to the application.
    assert decode_meta('{"context": {"ask": 1}}').context == {"ask": 1}


def test_events_of_both_versions_rebuild_the_same_job() -> None:
    request, approval = msgspec.to_builtins(TASK), msgspec.to_builtins(Approval("approval-2", ("bob",), 1))

    def history(requested: str, approved: str) -> list[Event]:
        def event(seq: int, kind: str, before: State | None, to: State, data: dict[str, Any]) -> Event:
            return Event(job_id="j", type=kind, from_state=before, to_state=to, attempt=1, at_ms=seq, data=data)

        return [
            event(1, "task.created", None, State.QUEUED, {"task": "print", "payload": "{}"}),
            event(2, "task.claimed", State.QUEUED, State.RUNNING, {}),
            event(3, "approval.requested", State.RUNNING, State.WAITING_APPROVAL, {requested: request}),
            event(4, "approval.approved", State.WAITING_APPROVAL, State.QUEUED, {approved: approval}),
        ]

    before, after = history("ask", "consent"), history("approval_request", "approval")
    assert rebuild_job("q", before) == rebuild_job("q", after)
    assert rebuild_job("q", before[:3]).meta.approval_request == TASK
    assert rebuild_job("q", before).meta.approvals == {"send it?": Approval("approval-2", ("bob",), 1)}
