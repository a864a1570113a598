"""An engine that has lost all data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from holdfast import Context, Holdfast, Retry
from holdfast.core.states import State
from tests.crash_points.process import Process
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
from tests.crash_points.stores import Stores


class EngineWipe(Scenario):
    """Durable submissions; then the engine loses all data, and the reconciler restores the jobs from the ledger."""

    name = "wipe"
    forks = True
    waits = True

    def supports(self, stores: Stores) -> bool:
        return stores.separate_ledger

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain", retry=Retry(max_retries=20, base=1.0))
        async def plain(ctx: Context) -> str:
            return "done"

    async def submit(self, process: Process, record: RunRecord) -> None:
        for key, delay in (("ready", 0), ("delayed", 3)):
            submission = asyncio.create_task(
                submit_until_accepted(process, record, "plain", key, durable=True, delay=timedelta(seconds=delay))
            )
            while not submission.done():
                await process.project()
                await asyncio.sleep(0)
            await submission

    async def wipe(self, process: Process, record: RunRecord) -> None:
        if not record.notes.get("wiped"):
            await process.stores.wipe()
            record.notes["wiped"] = True

    async def reconcile(self, process: Process, record: RunRecord) -> None:
        await process.project()
        await process.reconcile()

    async def repeat(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "plain", "ready")

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            self.wipe,
            self.repeat,
            self.reconcile,
            work,
            run_upkeep,
            expire_leases,
            run_upkeep,
            work,
            run_upkeep,
        )

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        await process.reconcile()

    async def check(self, process: Process, record: RunRecord) -> None:
        for key in record.accepted:
            assert await get_state(process, record, key) is State.SUCCEEDED
