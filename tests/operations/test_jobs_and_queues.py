"""An operator's hand on jobs and queues: by the table, in the log, and never on another tenant's (H5, H6)."""

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
from tests.operations.deployment import ADA, ADMIN, APPROVER, BOB, LOCAL, OF_ACME, VIEWER, World, person

HOUR = timedelta(hours=1)


# Jobs ----------------------------------------------------------------------------------------------


async def test_a_job_is_found_without_its_queue(world: World) -> None:
    operating = world.offices.jobs
    # Not in the ledger yet, perhaps: the engine's queues are asked.
    job = await world.charge.options(queue="far").submit(1)
    assert (await operating.find(VIEWER, job.id)).queue == "far"
    await world.caught_up()
    view = await operating.find(VIEWER, job.id)
    assert (view.queue, view.state) == ("far", State.QUEUED)
    with pytest.raises(UnknownJob):
        await operating.find(VIEWER, "nobody")
    with pytest.raises(UnknownJob):
        await operating.find(VIEWER, job.id, "default")


async def test_a_job_that_the_engine_has_forgotten_is_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.broken = False
    job = await world.charge.submit(7)
    await world.run()

    async def forgotten(queue: str, job_ids: list[str]) -> list[None]:
        return [None] * len(job_ids)

    monkeypatch.setattr(world.app.engine, "get", forgotten)
    view = await world.offices.jobs.find(VIEWER, job.id)
    assert (view.state, view.result, view.payload) == (State.SUCCEEDED, b'"7 EUR"', b'{"amount":7}')


async def test_with_the_ledger_down_jobs_are_still_found_and_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.charge.submit(1)
    ledger = backend_of(world.app).ledger
    assert ledger is not None

    async def down(*_: Any) -> Any:
        raise LedgerUnavailable("the ledger does not answer")

    monkeypatch.setattr(ledger.queries, "job", down)
    assert await world.offices.jobs.cancel(ADA, job.id, reason="r") is State.QUEUED


async def test_every_move_is_in_the_log_with_before_and_after(world: World) -> None:
    operating = world.offices.jobs
    job = await world.charge.options(delay=HOUR).submit(1)
    assert await operating.expedite(ADA, job.id, reason="hurry") is State.QUEUED
    assert await operating.suspend(ADA, job.id, reason="wait") is State.QUEUED
    assert await operating.resume(BOB, job.id, reason="go") is State.SUSPENDED
    assert await operating.cancel(LOCAL, job.id, reason="withdrawn") is State.QUEUED
    told = [
        ("retry", ADA, "hurry"),
        ("suspend", ADA, "wait"),
        ("resume", BOB, "go"),
        ("cancel", LOCAL, "withdrawn"),
    ]
    for verb, who, why in told:
        (line,) = await world.log(f"operator.{verb}")
        assert (line.actor, line.reason, line.target, line.target_id, line.queue) == (
            who.name,
            why,
            "job",
            job.id,
            "default",
        )
        assert line.after is not None
    (cancelled,) = await world.log("operator.cancel")
    assert "queued" in cancelled.before.text
    assert "cancelled" in cancelled.after.text


async def test_illegal_moves_change_nothing_and_leave_no_line(world: World) -> None:
    operating = world.offices.jobs
    job = await world.charge.submit(1)
    await operating.cancel(ADA, job.id, reason="r")
    attempts: list[Any] = [
        operating.cancel(ADA, job.id, reason="again"),
        operating.resume(ADA, job.id, reason="again"),
        operating.suspend(ADA, job.id, reason="again"),
        operating.expedite(ADA, job.id, reason="again"),
        operating.discard(ADA, job.id, reason="again"),
    ]
    for attempt in attempts:
        with pytest.raises(TransitionInvalid):
            await attempt
    assert len(await world.log("operator.cancel")) == 1
    assert await world.log("operator.suspend") == []


async def test_the_state_that_was_seen_must_still_be(world: World) -> None:
    operating = world.offices.jobs
    job = await world.charge.submit(1)
    for act in (operating.cancel, operating.suspend, operating.expedite, operating.resume):
        with pytest.raises(TransitionInvalid):
            await act(ADA, job.id, reason="r", expected=State.RETRYING)
    assert (await world.view(job.id)).state is State.QUEUED
    with pytest.raises(InvalidOption, match="reason"):
        await operating.discard(ADA, job.id, reason="")


