"""Operator actions on jobs and queues: legal moves only, in the audit log, within the operator's tenants (H5, H6)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.principal import Role
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import (
    ControlChanged,
    Forbidden,
    InvalidOption,
    LedgerUnavailable,
    NoLedger,
    TransitionInvalid,
    UnknownJob,
)
from holdfast.execution.backend import backend_of
from holdfast.operations.access import AuditOperations
from tests.operations.deployment import ADA, ADMIN, APPROVER, BOB, LOCAL, OF_ACME, VIEWER, SampleDeployment, principal

HOUR = timedelta(hours=1)


# Jobs ----------------------------------------------------------------------------------------------


async def test_a_job_is_found_without_its_queue_name(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    # The ledger may not have the job yet; then the engine's queues are searched.
    job = await deployment.charge.options(queue="far").submit(1)
    assert (await jobs.find(VIEWER, job.id)).queue == "far"
    await deployment.wait_caught_up()
    info = await jobs.find(VIEWER, job.id)
    assert (info.queue, info.state) == ("far", State.QUEUED)
    with pytest.raises(UnknownJob):
        await jobs.find(VIEWER, "no-such-id")
    with pytest.raises(UnknownJob):
        await jobs.find(VIEWER, job.id, "default")


async def test_a_job_pruned_from_the_engine_is_found_in_the_ledger(
    deployment: SampleDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.broken = False
    job = await deployment.charge.submit(7)
    await deployment.run()

    async def lose(queue: str, job_ids: list[str]) -> list[None]:
        return [None] * len(job_ids)

    monkeypatch.setattr(deployment.app.engine, "get", lose)
    info = await deployment.operations.jobs.find(VIEWER, job.id)
    assert (info.state, info.result, info.payload) == (State.SUCCEEDED, b'"7 EUR"', b'{"amount":7}')


async def test_with_the_ledger_down_jobs_are_still_found_and_cancelled(
    deployment: SampleDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await deployment.charge.submit(1)
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None

    async def down(*_: Any) -> Any:
        raise LedgerUnavailable("the ledger does not answer")

    monkeypatch.setattr(ledger.queries, "job", down)
    assert await deployment.operations.jobs.cancel(ADA, job.id, reason="r") is State.QUEUED


async def test_every_move_is_audited_with_before_and_after(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    job = await deployment.charge.options(delay=HOUR).submit(1)
    assert await jobs.expedite(ADA, job.id, reason="urgent") is State.QUEUED
    assert await jobs.suspend(ADA, job.id, reason="wait") is State.QUEUED
    assert await jobs.resume(BOB, job.id, reason="go") is State.SUSPENDED
    assert await jobs.cancel(LOCAL, job.id, reason="withdrawn") is State.QUEUED
    expected = [
        ("retry", ADA, "urgent"),
        ("suspend", ADA, "wait"),
        ("resume", BOB, "go"),
        ("cancel", LOCAL, "withdrawn"),
    ]
    for verb, actor, reason in expected:
        (entry,) = await deployment.audit_log(f"operator.{verb}")
        assert (entry.actor, entry.reason, entry.target, entry.target_id, entry.queue) == (
            actor.name,
            reason,
            "job",
            job.id,
            "default",
        )
        assert entry.after is not None
    (cancelled,) = await deployment.audit_log("operator.cancel")
    assert "queued" in cancelled.before.text
    assert "cancelled" in cancelled.after.text


async def test_illegal_moves_change_nothing_and_leave_no_audit_entry(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    job = await deployment.charge.submit(1)
    await jobs.cancel(ADA, job.id, reason="r")
    attempts: list[Any] = [
        jobs.cancel(ADA, job.id, reason="again"),
        jobs.resume(ADA, job.id, reason="again"),
        jobs.suspend(ADA, job.id, reason="again"),
        jobs.expedite(ADA, job.id, reason="again"),
        jobs.discard(ADA, job.id, reason="again"),
    ]
    for attempt in attempts:
        with pytest.raises(TransitionInvalid):
            await attempt
    assert len(await deployment.audit_log("operator.cancel")) == 1
    assert await deployment.audit_log("operator.suspend") == []


async def test_a_move_from_an_outdated_state_is_refused(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    job = await deployment.charge.submit(1)
    for operation in (jobs.cancel, jobs.suspend, jobs.expedite, jobs.resume):
        with pytest.raises(TransitionInvalid):
            await operation(ADA, job.id, reason="r", expected=State.RETRYING)
    assert (await deployment.info(job.id)).state is State.QUEUED
    with pytest.raises(InvalidOption, match="reason"):
        await jobs.discard(ADA, job.id, reason="")


async def test_one_of_several_concurrent_moves_wins(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    job = await deployment.charge.submit(1)
    ended = await asyncio.gather(
        *(jobs.cancel(principal(f"p{number}"), job.id, reason="r") for number in range(5)), return_exceptions=True
    )
    assert [outcome for outcome in ended if not isinstance(outcome, TransitionInvalid)] == [State.QUEUED]
    assert len(await deployment.audit_log("operator.cancel")) == 1


async def test_jobs_of_other_tenants_are_not_visible(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    theirs = await deployment.charge.options(tenant_id="globex", delay=HOUR).submit(1)
    await deployment.wait_caught_up()
    messages = set()
    for job_id, queue in ((theirs.id, None), (theirs.id, "default"), ("no-such-id", None), ("no-such-id", "default")):
        attempts: list[Any] = [
            jobs.find(OF_ACME, job_id, queue),
            jobs.cancel(OF_ACME, job_id, queue=queue, reason="r"),
            jobs.resume(OF_ACME, job_id, queue=queue, reason="r"),
            jobs.suspend(OF_ACME, job_id, queue=queue, reason="r"),
            jobs.discard(OF_ACME, job_id, queue=queue, reason="r"),
            jobs.expedite(OF_ACME, job_id, queue=queue, reason="r"),
        ]
        for attempt in attempts:
            with pytest.raises(UnknownJob) as refused:
                await attempt
            messages.add(str(refused.value).replace(job_id, "…"))
    assert len(messages) == 1
    assert (await deployment.info(theirs.id)).state is State.QUEUED


async def test_changes_need_the_operator_role(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    job = await deployment.charge.options(delay=HOUR).submit(1)
    for actor in (VIEWER, APPROVER):
        assert (await jobs.find(actor, job.id)).job_id == job.id
        attempts: list[Any] = [
            jobs.cancel(actor, job.id, reason="r"),
            jobs.resume(actor, job.id, reason="r"),
            jobs.suspend(actor, job.id, reason="r"),
            jobs.expedite(actor, job.id, reason="r"),
            deployment.operations.queues.update_control(actor, "default", reason="r", verb="pause", paused=True),
            deployment.operations.queues.update_tenant(actor, "default", "acme", reason="r", weight=2),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt


# Queues --------------------------------------------------------------------------------------------


async def test_controls_change_one_by_one_and_are_audited(deployment: SampleDeployment) -> None:
    queues = deployment.operations.queues
    await deployment.charge.submit(1)
    await queues.update_control(ADA, "default", reason="moving", verb="pause", paused=True)
    await queues.update_control(BOB, "default", reason="slow", verb="limit", intake_limit=100)
    await queues.update_tenant(ADA, "default", "acme", reason="pays", weight=3)
    changed = await queues.update_tenant(ADA, "default", "acme", reason="pays", concurrency=2, intake_limit=5)
    expected = QueueControl(
        paused=True, intake_limit=100, tenants={"acme": TenantControl(weight=3, concurrency=2, intake_limit=5)}
    )
    assert (
        changed
        == expected
        == await queues.control(ADA, "default")
        == await deployment.app.engine.get_control("default")
    )
    (entry,) = await deployment.audit_log("operator.pause")
    assert (entry.actor, entry.reason, entry.target, entry.target_id) == ("ada", "moving", "queue", "default")
    assert not entry.before.value.get("paused")
    assert entry.after.value["paused"] is True
    assert len(await deployment.audit_log("operator.tenant")) == 2
    back = await queues.update_tenant(
        ADA, "default", "acme", reason="", weight=1, concurrency=None, intake_limit=None
    )  # fmt: skip
    assert back.tenants == {}


async def test_an_update_without_a_change_leaves_no_audit_entry(deployment: SampleDeployment) -> None:
    queues = deployment.operations.queues
    await deployment.charge.submit(1)
    assert await queues.update_control(ADA, "default", reason="r", verb="unpause", paused=False) == QueueControl()
    assert await deployment.audit_log("operator.unpause") == []


async def test_concurrent_updates_are_all_kept(deployment: SampleDeployment) -> None:
    await deployment.charge.submit(1)
    queues = deployment.operations.queues
    await asyncio.gather(
        queues.update_control(ADA, "default", reason="", verb="pause", paused=True),
        queues.update_control(BOB, "default", reason="", verb="limit", intake_limit=9),
        queues.update_control(BOB, "default", reason="", verb="concurrency", concurrency=4),
        *(queues.update_tenant(ADA, "default", f"t{number}", reason="", weight=2) for number in range(5)),
    )
    control = await deployment.app.engine.get_control("default")
    assert (control.paused, control.intake_limit, control.concurrency, len(control.tenants)) == (True, 9, 4, 5)


async def test_an_update_fails_after_repeated_conflicts(
    deployment: SampleDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def conflict(queue: str, *_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise ControlChanged(queue)

    monkeypatch.setattr(deployment.app.engine, "set_control", conflict)
    with pytest.raises(ControlChanged):
        await deployment.operations.queues.update_control(ADA, "default", reason="", verb="pause", paused=True)
    assert calls == 20


async def test_invalid_limits_are_refused(deployment: SampleDeployment) -> None:
    queues = deployment.operations.queues
    for changes in ({"concurrency": -1}, {"intake_limit": -1}, {"backlog_alert": -1}):
        with pytest.raises(InvalidOption):
            await queues.update_control(ADA, "default", reason="", verb="limit", **changes)
    for weight in (0, -1):
        with pytest.raises(InvalidOption):
            await queues.update_tenant(ADA, "default", "acme", reason="", weight=weight)
    assert await deployment.app.engine.get_control("default") == QueueControl()


async def test_actions_on_a_whole_queue_need_all_tenants(deployment: SampleDeployment) -> None:
    queues = deployment.operations.queues
    acme_admin = principal("ali", Role.ADMIN, "acme")
    attempts: list[Any] = [
        queues.update_control(acme_admin, "default", reason="", verb="pause", paused=True),
        queues.update_tenant(acme_admin, "default", "acme", reason="", weight=2),
        queues.workers(acme_admin),
    ]
    for attempt in attempts:
        with pytest.raises(Forbidden):
            await attempt
    assert await queues.workers(VIEWER) == []


async def test_a_principal_of_one_tenant_sees_only_its_part_of_a_queue(deployment: SampleDeployment) -> None:
    queues = deployment.operations.queues
    for number in range(3):
        await deployment.charge.options(tenant_id="globex").submit(number)
    await deployment.charge.options(tenant_id="globex", queue="theirs").submit(1)
    await deployment.charge.options(tenant_id="acme").submit(1)
    for tenant in ("acme", "globex"):
        await queues.update_tenant(ADA, "default", tenant, reason="", weight=2)
    await deployment.wait_caught_up()
    (part,) = await queues.find(OF_ACME)
    assert (part.queue, part.states[State.QUEUED], part.backlog) == ("default", 1, 1)
    assert part.control.tenants == {"acme": TenantControl(weight=2)}
    hidden = (part.tenants, part.workers, part.pending, part.dead_letters, part.delayed, part.feed_entries)
    assert hidden == (None,) * 6
    assert await queues.find(OF_ACME, ["theirs"]) == []
    assert "globex" not in (await queues.control(OF_ACME, "default")).tenants
    whole = {info.queue: info for info in await queues.find(ADMIN)}
    assert (whole["default"].states[State.QUEUED], whole["theirs"].states[State.QUEUED]) == (4, 1)


async def test_the_audit_log_hides_other_tenants_and_queue_controls(deployment: SampleDeployment) -> None:
    jobs = deployment.operations.jobs
    theirs = await deployment.charge.options(tenant_id="globex").submit(1)
    ours = await deployment.charge.options(tenant_id="acme").submit(1)
    own = await deployment.charge.submit(1)
    for job in (theirs, ours, own):
        await jobs.cancel(ADA, job.id, reason="r")
    await deployment.operations.queues.update_control(ADA, "default", reason="r", verb="pause", paused=True)
    await deployment.wait_caught_up()
    assert [entry.target_id for entry in (await deployment.operations.audit.list(OF_ACME)).entries] == [ours.id]
    # A queue's controls belong to no tenant, not even to the default one.
    default_viewer = principal("dora", Role.VIEWER, "default")
    assert [entry.target_id for entry in (await deployment.operations.audit.list(default_viewer)).entries] == [own.id]
    assert len((await deployment.operations.audit.list(VIEWER)).entries) == 4


@pytest.mark.redis
async def test_without_a_ledger_the_engine_serves_what_it_can(without_ledger: SampleDeployment) -> None:
    operations = without_ledger.operations
    job = await without_ledger.charge.options(queue="far", delay=HOUR).submit(1)
    assert (await operations.jobs.find(LOCAL, job.id)).queue == "far"
    assert await operations.jobs.expedite(LOCAL, job.id, reason="") is State.QUEUED
    assert await operations.jobs.cancel(LOCAL, job.id, reason="") is State.QUEUED
    assert (await operations.queues.update_control(LOCAL, "far", reason="", verb="pause", paused=True)).paused
    assert [info.queue for info in await operations.queues.find(LOCAL)] == ["far"]
    with pytest.raises(UnknownJob):
        await operations.jobs.find(LOCAL, "no-such-id")
    for require in (lambda: operations.tokens, lambda: operations.dead_letters, lambda: operations.approvals):
        with pytest.raises(NoLedger, match="HOLDFAST_LEDGER"):
            require()
    with pytest.raises(NoLedger):
        await AuditOperations(None).list(LOCAL)
    with pytest.raises(NoLedger):
        await operations.queues.find(OF_ACME)
