"""Engine contract for claims: leases, renewal, reclaim, poison pills (S6, Q4–Q9, Y5)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast.core.job import Claim, Lease
from holdfast.core.states import State
from holdfast.core.verdict import POISON_PILL, Release, RetryLater, SettleResult, Verdict
from holdfast.engine.port.jobs import EXPIRY_BATCH, RetryVia
from holdfast.engine.port.operators import QueueControl
from holdfast.testing.contract.harness import (
    EVERY_VERDICT,
    FAILURE,
    LONG_WAIT_MS,
    OTHER_QUEUE,
    QUEUE,
    Contract,
    EngineHarness,
    Rig,
    both_modes,
    granted,
    ids,
    lost_leases,
    soon,
)


class LeaseContract(Contract):
    """Guarantees of `claim`, `recover_claims`, `renew`, `reclaim` and `deregister_worker`."""

    # Claiming --------------------------------------------------------------------------------------

    async def test_a_claim_is_a_lease(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        claim = await rig.claim_one("w1")
        assert claim.job_id == job_id
        assert (claim.attempt, claim.lease.deliveries, claim.lease.worker) == (1, 1, "w1")
        assert claim.claimed_at_ms >= claim.created_at_ms > 0
        view = await rig.view(job_id)
        assert (view.state, view.attempt, view.worker) == (State.RUNNING, 1, "w1")

    async def test_no_two_workers_get_the_same_job(self, rig: Rig) -> None:
        submitted = await rig.submit(20)
        claims = await asyncio.gather(*(rig.claim(f"w{n}", 5) for n in range(6)))
        assert sorted(ids(claim for batch in claims for claim in batch)) == sorted(submitted)

    async def test_a_claim_takes_no_more_than_its_limit(self, rig: Rig) -> None:
        await rig.submit(5)
        assert len(await rig.claim(limit=2)) == 2
        assert await rig.claim(limit=0) == []
        assert await rig.claim(limit=-1) == []
        assert len(await rig.claim(limit=10)) == 3

    async def test_a_claim_from_an_unknown_queue_returns_nothing(self, rig: Rig) -> None:
        assert await rig.engine.claim("w1", ["never-used"], 10, 0) == []
        assert await rig.engine.claim("w1", [], 10, 0) == []

    async def test_a_claim_serves_several_queues(self, rig: Rig) -> None:
        here, there = await rig.submit_one(), await rig.submit_one(queue=OTHER_QUEUE)
        claims = await rig.engine.claim("w1", [rig.queue, OTHER_QUEUE], 10, 0)
        assert {claim.queue: claim.job_id for claim in claims} == {rig.queue: here, OTHER_QUEUE: there}
        assert await rig.succeed(*claims) == [SettleResult.APPLIED] * 2

    async def test_an_idle_worker_is_woken_by_a_submission(self, rig: Rig) -> None:
        waiting = asyncio.create_task(rig.engine.claim("w1", [rig.queue], 10, LONG_WAIT_MS))
        job_id = await rig.submit_one()
        assert ids(await soon(waiting)) == [job_id]

    async def test_an_idle_worker_is_woken_by_a_promotion(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=60_000)
        await rig.harness.advance(60_001)
        waiting = asyncio.create_task(rig.engine.claim("w1", [rig.queue], 10, LONG_WAIT_MS))
        await rig.promote()
        assert ids(await soon(waiting)) == [job_id]

    async def test_an_idle_worker_is_woken_when_a_queue_is_resumed(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))
        job_id = await rig.submit_one()
        assert await rig.claim() == []

        async def claim() -> list[Claim]:
            # The pause itself may end one wait.
            while not (claims := await rig.engine.claim("w1", [rig.queue], 10, LONG_WAIT_MS)):
                pass
            return claims

        waiting = asyncio.create_task(claim())
        await rig.engine.set_control(rig.queue, QueueControl())
        assert ids(await soon(waiting)) == [job_id]

    async def test_a_job_submitted_after_the_queue_was_emptied_ends_the_next_wait(self, rig: Rig) -> None:
        for _ in range(3):
            job_id = await rig.submit_one()
            (claim,) = await soon(rig.engine.claim("w1", [rig.queue], 10, LONG_WAIT_MS))
            assert claim.job_id == job_id
            await rig.succeed(claim)

    async def test_a_blocking_claim_times_out(self, rig: Rig) -> None:
        assert await soon(rig.engine.claim("w1", [rig.queue], 10, 20)) == []

    async def test_a_paused_queue_yields_no_claims_and_others_continue(self, rig: Rig) -> None:
        await rig.submit_one()
        there = await rig.submit_one(queue=OTHER_QUEUE)
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))
        assert ids(await rig.engine.claim("w1", [rig.queue, OTHER_QUEUE], 10, 0)) == [there]

    async def test_jobs_in_flight_can_finish_in_a_paused_queue(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))
        assert await rig.engine.renew([claim.lease]) == []
        assert await rig.succeed(claim) == [SettleResult.APPLIED]

    # After a lost reply ----------------------------------------------------------------------------

    async def test_recover_claims_returns_the_claims_of_a_lost_reply(self, rig: Rig) -> None:
        await rig.submit(3)
        lost = await rig.claim("w1", 2)
        recovered = await rig.engine.recover_claims("w1", [rig.queue], ())
        assert granted(recovered) == granted(lost)
        assert await rig.succeed(*recovered) == [SettleResult.APPLIED] * 2
        assert [event.type for event in await rig.events()].count("task.claimed") == 2

    async def test_recover_claims_omits_leases_the_worker_already_has(self, rig: Rig) -> None:
        await rig.submit(3)
        known, lost = [await rig.claim_one("w1") for _ in range(2)]
        assert ids(await rig.engine.recover_claims("w1", [rig.queue], {known.lease})) == [lost.job_id]
        assert await rig.engine.recover_claims("w1", [rig.queue], {known.lease, lost.lease}) == []

    @both_modes
    async def test_recover_claims_returns_only_leases_of_this_worker(self, rig: Rig) -> None:
        await rig.start_one("w2")
        ended, retrying, cancelled = [await rig.start_one("w1") for _ in range(3)]
        await rig.succeed(ended)
        await rig.settle(retrying, RetryLater(0, FAILURE))
        await rig.move(cancelled.job_id, State.CANCELLED)
        assert await rig.engine.recover_claims("w1", [rig.queue], ()) == []
        assert await rig.engine.recover_claims("unknown", [rig.queue], ()) == []

    async def test_recover_claims_returns_the_claims_of_a_lost_reclaim_reply(self, rig: Rig) -> None:
        await rig.start_one("w1")
        await rig.lose_leases()
        lost = await rig.reclaim_one("w2")
        assert granted(await rig.engine.recover_claims("w2", [rig.queue], ())) == granted([lost])

    # Renewing --------------------------------------------------------------------------------------

    async def test_a_renewed_lease_is_kept(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        for _ in range(4):
            await rig.harness.advance(rig.engine.options.visibility_timeout_ms // 2)
            assert await rig.engine.renew([claim.lease]) == []
            assert await rig.reclaim("w2") == []
        assert await rig.succeed(claim) == [SettleResult.APPLIED]
        assert await rig.event_types(claim.job_id) == ["task.created", "task.claimed", "task.succeeded"]

    async def test_renew_returns_the_lost_leases(self, rig: Rig) -> None:
        reclaimed = await rig.start_one("w1")
        await rig.lose_leases()
        await rig.reclaim_one("w2")
        kept, ended, cancelled = [await rig.start_one("w1") for _ in range(3)]
        await rig.succeed(ended)
        await rig.move(cancelled.job_id, State.CANCELLED)
        never = Lease(rig.queue, kept.job_id, kept.lease.position, kept.lease.deliveries + 1, "w1")
        leases = [claim.lease for claim in (reclaimed, kept, ended, cancelled)] + [never]
        assert await rig.engine.renew(leases) == [reclaimed.lease, ended.lease, cancelled.lease, never]

    async def test_renewing_a_lost_lease_does_not_extend_the_new_one(self, rig: Rig) -> None:
        visibility_ms = rig.engine.options.visibility_timeout_ms
        old = await rig.start_one("w1")
        await rig.lose_leases()
        await rig.reclaim_one("w2")
        await rig.harness.advance(visibility_ms - 5_000)
        assert await rig.engine.renew([old.lease]) == [old.lease]
        await rig.harness.advance(5_001)
        assert ids(await rig.reclaim("w3")) == [old.job_id]

    async def test_renewing_no_leases_returns_nothing(self, rig: Rig) -> None:
        assert await rig.engine.renew([]) == []

    async def test_an_expired_lease_is_valid_until_it_is_reclaimed(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.lose_leases()
        assert await rig.engine.renew([claim.lease]) == []
        assert await rig.reclaim("w2") == []
        await rig.lose_leases()
        assert await rig.succeed(claim) == [SettleResult.APPLIED]

    # Reclaiming ------------------------------------------------------------------------------------

    async def test_a_lease_is_not_reclaimed_before_it_expires(self, rig: Rig) -> None:
        await rig.start_one("w1")
        assert await rig.reclaim() == []
        await rig.harness.advance(rig.engine.options.visibility_timeout_ms - 5_000)
        assert await rig.reclaim() == []

    async def test_a_reclaim_is_a_new_attempt_with_its_own_event(self, rig: Rig) -> None:
        old = await rig.start_one("w1", payload=b'{"n":9}')
        await rig.lose_leases()
        new = await rig.reclaim_one("w2")
        assert (new.job_id, new.payload, new.attempt, new.lease.worker) == (old.job_id, b'{"n":9}', 2, "w2")
        assert new.lease.token != old.lease.token
        view = await rig.view(old.job_id)
        assert (view.state, view.attempt, view.worker) == (State.RUNNING, 2, "w2")
        assert await rig.succeed(new) == [SettleResult.APPLIED]

        reclaimed = (await rig.events(old.job_id))[2]
        assert (reclaimed.type, reclaimed.from_state, reclaimed.to_state) == ("task.reclaimed", "running", "running")
        assert (reclaimed.attempt, reclaimed.worker) == (2, "w2")
        assert (reclaimed.data or {})["old_worker"] == "w1"
        assert (reclaimed.data or {})["message_id"]
        assert await rig.event_types(old.job_id) == ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"]

    async def test_reclaim_takes_no_more_than_its_limit(self, rig: Rig) -> None:
        submitted = await rig.submit(5)
        await rig.claim("w1")
        await rig.lose_leases()
        batches = [await rig.reclaim("w2", limit) for limit in (2, 2, 2, 2)]
        assert [len(claims) for claims in batches] == [2, 2, 1, 0]
        assert sorted(ids(claim for claims in batches for claim in claims)) == sorted(submitted)
        assert await rig.reclaim("w3", 0) == []

    async def test_two_reclaimers_do_not_share_a_job(self, rig: Rig) -> None:
        submitted = await rig.submit(10)
        await rig.claim("w1")
        await rig.lose_leases()
        one, two = await asyncio.gather(rig.reclaim("w2"), rig.reclaim("w3"))
        assert sorted(ids(one) + ids(two)) == sorted(submitted)

    @pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=lambda verdict: type(verdict).__name__)
    async def test_a_stale_lease_changes_nothing(self, rig: Rig, verdict: Verdict) -> None:
        old = await rig.start_one("w1")
        await rig.lose_leases()
        new = await rig.reclaim_one("w2")
        before = await rig.view(old.job_id), await rig.events()

        assert await rig.settle(old, verdict) is SettleResult.STALE

        assert (await rig.view(old.job_id), await rig.events()) == before
        assert rig.engine.counters.stale_settles == 1
        assert await rig.settle(new, verdict) is SettleResult.APPLIED

    @pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=lambda verdict: type(verdict).__name__)
    async def test_a_worker_cannot_settle_its_second_attempt_with_its_first_lease(
        self, rig: Rig, verdict: Verdict
    ) -> None:
        first = await rig.start_one("w1")
        await rig.lose_leases()
        second = await rig.reclaim_one("w1")
        assert second.lease.worker == first.lease.worker
        assert await rig.engine.renew([first.lease]) == [first.lease]
        assert await rig.settle(first, verdict) is SettleResult.STALE
        assert await rig.state(first.job_id) is State.RUNNING
        assert await rig.settle(second, verdict) is SettleResult.APPLIED

    async def test_two_attempts_in_one_batch_are_distinguished(self, rig: Rig) -> None:
        for newest_first in (True, False):
            first = await rig.start_one("w1")
            await rig.lose_leases()
            second = await rig.reclaim_one("w1")
            claims = [second, first] if newest_first else [first, second]
            results = [SettleResult.APPLIED, SettleResult.STALE]
            assert await rig.succeed(*claims) == (results if newest_first else results[::-1])

    async def test_a_lease_is_invalid_for_another_worker(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        stolen = msgspec.structs.replace(claim, lease=msgspec.structs.replace(claim.lease, worker="w2"))
        assert await rig.engine.renew([stolen.lease]) == [stolen.lease]
        assert await rig.succeed(stolen) == [SettleResult.STALE]
        assert await rig.succeed(claim) == [SettleResult.APPLIED]

    # Poison pills ----------------------------------------------------------------------------------

    async def test_a_job_that_kills_its_workers_is_a_poison_pill(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=3)
        claim = await rig.start_one("w0")
        assert not claim.is_suspect
        for number, worker in enumerate(("w1", "w2", "w3")):
            await rig.lose_leases()
            again = await rig.reclaim_one(worker)
            # The first loss does not count: other jobs may have run at that time.
            assert (again.is_suspect, again.lost_alone, again.meta.retry_count) == (True, number, 0)
        await rig.lose_leases()
        assert await rig.reclaim("w4") == []
        view = await rig.view(claim.job_id)
        assert view.state is State.FAILED
        assert view.failure is not None
        assert view.failure.code == POISON_PILL
        assert rig.engine.counters.poisoned == 1
        assert (await rig.event_types(claim.job_id))[-3:] == ["task.dlq_pending", "task.dlq", "task.failed"]
        assert await rig.claim_due() == []

    async def test_a_poison_pill_waits_for_the_ledger(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1, ledger=True)
        claim = await rig.start_one()
        await rig.poison()
        assert await rig.state(claim.job_id) is State.DLQ_PENDING

    @both_modes
    async def test_retries_do_not_count_as_lost_leases(self, harness: EngineHarness, mode: RetryVia) -> None:
        rig = await Rig.on(harness, max_deliveries=2, retry_via={QUEUE: mode})
        claim = await rig.start_one()
        for retry_count in range(1, 6):
            assert await rig.settle(claim, RetryLater(1_000, FAILURE)) is SettleResult.APPLIED
            await harness.advance(1_001)
            (claim,) = await rig.claim_due()
            assert (claim.meta.retry_count, claim.attempt) == (retry_count, retry_count + 1)

    @both_modes
    @pytest.mark.parametrize("between", [RetryLater(0, FAILURE), Release("draining")], ids=["retry", "release"])
    async def test_an_attempt_that_ends_clears_a_job(
        self, harness: EngineHarness, mode: RetryVia, between: Verdict
    ) -> None:
        rig = await Rig.on(harness, max_deliveries=1, retry_via={QUEUE: mode})
        job_id = (await rig.start_one("w0")).job_id
        for number in range(1, 4):
            await rig.lose_leases()
            again = await rig.reclaim_one("w1")
            assert again.is_suspect
            assert await rig.settle(again, between) is SettleResult.APPLIED
            await harness.advance(1)
            (claim,) = await rig.claim_due("w2")
            assert (claim.job_id, claim.is_suspect, lost_leases(claim)) == (job_id, False, number)
        await rig.poison()
        assert await rig.state(job_id) is State.FAILED

    # A choice of leases ------------------------------------------------------------------------------

    async def test_only_the_chosen_leases_are_reclaimed(self, rig: Rig) -> None:
        claims = await rig.start(5, "w1")
        await rig.lose_leases()
        offered: list[Lease] = []

        def only(lease: Lease) -> bool:
            offered.append(lease)
            return lease.job_id == claims[3].job_id

        found = await rig.engine.reclaim("w2", [rig.queue], 1, only)
        assert ids(found) == [claims[3].job_id]
        assert {(lease.job_id, lease.worker, lease.deliveries) for lease in offered} <= {
            (claim.job_id, "w1", 1) for claim in claims
        }
        assert await rig.engine.reclaim("w2", [rig.queue], 5, lambda lease: False) == []
        others = {claim.job_id for claim in claims} - {claims[3].job_id}
        assert set(ids(await rig.engine.reclaim("w3", [rig.queue], 5, lambda lease: True))) == others

    @both_modes
    async def test_retries_are_reclaimed_up_to_their_limit(self, harness: EngineHarness, mode: RetryVia) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: mode})
        for claim in await rig.start(3, "w1"):
            await rig.settle(claim, RetryLater(0, FAILURE))
        (lost,) = await rig.start(1, "w1")
        await rig.lose_leases()
        pending = 3 if mode is RetryVia.PENDING else 0
        assert ids(await rig.engine.reclaim("w2", [rig.queue], 10, lambda lease: False, 0)) == []
        assert len(await rig.engine.reclaim("w2", [rig.queue], 10, lambda lease: False, 2)) == min(pending, 2)
        found = await rig.engine.reclaim("w2", [rig.queue], 10, lambda lease: True, 0)
        assert lost.job_id in ids(found)

    # Certain death -----------------------------------------------------------------------------------

    async def test_leases_of_a_worker_that_has_ended_expire_at_once(self, rig: Rig) -> None:
        of_dead = await rig.start(3, "w1")
        (of_living,) = await rig.start(1, "w2")
        assert await rig.reclaim("w3") == []
        assert await rig.engine.expire_leases("w1", [rig.queue, "never-used"]) == 3
        assert await rig.engine.expire_leases("w1", [rig.queue]) == 0
        found = await rig.reclaim("w3")
        assert set(ids(found)) == {claim.job_id for claim in of_dead}
        assert {claim.lease.deliveries for claim in found} == {2}
        assert await rig.engine.expire_leases("w9", [rig.queue]) == 0
        assert await rig.succeed(of_living) == [SettleResult.APPLIED]

    async def test_leases_of_a_worker_that_has_ended_expire_in_steps(self, rig: Rig) -> None:
        for count in (EXPIRY_BATCH, 1):
            await rig.start(count, "w1")
        assert [await rig.engine.expire_leases("w1", [rig.queue]) for _ in range(3)] == [EXPIRY_BATCH, 1, 0]

    async def test_a_worker_that_lives_after_all_keeps_the_leases_that_it_renews(self, rig: Rig) -> None:
        kept, other = await rig.start(2, "w1")
        assert await rig.engine.expire_leases("w1", [rig.queue]) == 2
        assert await rig.engine.renew([kept.lease]) == []
        assert ids(await rig.reclaim("w2")) == [other.job_id]
        assert await rig.succeed(kept, other) == [SettleResult.APPLIED, SettleResult.STALE]

    # After an outage ---------------------------------------------------------------------------------

    async def test_losses_in_an_outage_that_a_worker_survived_do_not_count(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        lost, kept = await rig.start_one("w1"), await rig.start_one("w2")
        for attempt in range(2, 6):
            # Longer than a lease: a process that reached the engine would have reclaimed it.
            await harness.advance(2 * rig.engine.options.visibility_timeout_ms)
            assert await rig.engine.renew([kept.lease]) == []
            assert await rig.reclaim("w3") == []
            lost = await rig.claim_one("w1")
            assert (lost.is_suspect, lost.attempt) == (False, attempt)
        assert rig.engine.counters.poisoned == 0
        assert await rig.succeed(kept, lost) == [SettleResult.APPLIED] * 2

    async def test_a_lease_after_an_outage_losses_count_again(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        pill, kept = await rig.start_one("w1"), await rig.start_one("w2")
        await harness.advance(2 * rig.engine.options.visibility_timeout_ms)
        assert await rig.engine.renew([pill.lease, kept.lease]) == []
        await rig.succeed(kept)
        # It is lost again, without an outage.
        await rig.poison()
        assert await rig.state(pill.job_id) is State.FAILED

    async def test_a_partition_of_one_worker_is_not_an_outage(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        apart, pill = await rig.start_one("w1"), await rig.start_one("w2")
        for _ in range(2):
            await rig.lose_leases()
            # Another process reaches the engine.
            found = await rig.reclaim("w3")
            await harness.advance(rig.engine.options.visibility_timeout_ms // 2)
            assert await rig.engine.renew([apart.lease]) == [apart.lease]
            await rig.succeed(*(claim for claim in found if claim.job_id == apart.job_id))
        assert await rig.state(pill.job_id) is State.FAILED

    async def test_leases_of_a_worker_that_has_ended_count_in_an_outage(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        of_dead, kept = await rig.start_one("w1"), await rig.start_one("w2")
        await harness.advance(2 * rig.engine.options.visibility_timeout_ms)
        await rig.engine.expire_leases("w1", [rig.queue])
        assert await rig.engine.renew([kept.lease]) == []
        assert (await rig.reclaim_one("w3")).is_suspect
        assert await rig.succeed(of_dead) == [SettleResult.STALE]

    async def test_a_reclaim_waits_after_the_start(self, harness: EngineHarness) -> None:
        """A process that has just started does not know of an outage; leases of ended workers do not wait."""
        rig = await Rig.on(harness, settle_ms=60_000)
        of_dead, other = await rig.start_one("w1"), await rig.start_one("w2")
        await rig.lose_leases()
        assert await rig.reclaim("w3") == []
        assert rig.engine.is_settling([rig.queue])
        await rig.engine.expire_leases("w1", [rig.queue])
        assert ids(await rig.reclaim("w3")) == [of_dead.job_id]
        assert await rig.succeed(other) == [SettleResult.APPLIED]

    async def test_a_process_started_by_one_that_has_waited_does_not_wait(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, settle_ms=60_000)
        claim = await rig.start_one("w1")
        await rig.lose_leases()
        rig.engine.skip_first_wait()
        assert ids(await rig.reclaim("w3")) == [claim.job_id]
        assert not rig.engine.is_settling([rig.queue])

    # Deregistering ---------------------------------------------------------------------------------

    async def test_a_deregistered_worker_is_no_longer_counted(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        assert (await rig.engine.stats(rig.queue)).workers == 1
        await rig.succeed(claim)
        await rig.engine.deregister_worker("w1", [rig.queue])
        assert (await rig.engine.stats(rig.queue)).workers == 0
        await rig.engine.deregister_worker("w1", [rig.queue, "never-used"])

    async def test_deregistering_a_worker_with_leases_loses_no_job(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.engine.deregister_worker("w1", [rig.queue])
        await rig.lose_leases()
        assert ids(await rig.reclaim("w2")) == [claim.job_id]
