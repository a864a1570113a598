"""Engine contract for settling: verdicts, resent settles, dead letters (S3–S5, Q2, Q6, Y3, Y6, Y7, D1, D6)."""

from __future__ import annotations

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Claim, Meta
from holdfast.core.states import FINAL, State
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    SettleResult,
    Succeed,
    Suspend,
    Verdict,
)
from holdfast.errors import TransitionInvalid
from holdfast.testing.contract.harness import EVERY_VERDICT, FAILURE, Contract, EngineHarness, Rig, both_modes, ids


def verdict_name(verdict: Verdict) -> str:
    return type(verdict).__name__


class SettlementContract(Contract):
    """Guarantees of `settle`."""

    async def test_success_is_final_and_has_a_result(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        assert await rig.settle(claim, Succeed(b'{"url":"x"}')) is SettleResult.APPLIED
        view = await rig.view(claim.job_id)
        assert (view.state, view.result, view.failure) == (State.SUCCEEDED, b'{"url":"x"}', None)
        assert (view.attempt, view.meta.retry_count) == (1, 0)
        assert view.finished_at_ms >= view.created_at_ms
        assert await rig.event_types(claim.job_id) == ["task.created", "task.claimed", "task.succeeded"]

    @pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=verdict_name)
    async def test_each_verdict_leads_to_its_target_state(self, harness: EngineHarness, verdict: Verdict) -> None:
        rig = await Rig.on(harness, ledger=True)
        claim = await rig.start_one()
        assert await rig.settle(claim, verdict) is SettleResult.APPLIED
        assert await rig.state(claim.job_id) is TARGETS[type(verdict)]
        assert await rig.engine.recover_claims("w1", [rig.queue], ()) == []
        check_history(await rig.events())

    async def test_an_event_has_worker_time_and_reason(self, rig: Rig) -> None:
        before = await rig.engine.now_ms()
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        created, claimed, retrying = await rig.events(claim.job_id)
        assert (created.from_state, created.to_state, created.attempt) == (None, State.QUEUED, 0)
        assert (created.data or {})["task"] == "print"
        assert (claimed.from_state, claimed.to_state, claimed.attempt) == (State.QUEUED, State.RUNNING, 1)
        assert (retrying.from_state, retrying.to_state) == (State.RUNNING, State.RETRYING)
        assert (retrying.attempt, retrying.retry_count, retrying.worker) == (1, 1, "w1")
        assert retrying.message == FAILURE.message
        assert (retrying.data or {})["code"] == FAILURE.code
        assert before <= created.at_ms <= claimed.at_ms <= retrying.at_ms <= await rig.engine.now_ms()

    @pytest.mark.parametrize("error_ms", [-86_400_000, 86_400_000], ids=["slow", "fast"])
    async def test_a_workers_clock_has_no_effect(self, rig: Rig, error_ms: int) -> None:
        claim = await rig.start_one()
        before = await rig.engine.now_ms()
        await rig.engine.settle([Settlement(claim, RetryLater(60_000, FAILURE), before + error_ms)])
        after = await rig.engine.now_ms()
        assert before <= (await rig.events(claim.job_id))[-1].at_ms <= after
        assert before + 60_000 <= (await rig.view(claim.job_id)).next_attempt_at_ms <= after + 60_000
        await rig.harness.advance(60_001)
        assert ids(await rig.claim_due()) == [claim.job_id]

    async def test_settle_results_are_in_the_order_of_the_batch(self, rig: Rig) -> None:
        stale = await rig.start_one("w1")
        await rig.lose_leases()
        await rig.reclaim_one("w2")
        already, good, better = [await rig.start_one("w1") for _ in range(3)]
        await rig.succeed(already)
        assert await rig.succeed(good, stale, already, better) == [
            SettleResult.APPLIED,
            SettleResult.STALE,
            SettleResult.ALREADY,
            SettleResult.APPLIED,
        ]
        assert await rig.engine.settle([]) == []

    async def test_one_batch_may_settle_jobs_of_several_queues(self, rig: Rig) -> None:
        claims = [await rig.start_one(), *await self._elsewhere(rig)]
        assert await rig.succeed(*claims) == [SettleResult.APPLIED] * 3

    async def _elsewhere(self, rig: Rig) -> list[Claim]:
        other = Rig(rig.harness, rig.engine, "emails")
        return [await other.start_one(), await other.start_one("w2")]

    # After a lost reply ----------------------------------------------------------------------------

    @pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=verdict_name)
    async def test_a_resent_settle_is_recognised(self, rig: Rig, verdict: Verdict) -> None:
        claim, other = await rig.start_one(), await rig.start_one()
        settlement = await rig.settlement(claim, verdict)
        assert await rig.engine.settle([settlement]) == [SettleResult.APPLIED]
        before = await rig.view(claim.job_id), await rig.events(claim.job_id)
        # In a different batch the second time.
        batch = [await rig.settlement(other, Succeed(b"7")), settlement]
        assert await rig.engine.settle(batch) == [SettleResult.APPLIED, SettleResult.ALREADY]
        assert (await rig.view(claim.job_id), await rig.events(claim.job_id)) == before
        assert rig.engine.counters.stale_settles == 0

    async def test_a_settlement_repeated_in_one_batch_is_applied_once(self, rig: Rig) -> None:
        settlement = await rig.settlement(await rig.start_one(), RetryLater(60_000, FAILURE))
        assert await rig.engine.settle([settlement, settlement]) == [SettleResult.APPLIED, SettleResult.ALREADY]
        assert (await rig.view(settlement.claim.job_id)).meta.retry_count == 1

    @both_modes
    @pytest.mark.parametrize("verdict", [RetryLater(1_000, FAILURE), Release("draining")], ids=verdict_name)
    async def test_a_settle_resent_during_the_next_attempt_changes_nothing(self, rig: Rig, verdict: Verdict) -> None:
        first = await rig.start_one("w1")
        settlement = await rig.settlement(first, verdict)
        await rig.engine.settle([settlement])
        await rig.harness.advance(1_001)
        (second,) = await rig.claim_due("w1")
        assert await rig.engine.settle([settlement]) != [SettleResult.APPLIED]
        assert await rig.state(first.job_id) is State.RUNNING
        assert await rig.succeed(second) == [SettleResult.APPLIED]
        assert await rig.engine.settle([settlement]) != [SettleResult.APPLIED]
        assert await rig.state(first.job_id) is State.SUCCEEDED
        check_history(await rig.events(), ended=True)

    @pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=verdict_name)
    async def test_a_final_state_never_changes(self, rig: Rig, verdict: Verdict) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Succeed(b'"first"'))
        before = await rig.view(claim.job_id), await rig.events()
        assert await rig.settle(claim, verdict) is not SettleResult.APPLIED
        await rig.lose_leases()
        assert await rig.claim_due() == []
        assert (await rig.view(claim.job_id), await rig.events()) == before

    # Releasing -------------------------------------------------------------------------------------

    async def test_an_unstarted_attempt_is_not_used_up(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        for _ in range(3):
            assert await rig.settle(claim, Release("draining")) is SettleResult.APPLIED
            assert await rig.state(claim.job_id) is State.QUEUED
            claim = await rig.claim_one("w2")
            assert (claim.attempt, claim.meta.history, claim.meta.retry_count) == (1, (), 0)
        await rig.succeed(claim)
        history = check_history(await rig.events(), ended=True)
        assert history.histories[claim.job_id].moves.count("task.released") == 3

    async def test_an_unknown_job_keeps_the_time_of_its_first_release(self, rig: Rig) -> None:
        first = await rig.start_one("w1", meta=Meta(context={"user": "ada"}))
        await rig.settle(first, Release("unknown here", 1_000, unknown=True))
        assert (await rig.events(first.job_id))[-1].data == {
            "message": "unknown here",
            "started": False,
            "unknown": True,
            "next_attempt_at_ms": (await rig.view(first.job_id)).next_attempt_at_ms,
        }
        await rig.harness.advance(1_001)
        (again,) = await rig.claim_due("w2")
        assert again.meta == Meta(context={"user": "ada"}, unknown_since_ms=first.claimed_at_ms)
        await rig.settle(again, Release("unknown here, too", 2_000, unknown=True))
        # Fenced like every verdict.
        assert await rig.settle(again, Release("unknown", unknown=True)) is SettleResult.ALREADY
        assert await rig.settle(first, Release("unknown", unknown=True)) is SettleResult.STALE
        await rig.harness.advance(2_001)
        (last,) = await rig.claim_due("w3")
        assert (last.attempt, last.meta.history) == (1, ())
        assert last.meta.unknown_since_ms == first.claimed_at_ms
        # A started attempt ends the count.
        await rig.settle(last, RetryLater(60_000, FAILURE))
        assert (await rig.view(last.job_id)).meta.unknown_since_ms == 0

    @pytest.mark.parametrize("first", [{}, {"tenant_id": "acme"}, {"delay_ms": 1_000}, {"hold": True}], ids=str)
    @both_modes
    async def test_the_schema_of_the_submission_stays_with_an_open_job(
        self, rig: Rig, first: dict[str, object]
    ) -> None:
        job_id = await rig.submit_one(schema="0a1b2c3d", **first)
        other = await rig.submit_one(schema="", **first)
        assert (await rig.view(job_id)).schema == "0a1b2c3d"
        assert (await rig.view(other)).schema == ""
        if "hold" in first:
            for each in (job_id, other):
                await rig.engine.move(rig.queue, each, State.QUEUED, actor="ada", reason="")
        for verdict in (Release("draining"), Release("asleep", 1_000, started=True), RetryLater(1_000, FAILURE)):
            await rig.harness.advance(1_001)
            claims = await rig.claim_due()
            assert sorted(ids(claims)) == sorted([job_id, other])
            for claim in claims:
                assert await rig.settle(claim, verdict) is SettleResult.APPLIED
                assert await rig.settle(claim, verdict) is SettleResult.ALREADY
            assert ((await rig.view(job_id)).schema, (await rig.view(other)).schema) == ("0a1b2c3d", "")
        await rig.engine.move(rig.queue, job_id, State.SUSPENDED, actor="ada", reason="")
        await rig.engine.move(rig.queue, job_id, State.QUEUED, actor="ada", reason="")
        assert (await rig.view(job_id)).schema == "0a1b2c3d"
        claim = await rig.engine.claim_job("w9", rig.queue, job_id)
        assert (await rig.view(job_id)).schema == "0a1b2c3d"
        await rig.succeed(claim)
        assert (await rig.view(job_id)).schema == ""

    async def test_jobs_of_one_batch_may_have_different_schemas(self, rig: Rig) -> None:
        schemas = ["0a1b2c3d", "", "4e5f6071", "0a1b2c3d", "not a fingerprint"]
        envelopes = [rig.envelope(schema=schema) for schema in schemas]
        await rig.engine.submit(envelopes)
        found = [(await rig.view(envelope.job_id)).schema for envelope in envelopes]
        assert found[:4] == schemas[:4]
        assert len(ids(await rig.claim())) == 5

    async def test_a_started_attempt_that_sleeps_is_used_up(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Release("sleeping", delay_ms=60_000, started=True))
        assert await rig.claim_due() == []
        await rig.harness.advance(60_001)
        (again,) = await rig.claim_due()
        assert (again.job_id, again.attempt) == (claim.job_id, 2)

    # Out of retries --------------------------------------------------------------------------------

    async def test_history_stays_with_the_job(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(0, FAILURE))
        await rig.harness.advance(1)
        (claim,) = await rig.claim_due("w2")
        await rig.settle(claim, DeadLetter(FAILURE))
        view = await rig.view(claim.job_id)
        assert view.failure == FAILURE
        assert [(past.number, past.worker, past.outcome) for past in view.meta.history] == [
            (1, "w1", "retrying"),
            (2, "w2", "dlq_pending"),
        ]
        assert all(past.failure == FAILURE and past.started_at_ms <= past.finished_at_ms for past in view.meta.history)

    async def test_without_a_ledger_the_engine_records_the_dead_letter_itself(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, DeadLetter(FAILURE))
        assert await rig.state(claim.job_id) is State.FAILED
        moves = [(event.type, event.from_state, event.to_state) for event in await rig.events(claim.job_id)]
        assert moves[-3:] == [
            ("task.dlq_pending", State.RUNNING, State.DLQ_PENDING),
            ("task.dlq", State.DLQ_PENDING, State.DLQ_RECORDED),
            ("task.failed", State.DLQ_RECORDED, State.FAILED),
        ]
        assert (await rig.engine.stats(rig.queue)).dead_letters == 1

    async def test_with_a_ledger_the_job_waits_until_its_dead_letter_is_recorded(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        claim = await rig.start_one()
        await rig.settle(claim, DeadLetter(FAILURE))
        await harness.advance(7 * 86_400_000)
        assert await rig.claim_due() == []
        view = await rig.view(claim.job_id)
        assert (view.state, view.payload, view.failure) == (State.DLQ_PENDING, claim.payload, FAILURE)
        with pytest.raises(TransitionInvalid):
            await rig.move(claim.job_id, State.FAILED)
        assert await rig.move(claim.job_id, State.DLQ_RECORDED) is State.DLQ_PENDING
        # A restarted ledger sends the move again: it is refused, not made twice.
        with pytest.raises(TransitionInvalid):
            await rig.move(claim.job_id, State.DLQ_RECORDED)
        assert await rig.move(claim.job_id, State.FAILED) is State.DLQ_RECORDED
        assert (await rig.event_types(claim.job_id))[-3:] == ["task.dlq_pending", "task.dlq", "task.failed"]
        check_history(await rig.events(), ended=True)

    async def test_the_reason_of_an_operators_dead_letter_stays_with_the_job(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id = await rig.submit_one()
        await rig.move(job_id, State.DLQ_PENDING)
        failure = (await rig.view(job_id)).failure
        assert failure is not None
        for state in (State.DLQ_RECORDED, State.FAILED):
            await rig.move(job_id, state)
            assert (await rig.view(job_id)).failure == failure

    async def test_a_suspended_job_can_be_resumed(self, rig: Rig) -> None:
        claim = await rig.start_one(meta=Meta(context={"user": "u1"}))
        await rig.settle(claim, RetryLater(0, FAILURE))
        await rig.harness.advance(1)
        (claim,) = await rig.claim_due()
        await rig.settle(claim, Suspend(FAILURE))
        assert await rig.claim_due() == []
        view = await rig.view(claim.job_id)
        assert (view.state, view.failure, view.payload) == (State.SUSPENDED, FAILURE, claim.payload)

        assert await rig.move(claim.job_id, State.QUEUED) is State.SUSPENDED
        resumed = await rig.claim_one()
        assert (resumed.job_id, resumed.payload, resumed.attempt) == (claim.job_id, claim.payload, 3)
        assert resumed.meta.retry_count == 0
        assert [past.number for past in resumed.meta.history] == [1, 2]
        assert resumed.meta.context == {"user": "u1"}
        assert (await rig.event_types(claim.job_id))[-3:] == ["task.suspended", "task.resumed", "task.claimed"]

    async def test_a_task_can_request_approval_during_its_run(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Hold("send 4,000 messages?"))
        assert await rig.claim_due() == []
        requested = (await rig.events(claim.job_id))[-1]
        assert (requested.type, requested.message) == ("approval.requested", "send 4,000 messages?")
        await rig.move(claim.job_id, State.QUEUED)
        again = await rig.claim_one()
        assert (again.job_id, again.attempt) == (claim.job_id, 2)

    async def test_every_job_has_exactly_one_final_event(self, rig: Rig) -> None:
        claims = [await rig.start_one("w1") for _ in range(len(EVERY_VERDICT))]
        for claim, verdict in zip(claims, EVERY_VERDICT, strict=True):
            await rig.settle(claim, verdict)
        for claim in claims:
            if await rig.state(claim.job_id) in (State.SUSPENDED, State.WAITING_APPROVAL):
                await rig.move(claim.job_id, State.QUEUED)
        await rig.harness.advance(60_001)
        rest = await rig.claim_due("w2")
        assert len(rest) == 4
        await rig.succeed(*rest, *claims)
        history = check_history(await rig.events(), ended=True)
        assert {past.state for past in history.histories.values()} <= FINAL
        assert await rig.open_jobs() == 0
        assert sorted(ids(claims)) == sorted(history.histories)
