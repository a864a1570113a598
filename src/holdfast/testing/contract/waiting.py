"""Waiting for a retry, in a set by due time or in the pending list (Y3–Y5, Y8, Q14)."""

from __future__ import annotations

from holdfast.core.states import State
from holdfast.core.verdict import Answer, RetryLater
from holdfast.engine.port import Engine, RetryVia
from holdfast.testing.contract.harness import FAILURE, QUEUE, Contract, EngineHarness, Rig, both_modes, ids, lost_leases
from holdfast.testing.history import check_history


class WaitingContract(Contract):
    """The same promises in both modes."""

    @both_modes
    async def test_a_retry_waits_and_runs_again(self, rig: Rig) -> None:
        claim = await rig.start_one("w1", payload=b'{"n":5}', tenant_id="acme", trace_id="t")
        assert await rig.settle(claim, RetryLater(5_000, FAILURE)) is Answer.APPLIED
        view = await rig.view(claim.job_id)
        assert (view.state, view.attempt, view.meta.retry_count) == (State.RETRYING, 1, 1)
        assert view.failure == FAILURE
        assert 0 < view.next_attempt_at_ms - await rig.engine.now_ms() <= 5_000
        assert await rig.claim_due("w2") == []

        await rig.harness.advance(5_001)
        (again,) = await rig.claim_due("w2")
        assert (again.job_id, again.attempt, again.meta.retry_count) == (claim.job_id, 2, 1)
        assert (again.payload, again.tenant_id, again.trace_id) == (b'{"n":5}', "acme", "t")
        assert again.lease.worker == "w2"
        assert (await rig.view(claim.job_id)).state is State.RUNNING
        assert await rig.succeed(again) == [Answer.APPLIED]
        assert await rig.story(claim.job_id) == [
            "task.created",
            "task.claimed",
            "task.retrying",
            "task.claimed",
            "task.succeeded",
        ]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_due_early_with_a_long_lease_runs_when_due(self, harness: EngineHarness, mode: RetryVia) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: mode}, visibility_timeout_ms=300_000)
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(2_000, FAILURE))
        await harness.advance(2_001)
        assert ids(await rig.claim_due()) == [claim.job_id]

    @both_modes
    async def test_due_late_with_a_short_lease_waits(self, harness: EngineHarness, mode: RetryVia) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: mode}, visibility_timeout_ms=1_000)
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        for _ in range(5):
            await harness.advance(10_000)
            assert await rig.claim_due() == []
        assert await rig.state(claim.job_id) is State.RETRYING
        await harness.advance(10_001)
        (again,) = await rig.claim_due()
        assert lost_leases(again) == 0

    @both_modes
    async def test_a_retry_without_delay_is_due_at_once(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(0, FAILURE))
        await rig.harness.advance(1)
        assert ids(await rig.claim_due()) == [claim.job_id]

    @both_modes
    async def test_a_due_retry_is_taken_once(self, rig: Rig) -> None:
        submitted = await rig.submit(5)
        claims = await rig.claim()
        for claim in claims:
            await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        first, second = await rig.claim_due("w2"), await rig.claim_due("w3")
        assert sorted(ids(first)) == sorted(submitted)
        assert second == []

    @both_modes
    async def test_a_retry_whose_worker_dies_is_taken_over(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        assert len(await rig.claim_due("w2")) == 1
        await rig.lose_leases()
        again = await rig.reclaim_one("w3")
        assert (again.attempt, again.meta.retry_count) == (3, 1)
        assert await rig.succeed(again) == [Answer.APPLIED]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_the_old_lease_is_worth_nothing_while_the_job_waits(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        assert await rig.engine.renew([claim.lease]) == [claim.lease]
        assert await rig.succeed(claim) != [Answer.APPLIED]
        assert await rig.engine.resume("w1", [rig.queue], ()) == []
        assert await rig.state(claim.job_id) is State.RETRYING

    @both_modes
    async def test_waiting_out_an_outage_uses_up_no_retry(self, rig: Rig) -> None:
        claim = await rig.start_one()
        for count in range(1, 4):
            await rig.settle(claim, RetryLater(1_000, FAILURE, counts=False))
            await rig.harness.advance(1_001)
            (claim,) = await rig.claim_due()
            assert (claim.meta.retry_count, claim.meta.unavailable_count, claim.attempt) == (0, count, count + 1)
        check_history(await rig.events())

    @both_modes
    async def test_a_waiting_job_can_be_cancelled(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        assert await rig.move(claim.job_id, State.CANCELLED) is State.RETRYING
        await rig.harness.advance(100_000)
        assert await rig.claim_due() == []
        assert await rig.open_jobs() == 0
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_a_waiting_job_can_be_parked_and_resumed(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        assert await rig.move(claim.job_id, State.SUSPENDED) is State.RETRYING
        await rig.harness.advance(100_000)
        assert await rig.claim_due() == []
        await rig.move(claim.job_id, State.QUEUED)
        (again,) = await rig.claim_due()
        assert (again.job_id, again.attempt) == (claim.job_id, 2)
        assert await rig.succeed(again) == [Answer.APPLIED]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_nobody_is_counted_as_a_worker_for_waiting(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        await rig.engine.leave("w1", [rig.queue])
        stats = await rig.engine.stats(rig.queue)
        assert (stats.workers, stats.states.get(State.RETRYING), stats.states.get(State.RUNNING, 0)) == (0, 1, 0)

    async def test_a_retry_rests_in_the_pending_list_at_least_so_long(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: RetryVia.PENDING}, pending_idle_ms=20_000)
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(0, FAILURE))
        await harness.advance(10_000)
        assert await rig.claim_due() == []
        await harness.advance(10_001)
        assert ids(await rig.claim_due()) == [claim.job_id]

    async def test_modes_are_chosen_per_queue(self, harness: EngineHarness) -> None:
        engine: Engine = await harness.make(retry_via={QUEUE: RetryVia.PENDING})
        for rig in (Rig(harness, engine), Rig(harness, engine, "letters")):
            claim = await rig.start_one()
            await rig.settle(claim, RetryLater(1_000, FAILURE))
            await harness.advance(1_001)
            assert ids(await rig.claim_due()) == [claim.job_id]
