"""Suspended jobs: list, resume and discard, single and bulk, with and without a ledger (requirement D6)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.states import State
from holdfast.errors import Forbidden, InvalidOption, NoLedger, TransitionInvalid, UnknownJob
from holdfast.operations.suspended import SuspendedFilter
from tests.operations.deployment import ADA, APPROVER, LOCAL, OF_ACME, VIEWER, SampleDeployment

EVERY = SuspendedFilter()


async def test_suspended_jobs_are_listed_by_filter(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    first, second = await deployment.make_suspended(2)
    (third,) = await deployment.make_suspended(1, queue="other", tenant_id="acme")
    page = await suspended.list(VIEWER)
    assert {job.job_id for job in page.jobs} == {first, second, third}
    (job,) = (await suspended.list(VIEWER, SuspendedFilter(queues=frozenset({"other"})))).jobs
    assert (job.job_id, job.task, job.tenant_id, job.attempt) == (third, "fetch", "acme", 1)
    assert "is not there" in job.error
    for filters, count in (
        (SuspendedFilter(tenant_id="acme"), 1),
        (SuspendedFilter(job_type="fetch"), 3),
        (SuspendedFilter(job_type="other"), 0),
        (SuspendedFilter(error="IS NOT"), 3),
        (SuspendedFilter(error_code=job.error_code), 3),
        (SuspendedFilter(error_code="OTHER"), 0),
        (SuspendedFilter(since=job.created_at), 1),
    ):
        assert len((await suspended.list(VIEWER, filters)).jobs) == count, filters
    one = await suspended.list(VIEWER, EVERY, 1)
    assert [job.job_id for job in one.jobs] == [third]
    assert one.cursor is not None
    assert {job.job_id for job in (await suspended.list(VIEWER, EVERY, 5, one.cursor)).jobs} == {first, second}


async def test_a_resumed_job_has_fresh_retries_and_its_history(deployment: SampleDeployment) -> None:
    (job_id,) = await deployment.make_suspended()
    report = await deployment.operations.suspended.resume(ADA, [job_id], reason="it is there now")
    assert (report.matched, report.done, report.failed) == (1, 1, 0)
    info = await deployment.info(job_id)
    assert (info.state, info.meta.retry_count, len(info.meta.history)) == (State.QUEUED, 0, 1)
    deployment.broken = False
    await deployment.run()
    assert (await deployment.info(job_id)).state is State.SUCCEEDED
    (entry,) = await deployment.audit_log("operator.resume")
    assert (entry.actor, entry.reason, entry.target, entry.target_id) == ("ada", "it is there now", "job", job_id)
    assert "suspended" in entry.before.text
    assert "queued" in entry.after.text


async def test_a_discard_needs_a_reason(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    (job_id,) = await deployment.make_suspended()
    with pytest.raises(InvalidOption, match="reason"):
        await suspended.discard(ADA, [job_id], reason=" ")
    report = await suspended.discard(LOCAL, [job_id], reason="customer withdrew")
    assert report.done == 1
    info = await deployment.info(job_id)
    assert info.state is State.CANCELLED
    assert info.failure is not None
    assert "customer withdrew" in info.failure.message
    (entry,) = await deployment.audit_log("operator.discard_suspended")
    assert (entry.actor, entry.reason) == (LOCAL.name, "customer withdrew")


async def test_a_bulk_resume_has_a_dry_run(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    ids = await deployment.make_suspended(4)
    (other,) = await deployment.make_suspended(1, queue="other")
    filters = SuspendedFilter(queues=frozenset({"default"}))
    dry = await suspended.resume(ADA, filters, reason="", dry_run=True)
    assert (dry.matched, dry.dry_run, dry.results) == (4, True, [])
    assert (await deployment.info(ids[0])).state is State.SUSPENDED
    report = await suspended.resume(ADA, filters, reason="outage over")
    assert {result.id for result in report.results if result.done} == set(ids)
    await deployment.wait_caught_up()
    assert (await suspended.discard(ADA, EVERY, reason="old", dry_run=True)).matched == 1
    assert (await suspended.discard(ADA, EVERY, reason="old")).done == 1
    assert (await deployment.info(other, "other")).state is State.CANCELLED


async def test_each_job_has_its_own_result(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    good, ended = await deployment.make_suspended(2)
    await suspended.discard(ADA, [ended], reason="old")
    report = await suspended.resume(ADA, [good, "no-such-id", ended, good], reason="")
    codes = {result.id: result.code for result in report.results}
    assert codes == {good: "", "no-such-id": UnknownJob.code, ended: TransitionInvalid.code}
    assert (report.matched, report.done, report.failed) == (3, 1, 2)
    with pytest.raises(UnknownJob):
        await suspended.resume(ADA, ["no-such-id"], reason="", dry_run=True)
    with pytest.raises(TransitionInvalid):
        await suspended.resume(ADA, [ended], reason="", dry_run=True)


async def test_suspended_jobs_of_other_tenants_are_not_visible(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    (theirs,) = await deployment.make_suspended(1, tenant_id="globex")
    assert (await suspended.list(OF_ACME)).jobs == []
    assert (await suspended.list(OF_ACME, SuspendedFilter(tenant_id="globex"))).jobs == []
    for operation in (suspended.resume, suspended.discard):
        assert (await operation(OF_ACME, EVERY, reason="r")).matched == 0
        (result,) = (await operation(OF_ACME, [theirs], reason="r")).results
        (unknown,) = (await operation(OF_ACME, ["no-such-id"], reason="r")).results
        assert (result.done, result.code) == (False, UnknownJob.code)
        assert result.message.replace(theirs, "no-such-id") == unknown.message
        with pytest.raises(UnknownJob):
            await operation(OF_ACME, [theirs], reason="r", dry_run=True)
    assert (await deployment.info(theirs)).state is State.SUSPENDED


async def test_changes_need_the_operator_role(deployment: SampleDeployment) -> None:
    suspended = deployment.operations.suspended
    (job_id,) = await deployment.make_suspended()
    for principal in (VIEWER, APPROVER):
        attempts: list[Any] = [
            suspended.resume(principal, [job_id], reason="r"),
            suspended.resume(principal, EVERY, reason="r", dry_run=True),
            suspended.discard(principal, EVERY, reason="r"),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt


@pytest.mark.redis
async def test_without_a_ledger_suspended_jobs_are_read_from_the_engine(without_ledger: SampleDeployment) -> None:
    from holdfast.testing import drain

    jobs = [await without_ledger.fetch.submit() for _ in range(3)]
    other = await without_ledger.fetch.options(queue="other").submit()
    await drain(without_ledger.app)
    suspended = without_ledger.operations.suspended
    assert {job.job_id for job in (await suspended.list(LOCAL)).jobs} == {job.id for job in [*jobs, other]}
    assert len((await suspended.list(LOCAL, EVERY, 2)).jobs) == 2
    for filters, count in (
        (SuspendedFilter(queues=frozenset({"other"})), 1),
        (SuspendedFilter(error="is not THERE"), 4),
        (SuspendedFilter(tenant_id="acme"), 0),
    ):
        assert len((await suspended.list(LOCAL, filters)).jobs) == count
    with pytest.raises(NoLedger):
        await suspended.list(LOCAL, EVERY, 2, "cursor")
    assert (await suspended.resume(LOCAL, [jobs[0].id], reason="")).done == 1
    assert (await suspended.resume(LOCAL, EVERY, reason="", dry_run=True)).matched == 3
    assert (await suspended.discard(LOCAL, EVERY, reason="old")).done == 3
    assert [await job.state() for job in jobs] == [State.QUEUED, State.CANCELLED, State.CANCELLED]
