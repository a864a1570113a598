"""Engine contract for retries and for running a job early.

`RetryContract`: a retry waits in a set by due time or in the pending list, with the same guarantees (Y3–Y5, Y8, Q14).
`ExpediteContract`: `expedite` makes a waiting job due, `claim_job` claims one given job out of order (H1, H3).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Claim
from holdfast.core.states import EXPEDITED_EVENT, State
from holdfast.core.verdict import RetryLater, SettleResult, Suspend
from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.testing.contract.approvals import audit_fields
from holdfast.testing.contract.harness import FAILURE, QUEUE, Contract, EngineHarness, Rig, both_modes, ids, lost_leases


class RetryContract(Contract):
    """Guarantees for retries, the same in both modes."""

    @both_modes
    async def test_a_retry_waits_and_runs_again(self, rig: Rig) -> None:
        claim = await rig.start_one("w1", payload=b'{"n":5}', tenant_id="acme", trace_id="t")
        assert await rig.settle(claim, RetryLater(5_000, FAILURE)) is SettleResult.APPLIED
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
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        assert await rig.event_types(claim.job_id) == [
            "task.created",
            "task.claimed",
            "task.retrying",
            "task.claimed",
            "task.succeeded",
        ]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_a_retry_shorter_than_the_lease_runs_when_due(self, harness: EngineHarness, mode: RetryVia) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: mode}, visibility_timeout_ms=300_000)
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(2_000, FAILURE))
        await harness.advance(2_001)
        assert ids(await rig.claim_due()) == [claim.job_id]

    @both_modes
    async def test_a_retry_longer_than_the_lease_waits_until_due(self, harness: EngineHarness, mode: RetryVia) -> None:
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
    async def test_a_due_retry_is_claimed_once(self, rig: Rig) -> None:
        submitted = await rig.submit(5)
        claims = await rig.claim()
        for claim in claims:
            await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        first, second = await rig.claim_due("w2"), await rig.claim_due("w3")
        assert sorted(ids(first)) == sorted(submitted)
        assert second == []

    @both_modes
    async def test_a_retry_is_reclaimed_when_its_worker_dies(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        assert len(await rig.claim_due("w2")) == 1
        await rig.lose_leases()
        again = await rig.reclaim_one("w3")
        assert (again.attempt, again.meta.retry_count) == (3, 1)
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_the_old_lease_is_invalid_while_a_retry_waits(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        assert await rig.engine.renew([claim.lease]) == [claim.lease]
        assert await rig.succeed(claim) != [SettleResult.APPLIED]
        assert await rig.engine.recover_claims("w1", [rig.queue], ()) == []
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
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        check_history(await rig.events(), ended=True)

    @both_modes
    async def test_a_waiting_retry_does_not_count_as_a_worker(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(60_000, FAILURE))
        await rig.engine.deregister_worker("w1", [rig.queue])
        stats = await rig.engine.stats(rig.queue)
        assert (stats.workers, stats.states.get(State.RETRYING), stats.states.get(State.RUNNING, 0)) == (0, 1, 0)

    async def test_a_retry_stays_in_the_pending_list_for_at_least_pending_idle_ms(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: RetryVia.PENDING}, pending_idle_ms=20_000)
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(0, FAILURE))
        await harness.advance(10_000)
        assert await rig.claim_due() == []
        await harness.advance(10_001)
        assert ids(await rig.claim_due()) == [claim.job_id]

    async def test_modes_are_chosen_per_queue(self, harness: EngineHarness) -> None:
        engine: Engine = await harness.make(retry_via={QUEUE: RetryVia.PENDING})
        for rig in (Rig(harness, engine), Rig(harness, engine, "emails")):
            claim = await rig.start_one()
            await rig.settle(claim, RetryLater(1_000, FAILURE))
            await harness.advance(1_001)
            assert ids(await rig.claim_due()) == [claim.job_id]


MINUTE_MS: Final = 60_000


class ExpediteContract(Contract):
    """Guarantees of `expedite` and `claim_job`."""

    # Expediting ------------------------------------------------------------------------------------

    async def test_a_delayed_job_can_be_expedited(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS, tenant_id="acme")
        await self._expedite(rig, job_id, audit="operator.retry")
        assert ids(await rig.claim_due()) == [job_id]
        created, expedited, logged, claimed = await rig.events(job_id)
        if expedited.type != EXPEDITED_EVENT:
            expedited, logged = logged, expedited
        assert (expedited.type, expedited.from_state, expedited.to_state) == (EXPEDITED_EVENT, None, None)
        assert ((expedited.data or {})["actor"], (expedited.data or {})["reason"]) == ("ann", "now")
        assert (logged.type, logged.job_id, logged.tenant_id) == ("operator.retry", job_id, "acme")
        actor, reason, *_, target, target_id = audit_fields(logged)
        assert (actor, reason, target, target_id) == ("ann", "now", "job", job_id)
        assert (created.type, claimed.type) == ("task.created", "task.claimed")
        assert claimed.attempt == 1

    @both_modes
    async def test_a_retry_can_be_expedited(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        await self._expedite(rig, claim.job_id)
        (again,) = await rig.claim_due()
        assert (again.job_id, again.attempt, again.meta.retry_count) == (claim.job_id, 2, 1)
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        assert await rig.event_types(claim.job_id) == [
            "task.created",
            "task.claimed",
            "task.retrying",
            EXPEDITED_EVENT,
            "task.claimed",
            "task.succeeded",
        ]
        check_history(await rig.events(), ended=True)

    async def test_an_expedited_job_stays_due(self, rig: Rig) -> None:
        """Parking and resuming it does not bring its old due time back."""
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        await self._expedite(rig, job_id)
        await rig.move(job_id, State.SUSPENDED)
        await rig.move(job_id, State.QUEUED)
        assert ids(await rig.claim_due()) == [job_id]

    async def test_a_job_claimed_early_does_not_wait_for_its_delay_again(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        claim = await rig.engine.claim_job("w", rig.queue, job_id)
        await rig.settle(claim, Suspend(FAILURE))
        await rig.move(job_id, State.QUEUED)
        assert ids(await rig.claim()) == [job_id]

    async def test_expediting_twice_has_the_effect_of_once(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        await self._expedite(rig, job_id)
        # It may be ready by now, and a ready job cannot be expedited.
        with suppress(TransitionInvalid):
            await self._expedite(rig, job_id)
        assert ids(await rig.claim_due()) == [job_id]
        assert await rig.claim_due() == []

    @pytest.mark.parametrize("state", [state for state in State if state is not State.RETRYING])
    async def test_a_job_that_is_not_delayed_cannot_be_expedited(self, harness: EngineHarness, state: State) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id, _ = await rig.put_in(state)
        before, refused = await rig.entries(), rig.engine.counters.illegal_moves
        with pytest.raises(TransitionInvalid) as error:
            await self._expedite(rig, job_id, audit="operator.retry")
        assert (error.value.from_state, error.value.to_state) == (state, State.RUNNING)
        assert rig.engine.counters.illegal_moves == refused + 1
        assert await rig.entries() == before

    async def test_an_unknown_job_cannot_be_expedited_or_claimed(self, rig: Rig) -> None:
        await rig.submit_one()
        with pytest.raises(UnknownJob):
            await self._expedite(rig, "never-submitted")
        with pytest.raises(UnknownJob):
            await rig.engine.claim_job("w1", rig.queue, "never-submitted")

    # Claiming one job ------------------------------------------------------------------------------

    async def test_claim_job_claims_a_ready_job_out_of_order(self, rig: Rig) -> None:
        one, two, three = await rig.submit(3, tenant_id="acme", payload=b'{"n":2}')
        claim = await rig.engine.claim_job("w9", rig.queue, two)
        assert (claim.job_id, claim.attempt, claim.lease.worker) == (two, 1, "w9")
        assert (claim.tenant_id, claim.payload, claim.task) == ("acme", b'{"n":2}', "print")
        assert await rig.state(two) is State.RUNNING
        assert ids(await rig.claim()) == [one, three]
        assert await rig.succeed(claim) == [SettleResult.APPLIED]
        assert await rig.event_types(two) == ["task.created", "task.claimed", "task.succeeded"]
        assert (await rig.view(two)).result == b"7"
        check_history(await rig.events())

    async def test_claim_job_claims_a_delayed_job(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        claim = await rig.engine.claim_job("w9", rig.queue, job_id)
        await rig.harness.advance(MINUTE_MS + 1)
        # After its lease has expired it is claimed once: by reclaim, and not as a due job as well.
        assert ids(await rig.claim_due()) == [job_id]
        assert await rig.succeed(claim) == [SettleResult.STALE]
        check_history(await rig.events())

    @both_modes
    async def test_claim_job_claims_a_retry(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        again = await rig.engine.claim_job("w9", rig.queue, claim.job_id)
        assert (again.attempt, again.meta.retry_count, len(again.meta.history)) == (2, 1, 1)
        assert await rig.claim_due() == []
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        await rig.harness.advance(MINUTE_MS + 1)
        assert await rig.claim_due() == []
        check_history(await rig.events(), ended=True)

    async def test_claim_job_claims_a_promoted_retry(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        await rig.promote()
        again = await rig.engine.claim_job("w9", rig.queue, claim.job_id)
        assert again.attempt == 2
        assert await rig.claim_due() == []

    async def test_claim_job_grants_an_ordinary_lease(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        claim = await rig.engine.claim_job("w9", rig.queue, job_id)
        assert [each.lease for each in await rig.engine.recover_claims("w9", [rig.queue], ())] == [claim.lease]
        assert await rig.engine.renew([claim.lease]) == []
        await rig.lose_leases()
        again = await rig.reclaim_one("w2")
        assert (again.job_id, again.attempt, again.lease.deliveries) == (job_id, 2, 2)
        assert await rig.succeed(claim, again) == [SettleResult.STALE, SettleResult.APPLIED]
        check_history(await rig.events(), ended=True)

    async def test_a_job_claimed_by_claim_job_can_be_retried(self, rig: Rig) -> None:
        claim = await rig.engine.claim_job("w9", rig.queue, await rig.submit_one())
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        (again,) = await rig.claim_due()
        assert (again.attempt, again.meta.retry_count) == (2, 1)

    async def test_claim_job_uses_a_slot_of_the_tenant(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(tenants={"acme": TenantControl(concurrency=1)}))
        _, two = await rig.submit(2, tenant_id="acme")
        claim = await rig.engine.claim_job("w9", rig.queue, two)
        assert await rig.claim() == []
        await rig.succeed(claim)
        assert len(await rig.claim()) == 1

    @pytest.mark.parametrize("state", [state for state in State if state not in (State.QUEUED, State.RETRYING)])
    async def test_claim_job_refuses_jobs_that_cannot_run(self, harness: EngineHarness, state: State) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id, _ = await rig.put_in(state)
        before, refused = await rig.entries(), rig.engine.counters.illegal_moves
        with pytest.raises(TransitionInvalid) as error:
            await rig.engine.claim_job("w9", rig.queue, job_id)
        assert (error.value.from_state, error.value.to_state) == (state, State.RUNNING)
        assert rig.engine.counters.illegal_moves == refused + 1
        assert await rig.entries() == before

    async def test_claim_and_claim_job_cannot_both_win(self, rig: Rig) -> None:
        other = Rig(rig.harness, await rig.harness.make())

        async def claim_job(job_id: str) -> Claim | None:
            try:
                return await rig.engine.claim_job("w9", rig.queue, job_id)
            except TransitionInvalid:
                return None

        for _ in range(20):
            job_id = await rig.submit_one()
            claim, claims = await asyncio.gather(claim_job(job_id), other.claim("w2", 1))
            winners = [*claims, *([claim] if claim else [])]
            assert ids(winners) == [job_id]
            assert await rig.succeed(*winners) == [SettleResult.APPLIED]
        check_history(await rig.events(), ended=True)

    async def _expedite(self, rig: Rig, job_id: str, audit: str = "") -> None:
        await rig.engine.expedite(rig.queue, job_id, actor="ann", reason="now", audit=audit)
