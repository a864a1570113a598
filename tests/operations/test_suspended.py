"""Suspended jobs: seen, resumed, given up; one or many, with a ledger and without (requirement D6)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.states import State
from holdfast.errors import Forbidden, InvalidOption, NoLedger, TransitionInvalid, UnknownJob
from holdfast.operations.suspended import SuspendedFilter
from tests.operations.deployment import ADA, APPROVER, LOCAL, OF_ACME, VIEWER, World

EVERY = SuspendedFilter()


async def test_they_are_listed_by_filter(world: World) -> None:
    office = world.offices.suspended
    first, second = await world.suspended(2)
    (third,) = await world.suspended(1, queue="other", tenant_id="acme")
    page = await office.list(VIEWER)
    assert {job.job_id for job in page.jobs} == {first, second, third}
    (job,) = (await office.list(VIEWER, SuspendedFilter(queues=frozenset({"other"})))).jobs
    assert (job.job_id, job.task, job.tenant_id, job.attempt) == (third, "fetch", "acme", 1)
    assert "is not there" in job.error
    for wanted, count in (
        (SuspendedFilter(tenant_id="acme"), 1),
        (SuspendedFilter(job_type="fetch"), 3),
        (SuspendedFilter(job_type="other"), 0),
        (SuspendedFilter(error="IS NOT"), 3),
        (SuspendedFilter(error_code=job.error_code), 3),
        (SuspendedFilter(error_code="OTHER"), 0),
        (SuspendedFilter(since=job.created_at), 1),
    ):
        assert len((await office.list(VIEWER, wanted)).jobs) == count, wanted
    one = await office.list(VIEWER, EVERY, 1)
    assert [job.job_id for job in one.jobs] == [third]
    assert one.cursor is not None
    assert {job.job_id for job in (await office.list(VIEWER, EVERY, 5, one.cursor)).jobs} == {first, second}


async def test_one_is_resumed_with_fresh_retries_and_its_history(world: World) -> None:
    (job_id,) = await world.suspended()
    report = await world.offices.suspended.resume(ADA, [job_id], reason="it is there now")
    assert (report.matched, report.done, report.failed) == (1, 1, 0)
    view = await world.view(job_id)
    assert (view.state, view.meta.retry_count, len(view.meta.history)) == (State.QUEUED, 0, 1)
    world.broken = False
    await world.run()
    assert (await world.view(job_id)).state is State.SUCCEEDED
    (line,) = await world.log("operator.resume")
    assert (line.actor, line.reason, line.target, line.target_id) == ("ada", "it is there now", "job", job_id)
    assert "suspended" in line.before.text
    assert "queued" in line.after.text


async def test_one_is_given_up_with_a_reason(world: World) -> None:
    office = world.offices.suspended
    (job_id,) = await world.suspended()
    with pytest.raises(InvalidOption, match="reason"):
        await office.discard(ADA, [job_id], reason=" ")
    report = await office.discard(LOCAL, [job_id], reason="customer withdrew")
    assert report.done == 1
    view = await world.view(job_id)
    assert view.state is State.CANCELLED
    assert view.failure is not None
    assert "customer withdrew" in view.failure.message
    (line,) = await world.log("operator.discard_suspended")
    assert (line.actor, line.reason) == (LOCAL.name, "customer withdrew")


async def test_many_are_resumed_after_a_look(world: World) -> None:
    office = world.offices.suspended
    ids = await world.suspended(4)
    (other,) = await world.suspended(1, queue="other")
    wanted = SuspendedFilter(queues=frozenset({"default"}))
    dry = await office.resume(ADA, wanted, reason="", dry_run=True)
    assert (dry.matched, dry.dry_run, dry.results) == (4, True, [])
    assert (await world.view(ids[0])).state is State.SUSPENDED
    report = await office.resume(ADA, wanted, reason="outage over")
    assert {result.id for result in report.results if result.done} == set(ids)
    await world.caught_up()
    assert (await office.discard(ADA, EVERY, reason="old", dry_run=True)).matched == 1
    assert (await office.discard(ADA, EVERY, reason="old")).done == 1
    assert (await world.view(other, "other")).state is State.CANCELLED


async def test_each_result_is_told(world: World) -> None:
    office = world.offices.suspended
    good, ended = await world.suspended(2)
    await office.discard(ADA, [ended], reason="old")
    report = await office.resume(ADA, [good, "nobody", ended, good], reason="")
    told = {result.id: result.code for result in report.results}
    assert told == {good: "", "nobody": UnknownJob.code, ended: TransitionInvalid.code}
    assert (report.matched, report.done, report.failed) == (3, 1, 2)
    with pytest.raises(UnknownJob):
        await office.resume(ADA, ["nobody"], reason="", dry_run=True)
    with pytest.raises(TransitionInvalid):
        await office.resume(ADA, [ended], reason="", dry_run=True)


async def test_of_another_tenant_nothing_is_there(world: World) -> None:
    office = world.offices.suspended
    (theirs,) = await world.suspended(1, tenant_id="globex")
    assert (await office.list(OF_ACME)).jobs == []
    assert (await office.list(OF_ACME, SuspendedFilter(tenant_id="globex"))).jobs == []
    for act in (office.resume, office.discard):
        assert (await act(OF_ACME, EVERY, reason="r")).matched == 0
        (result,) = (await act(OF_ACME, [theirs], reason="r")).results
        (nobody,) = (await act(OF_ACME, ["nobody"], reason="r")).results
        assert (result.done, result.code) == (False, UnknownJob.code)
        assert result.message.replace(theirs, "nobody") == nobody.message
        with pytest.raises(UnknownJob):
            await act(OF_ACME, [theirs], reason="r", dry_run=True)
    assert (await world.view(theirs)).state is State.SUSPENDED


async def test_roles(world: World) -> None:
    office = world.offices.suspended
    (job_id,) = await world.suspended()
    for someone in (VIEWER, APPROVER):
        attempts: list[Any] = [
            office.resume(someone, [job_id], reason="r"),
            office.resume(someone, EVERY, reason="r", dry_run=True),
            office.discard(someone, EVERY, reason="r"),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt


@pytest.mark.redis
async def test_without_a_ledger_the_engine_knows_them(alone: World) -> None:
    from holdfast.testing import drain

    jobs = [await alone.fetch.submit() for _ in range(3)]
    other = await alone.fetch.options(queue="other").submit()
    await drain(alone.app)
    office = alone.offices.suspended
    assert {job.job_id for job in (await office.list(LOCAL)).jobs} == {job.id for job in [*jobs, other]}
    assert len((await office.list(LOCAL, EVERY, 2)).jobs) == 2
    for wanted, count in (
        (SuspendedFilter(queues=frozenset({"other"})), 1),
        (SuspendedFilter(error="is not THERE"), 4),
        (SuspendedFilter(tenant_id="acme"), 0),
    ):
        assert len((await office.list(LOCAL, wanted)).jobs) == count
    with pytest.raises(NoLedger):
        await office.list(LOCAL, EVERY, 2, "cursor")
    assert (await office.resume(LOCAL, [jobs[0].id], reason="")).done == 1
    assert (await office.resume(LOCAL, EVERY, reason="", dry_run=True)).matched == 3
    assert (await office.discard(LOCAL, EVERY, reason="old")).done == 3
    assert [await job.state() for job in jobs] == [State.QUEUED, State.CANCELLED, State.CANCELLED]