async def test_of_two_who_move_one_job_one_wins(world: World) -> None:
    operating = world.offices.jobs
    job = await world.charge.submit(1)
    ended = await asyncio.gather(
        *(operating.cancel(person(f"p{number}"), job.id, reason="r") for number in range(5)), return_exceptions=True
    )
    assert [outcome for outcome in ended if not isinstance(outcome, TransitionInvalid)] == [State.QUEUED]
    assert len(await world.log("operator.cancel")) == 1


async def test_another_tenants_job_is_not_there(world: World) -> None:
    operating = world.offices.jobs
    theirs = await world.charge.options(tenant_id="globex", delay=HOUR).submit(1)
    await world.caught_up()
    said = set()
    for job_id, queue in ((theirs.id, None), (theirs.id, "default"), ("nobody", None), ("nobody", "default")):
        attempts: list[Any] = [
            operating.find(OF_ACME, job_id, queue),
            operating.cancel(OF_ACME, job_id, queue=queue, reason="r"),
            operating.resume(OF_ACME, job_id, queue=queue, reason="r"),
            operating.suspend(OF_ACME, job_id, queue=queue, reason="r"),
            operating.discard(OF_ACME, job_id, queue=queue, reason="r"),
            operating.expedite(OF_ACME, job_id, queue=queue, reason="r"),
        ]
        for attempt in attempts:
            with pytest.raises(UnknownJob) as refused:
                await attempt
            said.add(str(refused.value).replace(job_id, "…"))
    assert len(said) == 1
    assert (await world.view(theirs.id)).state is State.QUEUED


