"""Operators handle dead letters, approvals, suspended and cancelled jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from holdfast import Context, Fatal, Holdfast, RequireApproval
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.core.states import State
from holdfast.errors import Conflict, TransitionInvalid, Unavailable
from holdfast.ledger.port.operators import ApprovalStatus, DeadLetterStatus
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.scenario import (
    RunRecord,
    Scenario,
    Step,
    expire_leases,
    get_state,
    run_upkeep,
    submit_until_accepted,
    work,
)

_EVERYTHING: Final = frozenset({ALL_TENANTS})
ANN: Final = Principal(name="ann", role=Role.ADMIN, tenants=_EVERYTHING)
BOB: Final = Principal(name="bob", role=Role.ADMIN, tenants=_EVERYTHING)


async def wait_dead_letter(process: Process, record: RunRecord, key: str) -> Any:
    """Wait until the ledger has the dead letter."""
    for _ in range(20):
        rows = (await retry_call(lambda: process.operations.dead_letters.list(ANN, DeadLetterFilter()))).dead_letters
        for row in rows:
            if row.job_id == record.accepted[key]:
                return row
        await process.work()
        await process.project()
    raise AssertionError(f"the dead letter of {key} is not there")


class DeadLetters(Scenario):
    """Two dead letters: one is replayed, one is discarded by two operators."""

    name = "dead_letters"

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="fail")
        async def fail(ctx: Context, key: str) -> str:
            if key in record.accepted and record.accepted[key] == ctx.job_id:
                raise Fatal("boom")
            return "replayed"

    async def submit(self, process: Process, record: RunRecord) -> None:
        for key in ("replayed", "discarded"):
            submit = process.app.tasks["fail"].options(idempotency_key=key).submit
            job = await retry_call(partial(submit, key))
            record.accept(key, job.id)

    async def replay(self, process: Process, record: RunRecord) -> None:
        """Repeat until it is marked as replayed. A call that found the engine unreachable has left the mark."""
        while not (dead_letter := await wait_dead_letter(process, record, "replayed")).replay_count:
            with suppress(Conflict, Unavailable):
                await process.operations.dead_letters.replay(ANN, dead_letter.dlq_id, reason="fixed")

    async def discard(self, process: Process, record: RunRecord) -> None:
        dead_letter = await wait_dead_letter(process, record, "discarded")
        if dead_letter.status is DeadLetterStatus.OPEN:
            with suppress(Conflict):
                await retry_call(lambda: process.operations.dead_letters.discard(ANN, dead_letter.dlq_id, "of no use"))

    async def confirm(self, process: Process, record: RunRecord) -> None:
        dead_letter = await wait_dead_letter(process, record, "discarded")
        if dead_letter.status is not DeadLetterStatus.DISCARDED:
            with suppress(Conflict):
                await retry_call(lambda: process.operations.dead_letters.confirm(BOB, dead_letter.dlq_id))

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            work,
            work,
            run_upkeep,
            run_upkeep,
            self.replay,
            self.discard,
            self.confirm,
            work,
            run_upkeep,
        )

    async def check(self, process: Process, record: RunRecord) -> None:
        for key in ("replayed", "discarded"):
            assert await get_state(process, record, key) is State.FAILED
        replayed = await wait_dead_letter(process, record, "replayed")
        assert replayed.replay_count == 1, replayed
        assert (await wait_dead_letter(process, record, "discarded")).status is DeadLetterStatus.DISCARDED
        jobs = await process.ledger.queries.jobs(JobFilter(), 50, None)
        assert sorted(job.state for job in jobs.jobs) == [State.FAILED, State.FAILED, State.SUCCEEDED]


class Approvals(Scenario):
    """One job is approved, one is rejected, one requests approval while it runs, one is suspended and resumed, and one
    is cancelled."""

    name = "approvals"
    repeated = frozenset({"risky"})

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        app.guard.rule("risky", task="risky", then=RequireApproval("it is risky"))

        @app.task(name="risky")
        async def risky() -> str:
            return record.perform("risky")

        @app.task(name="requesting")
        async def requesting(ctx: Context) -> None:
            await ctx.approval("continue")

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "requesting", "requesting")
        await submit_until_accepted(process, record, "risky", "approved")
        await submit_until_accepted(process, record, "risky", "rejected")
        for key in ("suspended", "cancelled"):
            await submit_until_accepted(process, record, "plain", key, delay=3)

    async def vote(self, process: Process, record: RunRecord) -> None:
        rows = (await retry_call(lambda: process.operations.approvals.list(BOB))).approvals
        for row in rows:
            if row.status is ApprovalStatus.REQUESTED:
                approve = row.job_id != record.accepted["rejected"]
                with suppress(Conflict):
                    vote = partial(process.operations.approvals.vote, BOB, row.approval_id)
                    await retry_call(partial(vote, approve=approve, reason="seen"))

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        # A request that was not listed before is answered once it is.
        await self.vote(process, record)

    async def suspend(self, process: Process, record: RunRecord) -> None:
        with suppress(TransitionInvalid):
            await retry_call(lambda: process.operations.jobs.suspend(ANN, record.accepted["suspended"], reason="wait"))
        assert await get_state(process, record, "suspended") is State.SUSPENDED

    async def cancel(self, process: Process, record: RunRecord) -> None:
        with suppress(TransitionInvalid):
            await retry_call(lambda: process.operations.jobs.cancel(ANN, record.accepted["cancelled"], reason="no"))
        assert await get_state(process, record, "cancelled") is State.CANCELLED

    async def resume(self, process: Process, record: RunRecord) -> None:
        with suppress(TransitionInvalid):
            await retry_call(
                lambda: process.operations.jobs.resume(ANN, record.accepted["suspended"], reason="continue")
            )
        assert await get_state(process, record, "suspended") is not State.SUSPENDED

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            run_upkeep,
            self.vote,
            self.suspend,
            self.cancel,
            run_upkeep,
            work,
            self.resume,
            expire_leases,
            run_upkeep,
            work,
            run_upkeep,
        )

    async def check(self, process: Process, record: RunRecord) -> None:
        states = {key: await get_state(process, record, key) for key in record.accepted}
        assert states == {
            "requesting": State.SUCCEEDED,
            "approved": State.SUCCEEDED,
            "rejected": State.CANCELLED,
            "suspended": State.SUCCEEDED,
            "cancelled": State.CANCELLED,
        }
        assert record.effects["risky"] >= 1
