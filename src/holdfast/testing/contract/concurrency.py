"""Engine contract for the concurrency limit of a queue: how many of its jobs run at a time, over all workers (H5)."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Claim, Priority
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, SettleResult, Succeed, Suspend, Verdict
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import ConcurrencyLimited
from holdfast.testing.contract.harness import (
    FAILURE,
    LONG_WAIT_MS,
    OTHER_QUEUE,
    QUEUE,
    Contract,
    EngineHarness,
    Rig,
    both_modes,
    ids,
    soon,
    with_priority,
)


class ConcurrencyContract(Contract):
    """At most `concurrency` jobs of a queue have a lease at any time."""

    # Never exceeded --------------------------------------------------------------------------------

    async def test_a_queues_limit_holds_across_workers_and_tenants(self, rig: Rig) -> None:
        await limit(rig, 3)
        await rig.submit(4, tenant_id="acme")
        await rig.submit(4, tenant_id="zeta")
        await rig.submit(4)
        first = await rig.claim("w1", 2)
        second = await rig.claim("w2")
        assert (len(first), len(second)) == (2, 1)
        assert await rig.claim("w3") == []
        # A slot freed on one worker can be used by any other.
        assert await rig.succeed(first[0]) == [SettleResult.APPLIED]
        assert len(await rig.claim("w3")) == 1
        assert await rig.claim("w1") == []
        assert await running(rig) == 3

    async def test_a_queues_limit_does_not_affect_other_queues(self, rig: Rig) -> None:
        await limit(rig, 1)
        await rig.submit(2)
        other = Rig(rig.harness, rig.engine, OTHER_QUEUE)
        submitted = await other.submit(3)
        claims = await rig.engine.claim("w1", [rig.queue, OTHER_QUEUE], 10, 0)
        assert Counter(claim.queue for claim in claims) == {rig.queue: 1, OTHER_QUEUE: 3}
        assert set(submitted) <= set(ids(claims))

    async def test_concurrent_claims_do_not_exceed_the_limit(self, rig: Rig) -> None:
        await limit(rig, 5)
        await rig.submit(40)
        engines = [await rig.harness.make() for _ in range(4)]
        for _ in range(3):
            found = await asyncio.gather(
                *(engine.claim(f"w{n}-{at}", [rig.queue], 3, 0) for n, engine in enumerate(engines) for at in range(3))
            )
            claims = [claim for batch in found for claim in batch]
            assert len(claims) == 5
            assert await rig.succeed(*claims) == [SettleResult.APPLIED] * 5

    async def test_a_reclaimed_job_keeps_its_slot_in_the_queue(self, rig: Rig) -> None:
        await limit(rig, 2)
        submitted = await rig.submit(4)
        late = await rig.claim("dead")
        await rig.lose_leases()
        # Until they are reclaimed, jobs of a worker that was killed count.
        assert await rig.claim("w2") == []
        claims = await rig.reclaim("w2")
        assert sorted(ids(claims)) == sorted(submitted[:2])
        assert await rig.claim("w3") == []
        assert await rig.succeed(*late) == [SettleResult.STALE] * 2
        assert await rig.claim("w3") == []
        assert await rig.succeed(claims[0]) == [SettleResult.APPLIED]
        assert ids(await rig.claim("w3")) == [submitted[2]]
        check_history(await rig.events())

    @pytest.mark.parametrize(
        "verdict",
        [
            Succeed(b"1"),
            RetryLater(60_000, FAILURE),
            DeadLetter(FAILURE),
            Suspend(FAILURE),
            Hold("is this right?"),
            Release("sleeps", 60_000, started=True),
        ],
        ids=lambda verdict: type(verdict).__name__,
    )
    @both_modes
    async def test_a_settled_attempt_frees_a_slot_of_the_queue(
        self, rig: Rig, mode: RetryVia, verdict: Verdict
    ) -> None:
        await limit(rig, 1)
        one, two, _ = await rig.submit(3)
        claim = await rig.claim_one()
        assert (claim.job_id, await rig.claim()) == (one, [])
        assert await rig.settle(claim, verdict) is SettleResult.APPLIED
        # A resent settlement frees the slot once.
        await rig.settle(claim, verdict)
        assert ids(await rig.claim()) == [two]
        assert await rig.claim() == []

    async def test_a_released_job_waits_for_a_slot_again(self, rig: Rig) -> None:
        await limit(rig, 1)
        one, two = await rig.submit(2)
        await rig.settle(await rig.claim_one(), Release("draining"))
        # Whichever comes first, the other waits.
        claim = await rig.claim_one()
        assert await rig.claim() == []
        await rig.succeed(claim)
        last = await rig.claim_one()
        assert {claim.job_id, last.job_id} == {one, two}

    @pytest.mark.parametrize("way", ["approved", "resumed"])
    async def test_a_job_that_an_operator_queues_waits_for_a_slot(self, rig: Rig, way: str) -> None:
        if way == "approved":
            job_id = await rig.submit_one(hold=True)
        else:
            suspended = await rig.start_one()
            job_id = suspended.job_id
            await rig.settle(suspended, Suspend(FAILURE))
        await limit(rig, 1)
        claim = await rig.start_one()
        await rig.move(job_id, State.QUEUED)
        assert await rig.claim("w2") == []
        await rig.succeed(claim)
        assert ids(await rig.claim("w2")) == [job_id]

    async def test_a_cancelled_run_frees_a_slot_of_the_queue(self, rig: Rig) -> None:
        await limit(rig, 1)
        one, two, _ = await rig.submit(3)
        claim = await rig.claim_one("w1")
        await rig.move(one, State.CANCELLED)
        assert ids(await rig.claim("w2")) == [two]
        assert await rig.succeed(claim) == [SettleResult.STALE]
        assert await rig.claim() == []

    async def test_a_poison_pill_frees_a_slot_of_the_queue(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        await limit(rig, 1)
        one, two = await rig.submit(2)
        assert ids(await rig.claim("w1")) == [one]
        await rig.poison()
        assert ids(await rig.claim("w2")) == [two]

    async def test_a_due_job_waits_for_a_slot_of_the_queue(self, rig: Rig) -> None:
        await limit(rig, 1)
        claim = await rig.start_one()
        late = await rig.submit_one(delay_ms=1_000)
        await rig.harness.advance(1_001)
        assert await rig.claim() == []
        await rig.promote()
        assert await rig.claim() == []
        await rig.succeed(claim)
        assert ids(await rig.claim()) == [late]

    async def test_due_retries_in_the_pending_list_do_not_exceed_the_limit(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: RetryVia.PENDING}, pending_idle_ms=0)
        for claim in [await rig.start_one(tenant_id=tenant) for tenant in ("acme", "zeta", "acme")]:
            await rig.settle(claim, RetryLater(0, FAILURE))
        await limit(rig, 2)
        # Waiting retries use no slot.
        claim = await rig.start_one()
        assert len(await rig.reclaim("w2")) == 1
        assert await rig.reclaim("w2") == []
        assert await running(rig) == 2
        await rig.succeed(claim)
        assert len(await rig.claim_due("w2")) == 1
        assert await running(rig) == 2
        check_history(await rig.events())

    async def test_a_due_retry_in_the_pending_list_is_not_starved_by_ready_jobs(self, harness: EngineHarness) -> None:
        """At the limit it becomes ready and waits with the other jobs: a slot is never free when retries are read."""
        rig = await Rig.on(harness, retry_via={QUEUE: RetryVia.PENDING}, pending_idle_ms=0)
        await limit(rig, 1)
        first = await rig.start_one()
        await rig.settle(first, RetryLater(0, FAILURE))
        await rig.submit(5)
        served: list[str] = []
        for _ in range(6):
            claim = await rig.claim_one()
            # Upkeep runs while every slot is in use.
            assert await rig.reclaim("w2") == []
            served.append(claim.job_id)
            await rig.succeed(claim)
        assert first.job_id in served
        check_history(await rig.events(), ended=True)

    async def test_claim_job_does_not_exceed_the_limit(self, rig: Rig) -> None:
        await limit(rig, 1)
        one, two = await rig.submit(2)
        claim = await rig.engine.claim_job("w9", rig.queue, two)
        assert await rig.claim() == []
        before = await rig.entries()
        with pytest.raises(ConcurrencyLimited) as error:
            await rig.engine.claim_job("w9", rig.queue, one)
        assert (error.value.queue, error.value.limit) == (rig.queue, 1)
        assert (await rig.state(one), await rig.entries()) == (State.QUEUED, before)
        await rig.succeed(claim)
        assert (await rig.engine.claim_job("w9", rig.queue, one)).job_id == one

    async def test_recovered_claims_use_no_second_slot(self, rig: Rig) -> None:
        await limit(rig, 2)
        await rig.submit(3)
        claims = await rig.claim("w1")
        again = await rig.engine.recover_claims("w1", [rig.queue], ())
        assert {claim.lease for claim in again} == {claim.lease for claim in claims}
        assert await rig.claim("w1") == []
        await rig.succeed(*again)
        assert len(await rig.claim("w1")) == 1

    # Changing it -----------------------------------------------------------------------------------

    async def test_a_lower_limit_applies_as_jobs_finish(self, rig: Rig) -> None:
        await rig.submit(6)
        claims = await rig.claim(limit=3)
        await limit(rig, 1)
        await rig.succeed(*claims[:2])
        assert await rig.claim() == []
        await rig.succeed(claims[2])
        assert len(await rig.claim()) == 1

    async def test_a_limit_of_zero_starts_nothing_until_it_is_removed(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await limit(rig, 0)
        submitted = await rig.submit(2)
        await rig.succeed(claim)
        assert await rig.claim() == []
        await limit(rig, None)
        assert ids(await rig.claim()) == submitted

    async def test_the_limit_is_stored_and_counted(self, rig: Rig) -> None:
        control = QueueControl(concurrency=2, worker_concurrency=7, tenants={"acme": TenantControl(concurrency=1)})
        await rig.engine.set_control(rig.queue, control)
        await rig.submit(3, tenant_id="acme")
        await rig.submit(3)
        assert Counter(claim.tenant_id for claim in await rig.claim()) == {"acme": 1, "default": 1}
        stats = await rig.engine.stats(rig.queue)
        assert (stats.control, stats.states[State.RUNNING]) == (control, 2)

    # Waiting workers -------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["settle", "cancel", "poison", "raise", "remove"])
    async def test_a_free_slot_wakes_a_waiting_worker(self, harness: EngineHarness, way: str) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        await limit(rig, 1)
        one, two = await rig.submit(2)
        claim = await rig.claim_one("w1")
        waiting = await self._start_waiting(rig)
        match way:
            case "settle":
                await rig.succeed(claim)
            case "cancel":
                await rig.move(one, State.CANCELLED)
            case "poison":
                await rig.poison("w3")
            case "raise":
                await limit(rig, 2)
            case _:
                await limit(rig, None)
        assert ids(await soon(waiting)) == [two]

    async def test_several_free_slots_wake_several_workers(self, rig: Rig) -> None:
        await limit(rig, 3)
        await rig.submit(6)
        claims = await rig.claim("w1")
        waiting = [await self._start_waiting(rig, f"w2-{n}") for n in range(3)]
        await rig.succeed(*claims)
        found = await soon(asyncio.gather(*waiting))
        assert [len(batch) for batch in found] == [1, 1, 1]

    async def test_a_worker_that_met_the_limit_is_woken_by_later_jobs(self, rig: Rig) -> None:
        """While the limit is reached it waits for a free slot, afterwards for new jobs again."""
        await limit(rig, 1)
        claim = await rig.start_one("w1")
        waiting = await self._start_waiting(rig)
        await rig.succeed(claim)
        # The free slot woke it, but no job was ready.
        await rig.engine.claim("w3", [rig.queue], 1, 50)
        job_id = await rig.submit_one()
        assert ids(await soon(waiting)) == [job_id]

    async def _start_waiting(self, rig: Rig, worker: str = "w2") -> asyncio.Task[list[Claim]]:
        """A worker with a separate engine that waits for one job."""
        other = await rig.harness.make()

        async def wait() -> list[Claim]:
            # A claim may end early, for example if another worker was faster.
            while not (claims := await other.claim(worker, [rig.queue], 1, LONG_WAIT_MS)):
                pass
            return claims

        waiting = asyncio.create_task(wait())
        # When this claim has timed out, the other one is waiting too.
        assert await rig.engine.claim("w0", [rig.queue], 1, 50) == []
        return waiting

    # Fairness --------------------------------------------------------------------------------------

    async def test_tenants_share_the_slots_fairly(self, rig: Rig) -> None:
        await limit(rig, 2, acme=TenantControl(weight=3))
        await rig.submit(200, tenant_id="acme")
        await rig.submit(200, tenant_id="zeta")
        assert Counter(claim.tenant_id for claim in await drain(rig, 80)) == {"acme": 60, "zeta": 20}

    async def test_a_small_tenant_is_not_starved_at_the_limit(self, rig: Rig) -> None:
        await limit(rig, 1)
        await rig.submit(300, tenant_id="acme")
        late = set(await rig.submit(3, tenant_id="zeta"))
        assert late <= set(ids(await drain(rig, 10)))

    async def test_priorities_hold_at_the_limit(self, rig: Rig) -> None:
        await limit(rig, 1)
        low = await rig.submit(30, meta=with_priority(Priority.LOW))
        high = await rig.submit(30, meta=with_priority(Priority.HIGH))
        served = ids(await drain(rig, 30))
        assert len(set(served) & set(high)) > len(set(served) & set(low)) > 0


async def limit(rig: Rig, concurrency: int | None, **tenants: TenantControl) -> None:
    await rig.engine.set_control(rig.queue, QueueControl(concurrency=concurrency, tenants=tenants))


async def running(rig: Rig) -> int:
    return (await rig.engine.stats(rig.queue)).states[State.RUNNING]


async def drain(rig: Rig, count: int) -> list[Claim]:
    """Run `count` jobs, each settled before the next claim of another worker."""
    claims: list[Claim] = []
    while len(claims) < count:
        more = await rig.claim(f"w{len(claims) % 3}")
        assert more, f"nothing more to claim after {len(claims)}"
        assert await rig.succeed(*more) == [SettleResult.APPLIED] * len(more)
        claims += more
    return claims
