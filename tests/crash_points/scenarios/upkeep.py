"""The rest of what people and upkeep do with a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from holdfast import Context, Fatal, Holdfast, RequireApproval
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.core.states import State
from holdfast.errors import Conflict, TransitionInvalid
from holdfast.ledger.port.messages import TriggerHeartbeat
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.verification.chaos.operators import resolve_effect
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.operators import ANN, BOB, letter_of
from tests.crash_points.scenarios.scenario import (
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

_TENANT = "default"


class Minding(Story):
    """A person looks at an effect in doubt, a letter is kept, an approval comes too late, a job sleeps, a token is
    revoked, a trigger paused; a backlog is told of, and what has ended is forgotten."""

    name = "office"
    forgets = True
    settings: ClassVar[dict[str, Any]] = {"backlog_alert": 1}

    def tasks(self, app: Holdfast, world: World) -> None:
        app.guard.rule(
            "asked", task="asked", then=RequireApproval("nobody answers", deadline=timedelta(milliseconds=1))
        )

        async def do() -> str:
            world.act("once")
            raise ConnectionError("no answer")

        @app.task(name="doubtful")
        async def doubtful(ctx: Context) -> str:
            return await ctx.effect("once", do)

        @app.task(name="doomed")
        async def doomed() -> None:
            raise Fatal("dies")

        @app.task(name="patient")
        async def patient(ctx: Context) -> None:
            await ctx.sleep(1)

        @app.task(name="asked")
        async def asked() -> None:
            raise AssertionError("nobody has said yes")

    async def submit(self, process: Process, world: World) -> None:
        for task in ("doubtful", "doomed", "patient", "asked"):
            await hand_in(process, world, task, task)

    async def look_outside(self, process: Process, world: World) -> None:
        """A person settles the doubt, once there is one."""
        if await state_of(process, world, "doubtful") is State.SUSPENDED:
            happened = bool(world.acted["once"])
            await again(lambda: resolve_effect(process.app, _TENANT, "once", done=happened))
            with suppress(TransitionInvalid):
                resume = process.offices.jobs.resume
                await again(partial(resume, ANN, world.accepted["doubtful"], reason="somebody has looked"))

    async def discard(self, process: Process, world: World) -> None:
        letter = await letter_of(process, world, "doomed")
        with suppress(Conflict):
            await again(lambda: process.offices.dead_letters.discard(ANN, letter.dlq_id, "of no use"))

    async def save(self, process: Process, world: World) -> None:
        letter = await letter_of(process, world, "doomed")
        with suppress(Conflict):
            await again(lambda: process.offices.dead_letters.keep(BOB, letter.dlq_id, "of some use"))

    async def token(self, process: Process, world: World) -> None:
        create = process.offices.tokens.create
        row, _ = await again(partial(create, ANN, name="robot", role=Role.VIEWER, tenants=[ALL_TENANTS]))
        with suppress(Conflict):
            await again(lambda: process.offices.tokens.revoke(ANN, row.token_id))
        world.notes["token"] = row.token_id

    async def trigger(self, process: Process, world: World) -> None:
        book, name = process.ledger.triggers, "orders"
        here = TriggerHeartbeat(name=name, process="p", queue_name=name, adapter="memory", health={}, seen_at_ms=0)
        await again(lambda: book.heartbeat([here], expire_after_ms=60_000))
        for act in (process.offices.triggers.pause, process.offices.triggers.resume):
            await again(partial(act, ANN, name, reason="too many"))
        await again(lambda: book.remove_process("p"))

    async def forget(self, process: Process, world: World) -> None:
        await again(lambda: process.ledger.prune(0, 100))

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            watch,
            work,
            keep,
            keep,
            self.look_outside,
            self.discard,
            self.save,
            self.token,
            self.trigger,
            later,
            keep,
            work,
            keep,
            watch,
            self.forget,
        )

    async def attend(self, process: Process, world: World) -> None:
        await self.look_outside(process, world)

    async def check(self, process: Process, world: World) -> None:
        assert world.acted["once"] == 1
        ends = {key: await state_of(process, world, key) for key in world.accepted}
        assert ends == {
            "doubtful": State.SUCCEEDED,
            "doomed": State.FAILED,
            "patient": State.SUCCEEDED,
            "asked": State.CANCELLED,
        }
        assert (await letter_of(process, world, "doomed")).status is DeadLetterStatus.OPEN
        token = await process.ledger.operators.token(world.notes["token"])
        assert token is not None
        assert token.revoked_at is not None
        assert not await process.ledger.triggers.pauses()
        await check_alerts(process, world)
