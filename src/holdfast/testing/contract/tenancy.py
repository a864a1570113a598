"""Engine contract for tenants that share a queue, and for intake limits.

`FairnessContract`: fair shares, weights and the concurrency limit of a tenant (Q, H5).
`IntakeLimitContract`: backlog limits of a queue and of each tenant in it (H5).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Claim, Priority, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, SettleResult, Succeed, Suspend, Verdict
from holdfast.engine.port.jobs import MAX_TENANTS, RetryVia
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import IntakeLimited
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

#: Far more than one claim returns.
BACKLOG: Final = 1_500
#: A job of another tenant is among the first N claims, whatever is ready before it.
SOON_SERVED: Final = 20


def tenants_of(claims: list[Claim]) -> Counter[str]:
    return Counter(claim.tenant_id for claim in claims)


class FairnessContract(Contract):
    """Guarantees of `claim` to tenants that share a queue."""

    @pytest.mark.parametrize("at_a_time", [100, 10, 1])
    async def test_ten_jobs_do_not_wait_behind_another_tenants_thousands(self, rig: Rig, at_a_time: int) -> None:
        await rig.submit(BACKLOG, tenant_id="acme")
        late = set(await rig.submit(10, tenant_id="zeta"))
        claims = await self._claim_all(rig, 100, at_a_time)
        assert late <= set(ids(claims))
        assert tenants_of(claims) == {"acme": 90, "zeta": 10}

    async def test_fairness_holds_across_workers(self, rig: Rig) -> None:
        """Many workers that claim one job each are as fair as one that claims many."""
        await rig.submit(200, tenant_id="acme")
        late = set(await rig.submit(10, tenant_id="zeta"))
        claims: list[Claim] = []
        for number in range(50):
            claims += await Rig(rig.harness, await rig.harness.make()).claim(f"w{number}", 1)
        assert late <= set(ids(claims))

    async def test_equal_weights_get_equal_shares(self, rig: Rig) -> None:
        for tenant in ("acme", "zeta", "omega"):
            await rig.submit(300, tenant_id=tenant)
        shares = tenants_of(await self._claim_all(rig, 300, 10))
        assert all(90 <= shares[tenant] <= 110 for tenant in ("acme", "zeta", "omega")), shares

    @pytest.mark.parametrize("at_a_time", [20, 1])
    async def test_shares_follow_the_weights(self, rig: Rig, at_a_time: int) -> None:
        await self._control(rig, acme=TenantControl(weight=3))
        for tenant in ("acme", "zeta"):
            await rig.submit(200, tenant_id=tenant)
        shares = tenants_of(await self._claim_all(rig, 100, at_a_time))
        assert 68 <= shares["acme"] <= 82, shares

    async def test_a_tenant_without_ready_jobs_costs_the_others_nothing(self, rig: Rig) -> None:
        await self._control(rig, zeta=TenantControl(weight=50))
        await rig.succeed(*[await rig.start_one(tenant_id="zeta") for _ in range(3)])
        submitted = await rig.submit(30, tenant_id="acme")
        assert ids(await rig.claim(limit=10)) == submitted[:10]
        assert ids(await self._claim_all(rig, 20, 1)) == submitted[10:]
        assert await rig.claim() == []

    async def test_a_claim_is_filled_whatever_the_shares(self, rig: Rig) -> None:
        await rig.submit(100, tenant_id="acme")
        await rig.submit(3, tenant_id="zeta")
        await rig.submit(2, tenant_id="omega")
        assert tenants_of(await rig.claim(limit=50)) == {"acme": 45, "zeta": 3, "omega": 2}

    @pytest.mark.parametrize("at_a_time", [7, 1])
    async def test_a_tenants_own_jobs_stay_in_order(self, rig: Rig, at_a_time: int) -> None:
        submitted: dict[str, list[str]] = {"acme": [], "zeta": []}
        for count in (5, 11, 3):
            for tenant, jobs in submitted.items():
                jobs += await rig.submit(count, tenant_id=tenant)
        claims = await self._claim_all(rig, 38, at_a_time)
        for tenant, jobs in submitted.items():
            assert [claim.job_id for claim in claims if claim.tenant_id == tenant] == jobs

    async def test_high_priority_jobs_of_any_tenant_run_first(self, rig: Rig) -> None:
        await rig.submit(5, tenant_id="acme")
        urgent = await rig.submit(3, tenant_id="zeta", meta=with_priority(Priority.HIGH))
        assert ids(await rig.claim(limit=3)) == urgent

    async def test_high_priority_jobs_of_several_tenants_are_shared_fairly(self, rig: Rig) -> None:
        for tenant, count in (("acme", 60), ("zeta", 5)):
            await rig.submit(count, tenant_id=tenant, meta=with_priority(Priority.HIGH))
        assert tenants_of(await rig.claim(limit=20))["zeta"] == 5

    async def test_any_number_of_tenants_is_served(self, rig: Rig) -> None:
        await rig.submit(BACKLOG, tenant_id="acme")
        others = {f"tenant-{number:03}" for number in range(MAX_TENANTS + 36)}
        for tenant in sorted(others):
            await rig.submit(1, tenant_id=tenant)
        claims = await self._claim_all(rig, 300, 10)
        assert set(tenants_of(claims)) == {"acme", *others}
        while more := await rig.claim(limit=500):
            claims += more
            await rig.succeed(*more)
        assert len(set(ids(claims))) == len(claims) == BACKLOG + len(others)
        assert await rig.open_jobs() == 0

    async def test_short_lived_tenants_are_all_served(self, rig: Rig) -> None:
        """More tenants than `MAX_TENANTS`, one after the other."""
        for number in range(MAX_TENANTS + 10):
            claim = await rig.start_one(tenant_id=f"tenant-{number:03}")
            assert await rig.succeed(claim) == [SettleResult.APPLIED]
        await rig.submit(200, tenant_id="acme")
        late = set(await rig.submit(5, tenant_id="zeta"))
        assert late <= set(ids(await self._claim_all(rig, 50, 5)))

    @pytest.mark.parametrize("way", ["delayed", "retried", "released", "resumed", "approved"])
    async def test_a_returning_job_does_not_wait_behind_other_tenants(self, rig: Rig, way: str) -> None:
        if way == "delayed":
            job_id = await rig.submit_one(tenant_id="zeta", delay_ms=1_000)
        elif way == "approved":
            job_id = await rig.submit_one(tenant_id="zeta", hold=True)
        else:
            claim = await rig.start_one(tenant_id="zeta")
            job_id = claim.job_id
            verdicts: dict[str, Verdict] = {
                "retried": RetryLater(1_000, FAILURE),
                "released": Release("draining", 1_000),
                "resumed": Suspend(FAILURE),
            }
            await rig.settle(claim, verdicts[way])
        await rig.submit(300, tenant_id="acme")
        if way in ("resumed", "approved"):
            await rig.move(job_id, State.QUEUED)
        await rig.harness.advance(1_001)
        await rig.promote()
        assert job_id in ids(await self._claim_all(rig, SOON_SERVED, 1))

    # A tenant's own concurrency --------------------------------------------------------------------

    async def test_a_tenants_concurrency_limit_holds_across_workers(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=2))
        submitted = await rig.submit(6, tenant_id="acme")
        await rig.submit(6, tenant_id="zeta")
        first = await rig.claim("w1", 8)
        assert tenants_of(first) == {"acme": 2, "zeta": 6}
        assert await rig.claim("w2") == []
        acme = [claim for claim in first if claim.tenant_id == "acme"]
        assert ids(acme) == submitted[:2]
        # A slot freed on one worker can be used by any other.
        assert await rig.succeed(acme[0]) == [SettleResult.APPLIED]
        (third,) = await rig.claim("w2")
        assert third.job_id == submitted[2]
        assert await rig.claim("w1") == []

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
    async def test_a_settled_attempt_frees_a_slot(self, rig: Rig, mode: RetryVia, verdict: Verdict) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two = await rig.submit(2, tenant_id="acme")
        claim = await rig.claim_one()
        assert (claim.job_id, await rig.claim()) == (one, [])
        assert await rig.settle(claim, verdict) is SettleResult.APPLIED
        # A resent settlement frees the slot once.
        await rig.settle(claim, verdict)
        assert ids(await rig.claim()) == [two]
        assert await rig.claim() == []

    async def test_a_cancelled_run_frees_a_slot(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two, _ = await rig.submit(3, tenant_id="acme")
        claim = await rig.claim_one("w1")
        await rig.move(one, State.CANCELLED)
        assert ids(await rig.claim("w2")) == [two]
        assert await rig.succeed(claim) == [SettleResult.STALE]
        assert await rig.claim() == []

    async def test_a_reclaimed_job_keeps_its_slot(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two = await rig.submit(2, tenant_id="acme")
        late = await rig.claim_one("w1")
        await rig.lose_leases()
        # The worker may still be running it.
        assert await rig.claim("w2") == []
        claim = await rig.reclaim_one("w2")
        assert claim.job_id == one
        assert await rig.claim("w3") == []
        assert await rig.succeed(late) == [SettleResult.STALE]
        assert await rig.claim("w3") == []
        assert await rig.succeed(claim) == [SettleResult.APPLIED]
        assert ids(await rig.claim("w3")) == [two]
        check_history(await rig.events())

    async def test_a_poison_pill_frees_a_slot(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, max_deliveries=1)
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two = await rig.submit(2, tenant_id="acme")
        assert ids(await rig.claim("w1")) == [one]
        await rig.poison()
        assert ids(await rig.claim("w2")) == [two]

    async def test_a_due_job_waits_for_a_slot(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        claim = await rig.start_one(tenant_id="acme")
        late = await rig.submit_one(tenant_id="acme", delay_ms=1_000)
        await rig.harness.advance(1_001)
        assert await rig.claim() == []
        await rig.promote()
        assert await rig.claim() == []
        await rig.succeed(claim)
        assert ids(await rig.claim()) == [late]

    async def test_a_due_retry_in_the_pending_list_waits_for_a_slot(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, retry_via={QUEUE: RetryVia.PENDING}, pending_idle_ms=0)
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two = await rig.submit(2, tenant_id="acme")
        await rig.settle(await rig.claim_one(), RetryLater(0, FAILURE))
        # The slot of the waiting retry is free for the next ready job.
        claim = await rig.claim_one()
        assert claim.job_id == two
        other = await rig.start_one("w3", tenant_id="other")
        await rig.settle(other, RetryLater(0, FAILURE))
        # A retry without a slot does not block a retry that has one.
        assert ids(await rig.reclaim("w2", limit=1)) == [other.job_id]
        assert await rig.reclaim("w2") == []
        await rig.succeed(claim)
        # It waits with the other ready jobs.
        assert ids(await rig.claim("w2")) == [one]
        check_history(await rig.events())

    async def test_a_limit_below_the_running_jobs_applies_as_they_finish(self, rig: Rig) -> None:
        await rig.submit(5, tenant_id="acme")
        claims = await rig.claim(limit=3)
        await self._control(rig, acme=TenantControl(concurrency=1))
        await rig.succeed(*claims[:2])
        assert await rig.claim() == []
        await rig.succeed(claims[2])
        assert len(await rig.claim()) == 1

    async def test_a_concurrency_of_zero_stops_a_tenant_until_it_is_removed(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=0))
        submitted = await rig.submit(2, tenant_id="acme")
        (other,) = await rig.submit(1, tenant_id="zeta")
        assert ids(await rig.claim()) == [other]
        await rig.engine.set_control(rig.queue, QueueControl())
        assert ids(await rig.claim()) == submitted

    async def test_a_freed_slot_wakes_a_waiting_worker(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        one, two = await rig.submit(2, tenant_id="acme")
        claim = await rig.claim_one("w1")
        assert claim.job_id == one
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.claim("w2", [rig.queue], 1, LONG_WAIT_MS))
        # When this claim has timed out, the other one is waiting too.
        assert await rig.engine.claim("w3", [rig.queue], 1, 50) == []
        await rig.succeed(claim)
        assert ids(await soon(waiting)) == [two]

    async def test_a_limit_on_one_tenant_does_not_slow_the_others(self, rig: Rig) -> None:
        await self._control(rig, acme=TenantControl(concurrency=1))
        await rig.submit(200, tenant_id="acme")
        await rig.submit(100, tenant_id="zeta")
        assert tenants_of(await rig.claim(limit=50)) == {"acme": 1, "zeta": 49}
        assert tenants_of(await rig.claim(limit=50)) == {"zeta": 50}

    # Helpers ---------------------------------------------------------------------------------------

    async def _control(self, rig: Rig, **tenants: TenantControl) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(tenants=tenants))

    async def _claim_all(self, rig: Rig, count: int, at_a_time: int) -> list[Claim]:
        """Return the next `count` claims, each settled at once."""
        claims: list[Claim] = []
        while len(claims) < count:
            more = await rig.claim(limit=min(at_a_time, count - len(claims)))
            assert more, f"nothing more to claim after {len(claims)}"
            assert await rig.succeed(*more) == [SettleResult.APPLIED] * len(more)
            claims += more
        return claims


MINUTE_MS: Final = 60_000


class IntakeLimitContract(Contract):
    """Guarantees of the backlog limits of a queue and of its tenants."""

    async def test_a_full_queue_refuses_submissions_until_jobs_finish(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=3))
        await rig.submit(2)
        claim = await rig.claim_one()
        await rig.submit(1)
        before = await rig.entries()
        with pytest.raises(IntakeLimited) as error:
            await rig.submit(1)
        assert error.value.code == "INTAKE_LIMITED"
        assert rig.engine.counters.intake_refused == 1
        assert await rig.entries() == before
        # Running jobs can finish, which makes room.
        await rig.succeed(claim)
        await rig.submit(1)
        with pytest.raises(IntakeLimited):
            await rig.submit(1)

    async def test_a_batch_that_does_not_fit_is_refused_as_a_whole(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=3))
        await rig.submit(2)
        envelopes = [rig.envelope(), rig.envelope()]
        with pytest.raises(IntakeLimited):
            await rig.engine.submit(envelopes)
        assert await rig.engine.get(rig.queue, [each.job_id for each in envelopes]) == [None, None]
        assert len(await rig.submit(1)) == 1

    @both_modes
    async def test_a_waiting_retry_is_not_part_of_the_backlog(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one(tenant_id="acme")
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        stats = await rig.engine.stats(rig.queue)
        assert (stats.backlog, stats.tenants) == (0, {})
        limit = TenantControl(intake_limit=1)
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=1, tenants={"acme": limit}))
        await rig.submit_one(tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit_one(tenant_id="acme")

    async def test_a_full_queue_still_answers_known_submissions(self, rig: Rig) -> None:
        first = rig.envelope(idempotency_key="k")
        await rig.engine.submit([first])
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=1))
        (resent, duplicate) = await rig.engine.submit([first, rig.envelope(idempotency_key="k")])
        assert (resent.job_id, resent.duplicate) == (first.job_id, False)
        assert (duplicate.job_id, duplicate.duplicate) == (first.job_id, True)
        with pytest.raises(IntakeLimited):
            await rig.engine.submit([first, rig.envelope()])
        # Only new jobs count against the limit.
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=2))
        assert len(await rig.engine.submit([first, rig.envelope(idempotency_key="k"), rig.envelope()])) == 3

    async def test_delayed_and_held_jobs_do_not_count_against_the_limit(self, rig: Rig) -> None:
        await rig.submit(2, delay_ms=MINUTE_MS)
        await rig.submit(2, hold=True)
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=1))
        await rig.submit(1)
        with pytest.raises(IntakeLimited):
            await rig.submit(1)

    async def test_a_tenants_intake_limit_applies_to_that_tenant_only(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(tenants={"acme": TenantControl(intake_limit=2)}))
        await rig.submit(2, tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit(1, tenant_id="acme")
        await rig.submit(3, tenant_id="zeta")
        # One job over the limit refuses the whole batch.
        fits = rig.envelope(tenant_id="zeta")
        with pytest.raises(IntakeLimited):
            await rig.engine.submit([fits, rig.envelope(tenant_id="acme")])
        assert await rig.find(fits.job_id) is None
        acme = [claim for claim in await rig.claim() if claim.tenant_id == "acme"]
        await rig.succeed(acme[0])
        await rig.submit(1, tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit(1, tenant_id="acme")

    async def test_a_refused_batch_says_what_fits(self, rig: Rig) -> None:
        limits = {"acme": TenantControl(intake_limit=3)}
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=10, tenants=limits))
        known = rig.envelope(tenant_id="acme")
        await rig.engine.submit([known])
        with pytest.raises(IntakeLimited) as error:
            await rig.engine.submit([known, *(rig.envelope(tenant_id="acme") for _ in range(4)), rig.envelope()])
        refused = error.value
        assert (refused.tenant_id, refused.limit, refused.backlog, refused.fits) == ("acme", 3, 1, 3)
        assert "'acme'" in str(refused)
        with pytest.raises(IntakeLimited) as error:
            await rig.engine.submit([rig.envelope() for _ in range(11)])
        refused = error.value
        assert (refused.tenant_id, refused.limit, refused.backlog, refused.fits) == ("", 10, 1, 9)
        assert "10" not in refused.public
        assert await rig.open_jobs() == 1

    @pytest.mark.parametrize("tenant", ["default", "acme"])
    async def test_each_envelope_is_judged_in_order(self, rig: Rig, tenant: str) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=3))
        envelopes = [rig.envelope(tenant_id=tenant) for _ in range(8)]
        answers = await rig.engine.submit_each(envelopes)
        assert answers[:3] == [Receipt(envelope.job_id) for envelope in envelopes[:3]]
        assert [(type(answer), getattr(answer, "backlog", None)) for answer in answers[3:]] == [(IntakeLimited, 3)] * 5
        assert rig.engine.counters.intake_refused == 5
        assert rig.engine.counters.submitted == 3
        assert ids(await rig.claim()) == [envelope.job_id for envelope in envelopes[:3]]
        assert [event.job_id for event in await rig.events() if event.type == "task.created"] == [
            envelope.job_id for envelope in envelopes[:3]
        ]

    async def test_a_tenant_at_its_limit_is_refused_alone(self, rig: Rig) -> None:
        limits = {"acme": TenantControl(intake_limit=1), "default": TenantControl(intake_limit=2)}
        await rig.engine.set_control(rig.queue, QueueControl(tenants=limits))
        tenants = ["acme", "zeta", "acme", "default", "acme", "zeta", "default", "default"]
        answers = await rig.engine.submit_each([rig.envelope(tenant_id=tenant) for tenant in tenants])
        refused = {number: answer for number, answer in enumerate(answers) if isinstance(answer, IntakeLimited)}
        assert {number: answer.tenant_id for number, answer in refused.items()} == {2: "acme", 4: "acme", 7: "default"}
        assert (await rig.engine.stats(rig.queue)).backlog == 5

    async def test_a_job_refused_by_a_limit_leaves_its_key_free(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=1))
        one, two, again = rig.envelope(), rig.envelope(idempotency_key="k"), rig.envelope(idempotency_key="k")
        answers = await rig.engine.submit_each([one, two, again])
        assert [isinstance(answer, IntakeLimited) for answer in answers] == [False, True, True]
        await rig.engine.set_control(rig.queue, QueueControl())
        assert await rig.engine.submit([again]) == [Receipt(again.job_id)]

    async def test_delayed_and_held_jobs_leave_room_for_others(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=1))
        waiting = [rig.envelope(delay_ms=MINUTE_MS), rig.envelope(hold=True)]
        ready = [rig.envelope(), rig.envelope()]
        answers = await rig.engine.submit_each([*waiting, *ready])
        assert [isinstance(answer, IntakeLimited) for answer in answers] == [False, False, False, True]

    async def test_intake_limits_do_not_stop_accepted_jobs_from_returning(self, rig: Rig) -> None:
        retried, released = await rig.start_one(tenant_id="acme"), await rig.start_one(tenant_id="acme")
        await rig.settle(retried, RetryLater(1_000, FAILURE))
        await rig.settle(released, Release("draining", 1_000))
        held = await rig.submit_one(tenant_id="acme", hold=True)
        await rig.engine.set_control(
            rig.queue, QueueControl(intake_limit=0, tenants={"acme": TenantControl(intake_limit=0)})
        )
        await rig.move(held, State.QUEUED)
        await rig.harness.advance(1_001)
        assert set(ids(await rig.claim_due())) == {retried.job_id, released.job_id, held}

    async def test_an_intake_limit_applies_to_one_queue_only(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=0))
        with pytest.raises(IntakeLimited):
            await rig.submit(1)
        assert len(await rig.submit(1, queue=OTHER_QUEUE)) == 1
