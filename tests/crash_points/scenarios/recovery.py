"""An engine that has lost everything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from holdfast import Context, Holdfast, Retry
from holdfast.core.states import State
from tests.crash_points.process import Process
from tests.crash_points.scenarios.scenario import Step, Story, World, hand_in, keep, later, state_of, work
from tests.crash_points.stores import Place


class Durable(Story):
    """Submitted durably; then the engine loses everything, and is given it back by the ledger."""

    name = "wipe"
    forks = True
    waits = True

    def suits(self, place: Place) -> bool:
        return place.apart

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain", retry=Retry(max_retries=20, base=1.0))
        async def plain(ctx: Context) -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        for key, delay in (("line", 0), ("delayed", 3)):
            desk_call = asyncio.create_task(
                hand_in(process, world, "plain", key, durable=True, delay=timedelta(seconds=delay))
            )
            while not desk_call.done():
                await process.project()
                await asyncio.sleep(0)
            await desk_call

    async def wipe(self, process: Process, world: World) -> None:
        if not world.notes.get("wiped"):
            await process.place.wipe()
            world.notes["wiped"] = True

    async def reconcile(self, process: Process, world: World) -> None:
        await process.project()
        await process.reconcile()

    async def repeat(self, process: Process, world: World) -> None:
        await hand_in(process, world, "plain", "line")

    def steps(self) -> Sequence[Step]:
        return (self.submit, self.wipe, self.repeat, self.reconcile, work, keep, later, keep, work, keep)

    async def attend(self, process: Process, world: World) -> None:
        await process.reconcile()

    async def check(self, process: Process, world: World) -> None:
        for key in world.accepted:
            assert await state_of(process, world, key) is State.SUCCEEDED
