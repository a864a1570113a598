"""What people do to many at once, and what they are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from holdfast import Context, Fatal, Holdfast
from holdfast.core.states import State
from holdfast.errors import Conflict, IntakeRefused, TransitionInvalid, Unavailable
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.operator_filters import AuditFilter, DeadLetterFilter
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.operators import ANN, BOB, letter_of
from tests.crash_points.scenarios.scenario import (
    QUEUE,
    Step,
    Story,
    World,
    check_alerts,
    hand_in,
    keep,
    later,
    state_of,
    watch,
    work,
)

_MENDED = DeadLetterFilter(job_type="mended")
_USELESS = DeadLetterFilter(job_type="useless")


class Many(Story):
    """A replay is refused by a queue that takes nothing; then letters are replayed and thrown away by a filter,
    suspended jobs resumed and given up, one is run ahead of its time, and an alert ends."""

    name = "many"
    settings: ClassVar[dict[str, Any]] = {"backlog_alert": 2}
    letters = ("mended-1", "mended-2", "useless")
    aside = ("back-1", "back-2", "away")

    def tasks(self, app: Holdfast, world: World) -> None:
        async def die(ctx: Context) -> str:
            if ctx.job_id in world.accepted.values():
                raise Fatal("dies")
            return "replayed"

        app.task(name="mended")(die)
        app.task(name="useless")(die)

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        for key in self.letters:
            await hand_in(process, world, key.partition("-")[0], key)
        for key in (*self.aside, "early"):
            await hand_in(process, world, "plain", key, delay=90)

    async def shut(self, process: Process, world: World) -> None:
        await self._control(process, intake_paused=True)

    async def refused(self, process: Process, world: World) -> None:
        """Nobody is to hand it in later."""
        letter = await letter_of(process, world, "mended-1")
        while True:
            try:
                await process.offices.dead_letters.replay(ANN, letter.dlq_id, reason="mended", expected=0)
            except (IntakeRefused, Conflict):
                # Or it was refused before, and the answer was lost.
                return
            except Unavailable:
                # Whether it is marked, nobody knows. Upkeep knows.
                continue

    async def reopen(self, process: Process, world: World) -> None:
        await self._control(process, intake_paused=False)

    async def _control(self, process: Process, **changes: Any) -> None:
        change = partial(process.offices.queues.update_control, ANN, QUEUE, reason="flood", verb="intake")
        await again(partial(change, **changes))

    async def replay(self, process: Process, world: World) -> None:
        await self._all(partial(process.offices.dead_letters.replay_many, ANN, _MENDED, reason="mended"))

    async def discard(self, process: Process, world: World) -> None:
        await self._all(partial(process.offices.dead_letters.discard_many, ANN, _USELESS, reason="of no use"))

    async def confirm(self, process: Process, world: World) -> None:
        await self._all(partial(process.offices.dead_letters.confirm_many, BOB, _USELESS))

    async def _all(self, act: Any) -> None:
        """As a person does who is told that some could not be done: once more, until there is nothing left to do."""
        while (await again(act)).matched:
            pass

    async def suspend(self, process: Process, world: World) -> None:
        for key in self.aside:
            with suppress(TransitionInvalid):
                suspend = partial(process.offices.jobs.suspend, ANN, world.accepted[key], reason="wait")
                await again(suspend)

    async def resume(self, process: Process, world: World) -> None:
        await self._move(process, world, process.offices.suspended.resume, "back")

    async def give_up(self, process: Process, world: World) -> None:
        await self._move(process, world, process.offices.suspended.discard, "away")

    async def _move(self, process: Process, world: World, act: Any, which: str) -> None:
        keys = [key for key in self.aside if key.startswith(which)]
        while left := [key for key in keys if await state_of(process, world, key) is State.SUSPENDED]:
            with suppress(Unavailable):
                await act(ANN, [world.accepted[key] for key in left], reason="decided")

    async def hurry(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.jobs.expedite(ANN, world.accepted["early"], reason="now"))

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            watch,
            work,
            work,
            work,
            work,
            keep,
            keep,
            self.shut,
            self.refused,
            self.reopen,
            self.replay,
            self.discard,
            self.confirm,
            self.suspend,
            self.resume,
            self.give_up,
            self.hurry,
            work,
            work,
            keep,
            later,
            work,
            work,
            work,
            keep,
            watch,
        )

    async def check(self, process: Process, world: World) -> None:
        for key in self.letters:
            assert await state_of(process, world, key) is State.FAILED
            letter = await letter_of(process, world, key)
            if key.startswith("mended"):
                assert letter.replay_count >= 1, letter
            else:
                assert letter.status is DeadLetterStatus.DISCARDED, letter
        ends = {key: await state_of(process, world, key) for key in (*self.aside, "early")}
        done, gone = State.SUCCEEDED, State.CANCELLED
        assert ends == {"back-1": done, "back-2": done, "away": gone, "early": done}
        jobs = await process.ledger.queries.jobs(JobFilter(job_type="mended"), 50, None)
        assert sorted(job.state for job in jobs.jobs) == [State.FAILED, State.FAILED, State.SUCCEEDED, State.SUCCEEDED]
        refused = AuditFilter(types=frozenset({"operator.dlq_replay_refused"}))
        assert len((await process.offices.audit.list(ANN, refused)).entries) == 1, "a refusal is told once"
        await check_alerts(process, world)
