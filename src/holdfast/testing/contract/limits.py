"""Limits on what a queue takes in, of its own and of each tenant (H5)."""

from __future__ import annotations

from typing import Final

import pytest

from holdfast.core.states import State
from holdfast.core.verdict import Release, RetryLater
from holdfast.engine.port import Control, RetryVia, TenantControl
from holdfast.errors import IntakeLimited
from holdfast.testing.contract.harness import FAILURE, OTHER_QUEUE, Contract, Rig, both_modes, ids

MINUTE_MS: Final = 60_000


class IntakeLimitContract(Contract):
    """What limits of a queue and of a tenant's part of it promise."""

    async def test_a_full_queue_takes_no_more_until_some_have_ended(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, Control(intake_limit=3))
        await rig.submit(2)
        claim = await rig.claim_one()
        await rig.submit(1)
        before = await rig.entries()
        with pytest.raises(IntakeLimited) as error:
            await rig.submit(1)
        assert error.value.code == "INTAKE_LIMITED"
        assert rig.engine.counts.intake_refused == 1
        assert await rig.entries() == before
        # Work goes on, and makes room.
        await rig.succeed(claim)
        await rig.submit(1)
        with pytest.raises(IntakeLimited):
            await rig.submit(1)

    async def test_a_batch_that_does_not_fit_is_refused_whole(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, Control(intake_limit=3))
        await rig.submit(2)
        envelopes = [rig.envelope(), rig.envelope()]
        with pytest.raises(IntakeLimited):
            await rig.engine.submit(envelopes)
        assert await rig.engine.get(rig.queue, [each.job_id for each in envelopes]) == [None, None]
        assert len(await rig.submit(1)) == 1

    @both_modes
    async def test_a_retry_that_waits_is_neither_in_line_nor_running(self, rig: Rig, mode: RetryVia) -> None:
        claim = await rig.start_one(tenant_id="acme")
        await rig.settle(claim, RetryLater(MINUTE_MS, FAILURE))
        stats = await rig.engine.stats(rig.queue)
        assert (stats.backlog, stats.tenants) == (0, {})
        limit = TenantControl(intake_limit=1)
        await rig.engine.set_control(rig.queue, Control(intake_limit=1, tenants={"acme": limit}))
        await rig.submit_one(tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit_one(tenant_id="acme")

    async def test_what_is_known_already_is_answered_all_the_same(self, rig: Rig) -> None:
        first = rig.envelope(idempotency_key="k")
        await rig.engine.submit([first])
        await rig.engine.set_control(rig.queue, Control(intake_limit=1))
        (resent, duplicate) = await rig.engine.submit([first, rig.envelope(idempotency_key="k")])
        assert (resent.job_id, resent.duplicate) == (first.job_id, False)
        assert (duplicate.job_id, duplicate.duplicate) == (first.job_id, True)
        with pytest.raises(IntakeLimited):
            await rig.engine.submit([first, rig.envelope()])
        # Only what is new needs room.
        await rig.engine.set_control(rig.queue, Control(intake_limit=2))
        assert len(await rig.engine.submit([first, rig.envelope(idempotency_key="k"), rig.envelope()])) == 3

    async def test_jobs_that_wait_for_a_time_or_a_person_take_no_room(self, rig: Rig) -> None:
        await rig.submit(2, delay_ms=MINUTE_MS)
        await rig.submit(2, hold=True)
        await rig.engine.set_control(rig.queue, Control(intake_limit=1))
        await rig.submit(1)
        with pytest.raises(IntakeLimited):
            await rig.submit(1)

    async def test_a_tenants_limit_is_its_own(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, Control(tenants={"acme": TenantControl(intake_limit=2)}))
        await rig.submit(2, tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit(1, tenant_id="acme")
        await rig.submit(3, tenant_id="zeta")
        # One that does not fit keeps the whole batch out.
        fits = rig.envelope(tenant_id="zeta")
        with pytest.raises(IntakeLimited):
            await rig.engine.submit([fits, rig.envelope(tenant_id="acme")])
        assert await rig.find(fits.job_id) is None
        acme = [claim for claim in await rig.claim() if claim.tenant_id == "acme"]
        await rig.succeed(acme[0])
        await rig.submit(1, tenant_id="acme")
        with pytest.raises(IntakeLimited):
            await rig.submit(1, tenant_id="acme")

    async def test_no_limit_keeps_an_accepted_job_from_coming_back(self, rig: Rig) -> None:
        retried, released = await rig.start_one(tenant_id="acme"), await rig.start_one(tenant_id="acme")
        await rig.settle(retried, RetryLater(1_000, FAILURE))
        await rig.settle(released, Release("draining", 1_000))
        held = await rig.submit_one(tenant_id="acme", hold=True)
        await rig.engine.set_control(
            rig.queue, Control(intake_limit=0, tenants={"acme": TenantControl(intake_limit=0)})
        )
        await rig.move(held, State.QUEUED)
        await rig.harness.advance(1_001)
        assert set(ids(await rig.claim_due())) == {retried.job_id, released.job_id, held}

    async def test_another_queue_is_not_limited(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, Control(intake_limit=0))
        with pytest.raises(IntakeLimited):
            await rig.submit(1)
        assert len(await rig.submit(1, queue=OTHER_QUEUE)) == 1
