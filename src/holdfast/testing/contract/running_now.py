"""Run it now: a waiting job is made due, or one job is taken out of its turn (H1, H3)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import pytest

from holdfast.core.job import Claim
from holdfast.core.states import EXPEDITED_EVENT, State
from holdfast.core.verdict import Answer, RetryLater, Suspend
from holdfast.engine.port import Control, RetryVia, TenantControl
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.testing.contract.harness import FAILURE, Contract, EngineHarness, Rig, both_modes, ids
from holdfast.testing.contract.people import told
from holdfast.testing.history import check_history

MINUTE_MS: Final = 60_000


class RunNowContract(Contract):
    """What `expedite` and `take` promise."""

    # Due at once -----------------------------------------------------------------------------------

    async def test_a_delayed_job_can_be_made_due(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS, tenant_id="acme")
        await self._expedite(rig, job_id, audit="operator.retry")
        assert ids(await rig.claim_due()) == [job_id]
        created, expedited, logged, claimed = await rig.events(job_id)
        if expedited.type != EXPEDITED_EVENT:
            expedited, logged = logged, expedited
        assert (expedited.type, expedited.from_state, expedited.to_state) == (EXPEDITED_EVENT, None, None)
        assert ((expedited.data or {})["actor"], (expedited.data or {})["reason"]) == ("ann", "now")
        assert (logged.type, logged.job_id, logged.tenant_id) == ("operator.retry", job_id, "acme")
        actor, reason, *_, target, target_id = told(logged)
        assert (actor, reason, target, target_id) == ("ann", "now", "job", job_id)
        assert (created.type, claimed.type) == ("task.created", "task.claimed")
        assert claimed.attempt == 1

    @both_modes
    async def test_a_retry_can_be_made_due(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        await self._expedite(rig, claim.job_id)
        (again,) = await rig.claim_due()
        assert (again.job_id, again.attempt, again.meta.retry_count) == (claim.job_id, 2, 1)
        assert await rig.succeed(again) == [Answer.APPLIED]
        assert await rig.story(claim.job_id) == [
            "task.created",
            "task.claimed",
            "task.retrying",
            EXPEDITED_EVENT,
            "task.claimed",
            "task.succeeded",
        ]
        check_history(await rig.events(), ended=True)

    async def test_a_job_that_was_made_due_stays_so(self, rig: Rig) -> None:
        """Parked and resumed it does not remember the time that a person overruled."""
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        await self._expedite(rig, job_id)
        await rig.move(job_id, State.SUSPENDED)
        await rig.move(job_id, State.QUEUED)
        assert ids(await rig.claim_due()) == [job_id]

    async def test_a_job_that_was_taken_before_its_time_does_not_wait_for_it_again(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        claim = await rig.engine.take("w", rig.queue, job_id)
        await rig.settle(claim, Suspend(FAILURE))
        await rig.move(job_id, State.QUEUED)
        assert ids(await rig.claim()) == [job_id]

    async def test_twice_is_as_good_as_once(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        await self._expedite(rig, job_id)
        # It may be in line by now, which is not waiting for a time any more.
        with suppress(TransitionInvalid):
            await self._expedite(rig, job_id)
        assert ids(await rig.claim_due()) == [job_id]
        assert await rig.claim_due() == []

    @pytest.mark.parametrize("state", [state for state in State if state is not State.RETRYING])
    async def test_what_waits_for_no_time_cannot_be_made_due(self, harness: EngineHarness, state: State) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id, _ = await rig.put_in(state)
        before, refused = await rig.entries(), rig.engine.counts.illegal_moves
        with pytest.raises(TransitionInvalid) as error:
            await self._expedite(rig, job_id, audit="operator.retry")
        assert (error.value.from_state, error.value.to_state) == (state, State.RUNNING)
        assert rig.engine.counts.illegal_moves == refused + 1
        assert await rig.entries() == before

    async def test_an_unknown_job_cannot_be_made_due_or_taken(self, rig: Rig) -> None:
        await rig.submit_one()
        with pytest.raises(UnknownJob):
            await self._expedite(rig, "never-submitted")
        with pytest.raises(UnknownJob):
            await rig.engine.take("w1", rig.queue, "never-submitted")

    # Taking one job --------------------------------------------------------------------------------

    async def test_a_job_can_be_taken_from_the_middle_of_the_line(self, rig: Rig) -> None:
        one, two, three = await rig.submit(3, tenant_id="acme", payload=b'{"n":2}')
        claim = await rig.engine.take("w9", rig.queue, two)
        assert (claim.job_id, claim.attempt, claim.lease.worker) == (two, 1, "w9")
        assert (claim.tenant_id, claim.payload, claim.task) == ("acme", b'{"n":2}', "print")
        assert await rig.state(two) is State.RUNNING
        assert ids(await rig.claim()) == [one, three]
        assert await rig.succeed(claim) == [Answer.APPLIED]
        assert await rig.story(two) == ["task.created", "task.claimed", "task.succeeded"]
        assert (await rig.view(two)).result == b"7"
        check_history(await rig.events())

    async def test_a_delayed_job_can_be_taken(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=MINUTE_MS)
        claim = await rig.engine.take("w9", rig.queue, job_id)
        await rig.harness.advance(MINUTE_MS + 1)
        # Once its lease is lost it is somebody else's, and in nobody's line.
        assert ids(await rig.claim_due()) == [job_id]
        assert await rig.succeed(claim) == [Answer.STALE]
        check_history(await rig.events())

    @both_modes
    async def test_a_retry_can_be_taken(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        again = await rig.engine.take("w9", rig.queue, claim.job_id)
        assert (again.attempt, again.meta.retry_count, len(again.meta.history)) == (2, 1, 1)
        assert await rig.claim_due() == []
        assert await rig.succeed(again) == [Answer.APPLIED]
        await rig.harness.advance(MINUTE_MS + 1)
        assert await rig.claim_due() == []
        check_history(await rig.events(), ended=True)

    async def test_a_due_retry_in_line_can_be_taken(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        await rig.promote()
        again = await rig.engine.take("w9", rig.queue, claim.job_id)
        assert again.attempt == 2
        assert await rig.claim_due() == []

    async def test_a_taken_job_is_leased_like_any_other(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        claim = await rig.engine.take("w9", rig.queue, job_id)
        assert [each.lease for each in await rig.engine.resume("w9", [rig.queue], ())] == [claim.lease]
        assert await rig.engine.renew([claim.lease]) == []
        await rig.lose_leases()
        again = await rig.reclaim_one("w2")
        assert (again.job_id, again.attempt, again.lease.deliveries) == (job_id, 2, 2)
        assert await rig.succeed(claim, again) == [Answer.STALE, Answer.APPLIED]
        check_history(await rig.events(), ended=True)

    async def test_a_taken_job_can_fail_and_come_back(self, rig: Rig) -> None:
        claim = await rig.engine.take("w9", rig.queue, await rig.submit_one())
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        (again,) = await rig.claim_due()
        assert (again.attempt, again.meta.retry_count) == (2, 1)

    async def test_a_taken_job_has_its_tenants_place(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, Control(tenants={"acme": TenantControl(concurrency=1)}))
        _, two = await rig.submit(2, tenant_id="acme")
        claim = await rig.engine.take("w9", rig.queue, two)
        assert await rig.claim() == []
        await rig.succeed(claim)
        assert len(await rig.claim()) == 1

    @pytest.mark.parametrize("state", [state for state in State if state not in (State.QUEUED, State.RETRYING)])
    async def test_only_what_could_run_can_be_taken(self, harness: EngineHarness, state: State) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id, _ = await rig.put_in(state)
        before, refused = await rig.entries(), rig.engine.counts.illegal_moves
        with pytest.raises(TransitionInvalid) as error:
            await rig.engine.take("w9", rig.queue, job_id)
        assert (error.value.from_state, error.value.to_state) == (state, State.RUNNING)
        assert rig.engine.counts.illegal_moves == refused + 1
        assert await rig.entries() == before

    async def test_a_claim_and_a_take_cannot_both_win(self, rig: Rig) -> None:
        other = Rig(rig.harness, await rig.harness.make())

        async def take(job_id: str) -> Claim | None:
            try:
                return await rig.engine.take("w9", rig.queue, job_id)
            except TransitionInvalid:
                return None

        for _ in range(20):
            job_id = await rig.submit_one()
            taken, claims = await asyncio.gather(take(job_id), other.claim("w2", 1))
            winners = [*claims, *([taken] if taken else [])]
            assert ids(winners) == [job_id]
            assert await rig.succeed(*winners) == [Answer.APPLIED]
        check_history(await rig.events(), ended=True)

    async def _expedite(self, rig: Rig, job_id: str, audit: str = "") -> None:
        await rig.engine.expedite(rig.queue, job_id, actor="ann", reason="now", audit=audit)
