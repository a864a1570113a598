"""Engine contract for feed events: a ledger can record and restore every job from them (L1, L2, S4)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.job import Event, Failure, Meta, Priority
from holdfast.core.retry import Retry
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.core.verdict import POISON_PILL, DeadLetter, Hold, Release, RetryLater, Succeed, Suspend
from holdfast.errors import FeedDetached, TransitionInvalid
from holdfast.testing.contract.harness import (
    FAILURE,
    LONG_WAIT_MS,
    OTHER_QUEUE,
    Contract,
    EngineHarness,
    Rig,
    both_modes,
    open_queue,
    soon,
)


def data_of(event: Event) -> dict[str, Any]:
    assert event.data is not None, f"{event.type} has no data"
    return event.data


def failure_in(event: Event) -> Failure:
    data = data_of(event)
    return Failure(data["code"], data["message"], data.get("type", ""), data.get("stack", ""))


class FeedEventContract(Contract):
    """Guarantees about the contents of feed events."""

    # Tenant ----------------------------------------------------------------------------------------

    @both_modes
    @pytest.mark.parametrize("ledger", [False, True], ids=["alone", "with a ledger"])
    async def test_every_event_names_its_tenant(self, rig: Rig, ledger: bool) -> None:
        rig = await Rig.on(rig.harness, retry_via=rig.engine.options.retry_via, ledger=ledger)
        tenants: dict[str, str] = {}
        verdicts = (
            Succeed(b"1"),
            RetryLater(1_000, FAILURE),
            DeadLetter(FAILURE),
            Suspend(FAILURE),
            Hold("?"),
            Release("bye"),
        )
        for tenant in ("default", "acme", "a b\u00fc"):
            for verdict in verdicts:
                first = await rig.start_one("w1", tenant_id=tenant)
                await rig.lose_leases()
                claim = await rig.reclaim_one("w2")
                assert claim.job_id == first.job_id
                await rig.engine.renew([claim.lease], [claim.lease])
                await rig.settle(claim, verdict)
                tenants[claim.job_id] = tenant
                if isinstance(verdict, Suspend):
                    await rig.move(claim.job_id, State.CANCELLED)
                elif isinstance(verdict, Hold):
                    await rig.move(claim.job_id, State.QUEUED)
                await rig.harness.advance(1_001)
                for again in await rig.claim_due("w3"):
                    await rig.settle(again, DeadLetter(FAILURE))
            held = await rig.submit_one(tenant_id=tenant, hold=True, idempotency_key="k")
            dead = await rig.submit_one(tenant_id=tenant, delay_ms=60_000, trace_id="t")
            await rig.move(held, State.CANCELLED)
            await rig.move(dead, State.DLQ_PENDING)
            tenants |= {held: tenant, dead: tenant}
        events = await rig.events()
        assert {event.type for event in events} >= {"task.created", "task.claimed", "task.reclaimed", HEARTBEAT_EVENT}
        assert [(event.type, event.tenant_id) for event in events] == [
            (event.type, tenants[event.job_id]) for event in events
        ]

    # Data for recording and restoring a job --------------------------------------------------------

    async def test_a_creation_event_has_the_whole_envelope(self, rig: Rig) -> None:
        meta = Meta(priority=Priority.HIGH, retry=Retry(7, base=2), max_retries=4, context={"user": "u1"})
        before = await rig.engine.now_ms()
        fields: dict[str, Any] = {"tenant_id": "acme", "idempotency_key": "k", "trace_id": "t", "meta": meta}
        job_id = await rig.submit_one(**fields, payload=b'{"n": 1.50}', delay_ms=60_000)
        (event,) = await rig.events(job_id)
        data = dict(data_of(event))
        fingerprint = raw_fingerprint("print", b'{"n": 1.50}')
        assert msgspec.json.decode(data.pop("meta"), type=Meta) == msgspec.structs.replace(
            meta, key_fingerprint=fingerprint
        )
        assert before + 60_000 <= data.pop("run_at_ms") <= await rig.engine.now_ms() + 60_000
        assert data == {
            "task": "print",
            "payload": '{"n": 1.50}',
            "tenant_id": "acme",
            "idempotency_key": "k",
            "trace_id": "t",
            "priority": 0,
            "context": {"user": "u1"},
        }

    async def test_a_creation_event_with_defaults_is_complete(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        (event,) = await rig.events(job_id)
        assert data_of(event) == {
            "task": "print",
            "payload": '{"n":1}',
            "tenant_id": "default",
            "idempotency_key": job_id,
            "trace_id": "",
            "priority": 1,
            "context": None,
            "run_at_ms": 0,
        }

    @pytest.mark.parametrize("counts", [True, False])
    async def test_a_retry_event_has_failure_due_time_and_whether_it_counts(self, rig: Rig, counts: bool) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(60_000, FAILURE, counts))
        event = (await rig.events(claim.job_id))[-1]
        assert failure_in(event) == FAILURE
        assert data_of(event)["counted"] is counts
        assert data_of(event)["next_attempt_at_ms"] == event.at_ms + 60_000
        assert event.retry_count == int(counts)

    @pytest.mark.parametrize("started", [True, False])
    @pytest.mark.parametrize("delay_ms", [0, 60_000])
    async def test_a_release_event_says_whether_the_attempt_is_used_up(
        self, rig: Rig, delay_ms: int, started: bool
    ) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Release("later", delay_ms, started))
        event = (await rig.events(claim.job_id))[-1]
        assert (event.attempt, event.message) == (1, "later")
        assert data_of(event)["started"] is started
        assert data_of(event).get("next_attempt_at_ms") == (event.at_ms + delay_ms if delay_ms else None)

    @pytest.mark.parametrize("ledger", [False, True], ids=["alone", "with a ledger"])
    async def test_a_dead_letter_event_is_complete(self, harness: EngineHarness, ledger: bool) -> None:
        rig = await Rig.on(harness, ledger=ledger)
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(0, FAILURE))
        await harness.advance(1)
        (claim,) = await rig.claim_due("w2")
        await rig.settle(claim, DeadLetter(FAILURE))
        await self._check_dead_letter(rig, claim.job_id, FAILURE, ["retrying", "dlq_pending"], ledger)
        event = next(event for event in await rig.events(claim.job_id) if event.to_state is State.DLQ_PENDING)
        assert (event.attempt, event.retry_count, event.worker) == (2, 1, "w2")

    @pytest.mark.parametrize("ledger", [False, True], ids=["alone", "with a ledger"])
    async def test_a_poison_pill_event_is_complete(self, harness: EngineHarness, ledger: bool) -> None:
        rig = await Rig.on(harness, ledger=ledger, max_deliveries=1)
        claim = await rig.start_one("w1")
        await rig.poison()
        await self._check_dead_letter(rig, claim.job_id, None, ["dlq_pending"], ledger)
        event = next(event for event in await rig.events(claim.job_id) if event.to_state is State.DLQ_PENDING)
        assert failure_in(event).code == POISON_PILL

    @pytest.mark.parametrize("ledger", [False, True], ids=["alone", "with a ledger"])
    async def test_the_event_of_a_job_dead_lettered_by_an_operator_is_complete(
        self, harness: EngineHarness, ledger: bool
    ) -> None:
        rig = await Rig.on(harness, ledger=ledger)
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        await rig.move(claim.job_id, State.DLQ_PENDING)
        await self._check_dead_letter(rig, claim.job_id, None, ["retrying"], ledger)
        event = next(event for event in await rig.events(claim.job_id) if event.to_state is State.DLQ_PENDING)
        assert (data_of(event)["actor"], data_of(event)["reason"]) == ("ann", "because")
        assert failure_in(event).code == "DEAD_LETTERED_BY_OPERATOR"

    async def _check_dead_letter(
        self, rig: Rig, job_id: str, failure: Failure | None, outcomes: list[str], ledger: bool
    ) -> None:
        if ledger:
            await rig.move(job_id, State.DLQ_RECORDED)
            await rig.move(job_id, State.FAILED)
        pending, recorded, failed = (await rig.events(job_id))[-3:]
        assert [pending.type, recorded.type, failed.type] == ["task.dlq_pending", "task.dlq", "task.failed"]
        if failure is not None:
            assert failure_in(pending) == failure
        assert [attempt["outcome"] for attempt in data_of(pending)["history"]] == outcomes
        dlq_id = data_of(pending)["dlq_id"]
        assert dlq_id
        assert data_of(recorded)["dlq_id"] == data_of(failed)["dlq_id"] == dlq_id
        assert (await rig.view(job_id)).meta.dlq_id == dlq_id

    async def test_a_repeated_move_of_a_dead_letter_is_refused_with_its_state(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        claim = await rig.start_one()
        await rig.settle(claim, DeadLetter(FAILURE))
        for to in (State.DLQ_RECORDED, State.FAILED):
            await rig.move(claim.job_id, to)
            for again in (State.DLQ_RECORDED, to):
                with pytest.raises(TransitionInvalid) as refused:
                    await rig.move(claim.job_id, again)
                assert refused.value.from_state == to

    # Heartbeats ------------------------------------------------------------------------------------

    @both_modes
    async def test_heartbeats_of_one_renewal_are_one_entry(self, rig: Rig) -> None:
        stolen = await rig.start_one("w1")
        await rig.lose_leases()
        await rig.reclaim_one("w2")
        retried = await rig.start_one("w1", tenant_id="acme")
        await rig.settle(retried, RetryLater(0, FAILURE))
        await rig.harness.advance(1)
        (retried,) = await rig.claim_due("w1")
        quiet, fresh, ended = [await rig.start_one("w1") for _ in range(3)]
        await rig.succeed(ended)
        before = await rig.entries()
        beating = {claim.lease for claim in (stolen, retried, fresh, ended)}
        leases = [claim.lease for claim in (stolen, retried, quiet, fresh, ended)]
        assert await rig.engine.renew(leases, beating) == [stolen.lease, ended.lease]
        (entry,) = (await rig.entries())[len(before) :]
        assert [(event.type, event.job_id) for event in entry.events] == [
            (HEARTBEAT_EVENT, retried.job_id),
            (HEARTBEAT_EVENT, fresh.job_id),
        ]
        assert [(event.attempt, event.retry_count, event.worker, event.tenant_id) for event in entry.events] == [
            (2, 1, "w1", "acme"),
            (1, 0, "w1", "default"),
        ]
        assert {(event.from_state, event.to_state) for event in entry.events} == {(None, None)}
        assert await rig.succeed(retried, quiet, fresh) == ["applied"] * 3

    async def test_a_renewal_without_heartbeats_leaves_none(self, rig: Rig) -> None:
        claim, other = await rig.start_one("w1"), await rig.start_one("w1")
        before = await rig.entries()
        assert await rig.engine.renew([claim.lease]) == []
        assert await rig.engine.renew([claim.lease], [other.lease]) == []
        assert await rig.entries() == before

    # Durable submissions and readers ---------------------------------------------------------------

    async def test_a_durable_submission_is_marked_urgent(self, rig: Rig) -> None:
        first = rig.envelope(durable=True)
        await rig.engine.submit([rig.envelope(), first])
        await rig.engine.submit([rig.envelope()])
        await rig.engine.submit([rig.envelope(tenant_id="acme"), rig.envelope(durable=True, idempotency_key="k")])
        # The durable ones are duplicates: no caller waits for the entry of the new job.
        await rig.engine.submit([first, rig.envelope(), rig.envelope(durable=True, idempotency_key="k")])
        await rig.succeed(*await rig.claim())
        assert [entry.urgent for entry in await rig.entries()] == [True, False, True, False, False, False]

    async def test_with_a_ledger_submissions_are_refused_until_a_reader_is_attached(
        self, harness: EngineHarness
    ) -> None:
        engine = await harness.make(ledger=True)
        rig = Rig(harness, engine)
        with pytest.raises(FeedDetached):
            await rig.submit_one()
        assert engine.counters.intake_refused == 1
        assert await rig.claim() == []
        assert await rig.entries() == []
        await open_queue(engine, rig.queue)
        with pytest.raises(FeedDetached):
            await rig.submit_one(queue=OTHER_QUEUE)
        claim = await rig.start_one()
        assert await rig.succeed(claim) == ["applied"]

    async def test_without_a_ledger_no_reader_is_needed(self, rig: Rig) -> None:
        assert await rig.submit_one()

    # Waiting for entries ---------------------------------------------------------------------------

    async def test_wait_feed_returns_queues_with_new_entries(self, rig: Rig) -> None:
        await rig.submit_one()
        await rig.submit_one()
        first, last = await rig.entries()
        positions = {OTHER_QUEUE: "", rig.queue: ""}
        assert await soon(rig.engine.wait_feed(positions, LONG_WAIT_MS)) == [rig.queue]
        assert await soon(rig.engine.wait_feed({rig.queue: first.position}, LONG_WAIT_MS)) == [rig.queue]
        assert await soon(rig.engine.wait_feed({rig.queue: last.position}, 20)) == []
        assert await soon(rig.engine.wait_feed({rig.queue: last.position, OTHER_QUEUE: ""}, 0)) == []
        assert await soon(rig.engine.wait_feed({}, 20)) == []
        await rig.submit_one(queue=OTHER_QUEUE)
        # The first queue with new entries ends the wait, possibly before the others are known: on a Cluster they can be
        # on different servers.
        assert set(await soon(rig.engine.wait_feed(positions, LONG_WAIT_MS))) & {OTHER_QUEUE, rig.queue}
        assert set(await soon(rig.engine.wait_feed(positions, 0))) == {OTHER_QUEUE, rig.queue}

    # Continuing at a time ----------------------------------------------------------------------------

    async def test_a_feed_continues_at_a_time(self, rig: Rig) -> None:
        engine = rig.engine
        await rig.submit_one()
        at_ms = await _next_ms(rig)
        later = [await rig.submit_one(), await rig.submit_one()]
        elsewhere = await rig.submit_one(queue=OTHER_QUEUE)
        position = await engine.seek_feeds(at_ms)
        for queue, job_ids in ((rig.queue, later), (OTHER_QUEUE, [elsewhere])):
            found = await engine.read_feed(queue, position, 10)
            events = [event for entry in found for event in entry.events if event.at_ms >= at_ms]
            assert [event.job_id for event in events] == job_ids
            assert await engine.is_feed_whole(queue, position)
        assert set(await engine.wait_feed({rig.queue: position, OTHER_QUEUE: position}, 0)) == {rig.queue, OTHER_QUEUE}
        end = await engine.seek_feeds(await _next_ms(rig))
        assert await engine.wait_feed({rig.queue: end, OTHER_QUEUE: end}, 0) == []
        start = await engine.seek_feeds(0)
        assert len(await engine.read_feed(rig.queue, start, 10)) == 3
        assert await engine.is_feed_whole(rig.queue, start)
        assert await engine.is_feed_whole("never-used", start)

    async def test_a_feed_with_dropped_entries_is_not_whole(self, harness: EngineHarness) -> None:
        """Trimmed behind its reader, to the tail, and without a reader, to the limit."""
        rig = await Rig.on(harness, feed_tail=2, ledger=True)
        start = await rig.engine.seek_feeds(await rig.engine.now_ms())
        for _ in range(6):
            await rig.submit_one()
        assert await rig.engine.is_feed_whole(rig.queue, (await rig.entries())[0].position)
        await rig.engine.trim_feed(rig.queue, (await rig.entries())[-1].position)
        kept = await rig.entries()
        assert len(kept) == 3
        assert not await rig.engine.is_feed_whole(rig.queue, start)
        assert await rig.engine.is_feed_whole(rig.queue, kept[0].position)
        detached = await Rig.on(harness, feed_limit=5)
        detached.queue = OTHER_QUEUE
        for _ in range(300):
            await detached.submit_one()
        assert len(await detached.entries()) < 300
        assert not await detached.engine.is_feed_whole(OTHER_QUEUE, start)

    async def test_a_new_entry_wakes_wait_feed(self, rig: Rig) -> None:
        await rig.submit_one()
        position = (await rig.entries())[-1].position
        reader = await rig.harness.make()
        here = asyncio.create_task(reader.wait_feed({rig.queue: position}, LONG_WAIT_MS))
        there = asyncio.create_task(reader.wait_feed({OTHER_QUEUE: ""}, LONG_WAIT_MS))
        both = asyncio.create_task(reader.wait_feed({rig.queue: position, OTHER_QUEUE: ""}, LONG_WAIT_MS))
        # Waiters do not block other calls; after this short wait all of them are waiting.
        assert await soon(reader.wait_feed({rig.queue: position}, 50)) == []
        assert not here.done()
        claim = await rig.claim_one()
        assert await soon(here) == [rig.queue]
        assert await soon(both) == [rig.queue]
        assert not there.done()
        await rig.submit_one(queue=OTHER_QUEUE)
        assert await soon(there) == [OTHER_QUEUE]
        assert await rig.succeed(claim) == ["applied"]

    async def test_a_cancelled_wait_leaves_the_engine_usable(self, rig: Rig) -> None:
        waiting = asyncio.create_task(rig.engine.wait_feed({rig.queue: ""}, LONG_WAIT_MS))
        assert await soon(rig.engine.wait_feed({rig.queue: ""}, 20)) == []
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await rig.submit_one()
        assert await soon(rig.engine.wait_feed({rig.queue: ""}, LONG_WAIT_MS)) == [rig.queue]


async def _next_ms(rig: Rig) -> int:
    """Let the store's clock advance by some milliseconds, whether a test moves it or not."""
    begun_ms = await rig.engine.now_ms()
    await rig.harness.advance(5)
    while (at_ms := await rig.engine.now_ms()) < begun_ms + 3:
        pass
    return at_ms
