"""What people do."""

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
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.scenario import Step, Story, World, hand_in, keep, later, state_of, work

_EVERYTHING: Final = frozenset({ALL_TENANTS})
ANN: Final = Principal(name="ann", role=Role.ADMIN, tenants=_EVERYTHING)
BOB: Final = Principal(name="bob", role=Role.ADMIN, tenants=_EVERYTHING)


async def letter_of(process: Process, world: World, key: str) -> Any:
    """The dead letter, once the ledger has it."""
    for _ in range(20):
        rows = (await again(lambda: process.offices.dead_letters.list(ANN, DeadLetterFilter()))).dead_letters
        for row in rows:
            if row.job_id == world.accepted[key]:
                return row
        await process.work()
        await process.project()
    raise AssertionError(f"the dead letter of {key} is not there")


class Letters(Story):
    """Two jobs die. One letter is replayed, the other thrown away by two people."""

    name = "letters"

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="die")
        async def die(ctx: Context, which: str) -> str:
            if which in world.accepted and world.accepted[which] == ctx.job_id:
                raise Fatal("dies")
            return "replayed"

    async def submit(self, process: Process, world: World) -> None:
        for which in ("replayed", "discarded"):
            submit = process.app.tasks["die"].options(idempotency_key=which).submit
            job = await again(partial(submit, which))
            world.accept(which, job.id)

    async def replay(self, process: Process, world: World) -> None:
        """Until it is seen to be replayed: a mark is enough, whoever is told that the engine is away has left one."""
        while not (letter := await letter_of(process, world, "replayed")).replay_count:
            with suppress(Conflict, Unavailable):
                await process.offices.dead_letters.replay(ANN, letter.dlq_id, reason="mended", expected=0)

    async def discard(self, process: Process, world: World) -> None:
        letter = await letter_of(process, world, "discarded")
        if letter.status is DeadLetterStatus.OPEN:
            with suppress(Conflict):
                await again(lambda: process.offices.dead_letters.discard(ANN, letter.dlq_id, "of no use"))

    async def confirm(self, process: Process, world: World) -> None:
        letter = await letter_of(process, world, "discarded")
        if letter.status is not DeadLetterStatus.DISCARDED:
            with suppress(Conflict):
                await again(lambda: process.offices.dead_letters.confirm(BOB, letter.dlq_id))

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, work, keep, keep, self.replay, self.discard, self.confirm, work, keep)

    async def check(self, process: Process, world: World) -> None:
        for which in ("replayed", "discarded"):
            assert await state_of(process, world, which) is State.FAILED
        replayed = await letter_of(process, world, "replayed")
        assert replayed.replay_count == 1, replayed
        assert (await letter_of(process, world, "discarded")).status is DeadLetterStatus.DISCARDED
        jobs = await process.ledger.queries.jobs(JobFilter(), 50, None)
        assert sorted(job.state for job in jobs.jobs) == [State.FAILED, State.FAILED, State.SUCCEEDED]


class Deciding(Story):
    """One job needs a yes, one gets a no, one asks while it runs, one is suspended and resumed, one is cancelled."""

    name = "people"
    repeated = frozenset({"risky"})

    def tasks(self, app: Holdfast, world: World) -> None:
        app.guard.rule("risky", task="risky", then=RequireApproval("it is risky"))

        @app.task(name="risky")
        async def risky() -> str:
            return world.act("risky")

        @app.task(name="asking")
        async def asking(ctx: Context) -> None:
            await ctx.approval("go on")

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "asking", "asking")
        await hand_in(process, world, "risky", "yes")
        await hand_in(process, world, "risky", "no")
        for key in ("aside", "away"):
            await hand_in(process, world, "plain", key, delay=3)

    async def vote(self, process: Process, world: World) -> None:
        rows = (await again(lambda: process.offices.approvals.list(BOB))).approvals
        for row in rows:
            if row.status is ApprovalStatus.REQUESTED:
                approve = row.job_id != world.accepted["no"]
                with suppress(Conflict):
                    vote = partial(process.offices.approvals.vote, BOB, row.approval_id)
                    await again(partial(vote, approve=approve, reason="seen"))

    async def attend(self, process: Process, world: World) -> None:
        # Who has not seen the question yet answers when it is there.
        await self.vote(process, world)

    async def suspend(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.jobs.suspend(ANN, world.accepted["aside"], reason="wait"))
        assert await state_of(process, world, "aside") is State.SUSPENDED

    async def cancel(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.jobs.cancel(ANN, world.accepted["away"], reason="no"))
        assert await state_of(process, world, "away") is State.CANCELLED

    async def resume(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.jobs.resume(ANN, world.accepted["aside"], reason="go on"))
        assert await state_of(process, world, "aside") is not State.SUSPENDED

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            keep,
            self.vote,
            self.suspend,
            self.cancel,
            keep,
            work,
            self.resume,
            later,
            keep,
            work,
            keep,
        )

    async def check(self, process: Process, world: World) -> None:
        ends = {key: await state_of(process, world, key) for key in world.accepted}
        assert ends == {
            "asking": State.SUCCEEDED,
            "yes": State.SUCCEEDED,
            "no": State.CANCELLED,
            "aside": State.SUCCEEDED,
            "away": State.CANCELLED,
        }
        assert world.acted["risky"] >= 1