async def test_roles(world: World) -> None:
    operating = world.offices.jobs
    job = await world.charge.options(delay=HOUR).submit(1)
    for someone in (VIEWER, APPROVER):
        assert (await operating.find(someone, job.id)).job_id == job.id
        attempts: list[Any] = [
            operating.cancel(someone, job.id, reason="r"),
            operating.resume(someone, job.id, reason="r"),
            operating.suspend(someone, job.id, reason="r"),
            operating.expedite(someone, job.id, reason="r"),
            world.offices.queues.update_control(someone, "default", reason="r", verb="pause", paused=True),
            world.offices.queues.update_tenant(someone, "default", "acme", reason="r", weight=2),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt


# Queues --------------------------------------------------------------------------------------------


async def test_controls_change_one_by_one_and_are_in_the_log(world: World) -> None:
    operating = world.offices.queues
    await world.charge.submit(1)
    await operating.update_control(ADA, "default", reason="moving", verb="pause", paused=True)
    await operating.update_control(BOB, "default", reason="slow", verb="limit", intake_limit=100)
    await operating.update_tenant(ADA, "default", "acme", reason="pays", weight=3)
    changed = await operating.update_tenant(ADA, "default", "acme", reason="pays", concurrency=2, intake_limit=5)
    wanted = QueueControl(
        paused=True, intake_limit=100, tenants={"acme": TenantControl(weight=3, concurrency=2, intake_limit=5)}
    )
    assert changed == wanted == await operating.control(ADA, "default") == await world.app.engine.get_control("default")
    (line,) = await world.log("operator.pause")
    assert (line.actor, line.reason, line.target, line.target_id) == ("ada", "moving", "queue", "default")
    assert not line.before.value.get("paused")
    assert line.after.value["paused"] is True
    assert len(await world.log("operator.tenant")) == 2
    back = await operating.update_tenant(
        ADA, "default", "acme", reason="", weight=1, concurrency=None, intake_limit=None
    )  # fmt: skip
    assert back.tenants == {}


async def test_no_change_is_no_line(world: World) -> None:
    operating = world.offices.queues
    await world.charge.submit(1)
    assert await operating.update_control(ADA, "default", reason="r", verb="unpause", paused=False) == QueueControl()
    assert await world.log("operator.unpause") == []


async def test_changes_of_one_moment_are_all_kept(world: World) -> None:
    await world.charge.submit(1)
    operating = world.offices.queues
    await asyncio.gather(
        operating.update_control(ADA, "default", reason="", verb="pause", paused=True),
        operating.update_control(BOB, "default", reason="", verb="limit", intake_limit=9),
        operating.update_control(BOB, "default", reason="", verb="concurrency", concurrency=4),
        *(operating.update_tenant(ADA, "default", f"t{number}", reason="", weight=2) for number in range(5)),
    )
    control = await world.app.engine.get_control("default")
    assert (control.paused, control.intake_limit, control.concurrency, len(control.tenants)) == (True, 9, 4, 5)


async def test_a_fight_over_controls_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def changed(queue: str, *_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        raise ControlChanged(queue)

    monkeypatch.setattr(world.app.engine, "set_control", changed)
    with pytest.raises(ControlChanged):
        await world.offices.queues.update_control(ADA, "default", reason="", verb="pause", paused=True)
    assert tries == 20


async def test_numbers_that_cannot_be_are_refused(world: World) -> None:
    operating = world.offices.queues
    for changes in ({"concurrency": -1}, {"intake_limit": -1}, {"backlog_alert": -1}):
        with pytest.raises(InvalidOption):
            await operating.update_control(ADA, "default", reason="", verb="limit", **changes)
    for weight in (0, -1):
        with pytest.raises(InvalidOption):
            await operating.update_tenant(ADA, "default", "acme", reason="", weight=weight)
    assert await world.app.engine.get_control("default") == QueueControl()


async def test_what_touches_every_tenant_needs_all_of_them(world: World) -> None:
    operating = world.offices.queues
    of_acme = person("ali", Role.ADMIN, "acme")
    attempts: list[Any] = [
        operating.update_control(of_acme, "default", reason="", verb="pause", paused=True),
        operating.update_tenant(of_acme, "default", "acme", reason="", weight=2),
        operating.workers(of_acme),
    ]
    for attempt in attempts:
        with pytest.raises(Forbidden):
            await attempt
    assert await operating.workers(VIEWER) == []


async def test_who_is_of_one_tenant_sees_its_part_of_the_queues(world: World) -> None:
    operating = world.offices.queues
    for number in range(3):
        await world.charge.options(tenant_id="globex").submit(number)
    await world.charge.options(tenant_id="globex", queue="theirs").submit(1)
    await world.charge.options(tenant_id="acme").submit(1)
    for tenant in ("acme", "globex"):
        await operating.update_tenant(ADA, "default", tenant, reason="", weight=2)
    await world.caught_up()
    (part,) = await operating.find(OF_ACME)
    assert (part.queue, part.states[State.QUEUED], part.backlog) == ("default", 1, 1)
    assert part.control.tenants == {"acme": TenantControl(weight=2)}
    hidden = (part.tenants, part.workers, part.pending, part.dead_letters, part.delayed, part.feed_entries)
    assert hidden == (None,) * 6
    assert await operating.find(OF_ACME, ["theirs"]) == []
    assert "globex" not in (await operating.control(OF_ACME, "default")).tenants
    whole = {view.queue: view for view in await operating.find(ADMIN)}
    assert (whole["default"].states[State.QUEUED], whole["theirs"].states[State.QUEUED]) == (4, 1)


async def test_the_log_shows_nothing_of_other_tenants_or_of_all(world: World) -> None:
    operating = world.offices.jobs
    theirs = await world.charge.options(tenant_id="globex").submit(1)
    ours = await world.charge.options(tenant_id="acme").submit(1)
    own = await world.charge.submit(1)
    for job in (theirs, ours, own):
        await operating.cancel(ADA, job.id, reason="r")
    await world.offices.queues.update_control(ADA, "default", reason="r", verb="pause", paused=True)
    await world.caught_up()
    assert [line.target_id for line in (await world.offices.audit.list(OF_ACME)).entries] == [ours.id]
    # A queue's controls are nobody's own, also not of the tenant that jobs have by default.
    of_default = person("dora", Role.VIEWER, "default")
    assert [line.target_id for line in (await world.offices.audit.list(of_default)).entries] == [own.id]
    assert len((await world.offices.audit.list(VIEWER)).entries) == 4


@pytest.mark.redis
async def test_without_a_ledger_what_can_be_done_is_done(alone: World) -> None:
    offices = alone.offices
    job = await alone.charge.options(queue="far", delay=HOUR).submit(1)
    assert (await offices.jobs.find(LOCAL, job.id)).queue == "far"
    assert await offices.jobs.expedite(LOCAL, job.id, reason="") is State.QUEUED
    assert await offices.jobs.cancel(LOCAL, job.id, reason="") is State.QUEUED
    assert (await offices.queues.update_control(LOCAL, "far", reason="", verb="pause", paused=True)).paused
    assert [view.queue for view in await offices.queues.find(LOCAL)] == ["far"]
    with pytest.raises(UnknownJob):
        await offices.jobs.find(LOCAL, "nobody")
    for need in (lambda: offices.tokens, lambda: offices.dead_letters, lambda: offices.approvals):
        with pytest.raises(NoLedger, match="HOLDFAST_LEDGER"):
            need()
    with pytest.raises(NoLedger):
        await AuditOperations(None).list(LOCAL)
    with pytest.raises(NoLedger):
        await offices.queues.find(OF_ACME)
