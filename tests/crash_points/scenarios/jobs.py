"""A job's own life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from holdfast import Context, Holdfast, Retry
from holdfast.core.states import State
from holdfast.core.verdict import POISON_PILL
from holdfast.effects import Done, NotDone
from holdfast.errors import TransitionInvalid, Unavailable
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.operators import ANN
from tests.crash_points.scenarios.scenario import (
    QUEUE,
    Step,
    Story,
    World,
    hand_in,
    keep,
    later,
    state_of,
    view_of,
    work,
)
from tests.crash_points.stores import Place


class Life(Story):
    """Submitted under a key, fails once, is retried, and ends; a second caller with the same key gets the same job."""

    name = "life"

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def order(ctx: Context) -> str:
            if ctx.attempt == 1:
                raise ValueError("the first time it fails")
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "order", "one")

    async def repeat(self, process: Process, world: World) -> None:
        await hand_in(process, world, "order", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, keep, self.repeat, later, keep, work, keep, self.repeat)

    async def check(self, process: Process, world: World) -> None:
        assert await state_of(process, world, "one") is State.SUCCEEDED


class Acting(Story):
    """A step and two effects: one whose doubt is settled by asking the world, one that waits for a person."""

    name = "effects"

    def tasks(self, app: Holdfast, world: World) -> None:
        def asked(key: str) -> Any:
            return Done("did asked") if world.acted["asked"] else NotDone()

        async def do(key: str) -> str:
            return world.act(key)

        async def draft() -> str:
            return "draft"

        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def publish(ctx: Context) -> str:
            await ctx.step("draft", draft)
            await ctx.effect.options(in_doubt=asked)("asked", do, "asked")
            if ctx.attempt == 1:
                raise ValueError("after the first effect")
            return await ctx.effect("once", do, "once")

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "publish", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, keep, later, keep, work, keep)

    async def attend(self, process: Process, world: World) -> None:
        if await state_of(process, world, "one") is State.SUSPENDED:
            # In doubt. A person gives it up.
            with suppress(TransitionInvalid):
                await again(lambda: process.offices.jobs.discard(ANN, world.accepted["one"], reason="in doubt"))

    async def check(self, process: Process, world: World) -> None:
        assert world.acted["asked"] == 1
        if await state_of(process, world, "one") is State.SUCCEEDED:
            assert world.acted["once"] == 1


class Pending(Life):
    """The same life, but a retry rests in the list of leases."""

    name = "pending"
    settings: ClassVar[dict[str, Any]] = {"retry_via": {QUEUE: "pending"}, "reclaim_idle_s": 20}


class Poison(Story):
    """Two workers have died of a job: it becomes a dead letter, and is never run again."""

    name = "poison"
    loses_leases = True
    settings: ClassVar[dict[str, Any]] = {"max_deliveries": 2}

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> None:
            raise AssertionError("the poison pill was run once more")

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "plain", "pill")

    async def first(self, process: Process, world: World) -> None:
        await self._die_of_it(process, world, "first", lambda: process.engine.claim("first", [QUEUE], 1, 0))

    async def second(self, process: Process, world: World) -> None:
        await self._die_of_it(process, world, "second", lambda: process.engine.reclaim("second", [QUEUE], 1))

    async def _die_of_it(self, process: Process, world: World, worker: str, get: Callable[[], Awaitable[Any]]) -> None:
        while (await view_of(process, world, "pill")).worker != worker:
            with suppress(Unavailable):
                await get()

    def steps(self) -> Sequence[Step]:
        return (self.submit, self.first, later, self.second, later, work, keep)

    async def check(self, process: Process, world: World) -> None:
        view = await view_of(process, world, "pill")
        assert view.state is State.FAILED
        assert view.failure is not None
        assert view.failure.code == POISON_PILL
