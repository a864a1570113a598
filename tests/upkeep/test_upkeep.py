"""Upkeep in a process that is not a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast import Holdfast, State
from holdfast.testing.inline import ManualClock
from holdfast.upkeep.upkeep import Upkeep
from tests.worker.support import TIMEOUT_S, Faults, eventually


@asynccontextmanager
async def run_upkeep(app: Holdfast, *queues: str) -> AsyncIterator[Upkeep]:
    upkeep = Upkeep(app.engine, queues, app.settings, has_started=lambda worker, job_id: worker != "dead")
    running = asyncio.create_task(upkeep.run())
    try:
        yield upkeep
    finally:
        upkeep.stop()
        upkeep.stop()
        async with asyncio.timeout(TIMEOUT_S):
            await running


@pytest.mark.parametrize("queues", [(), ("default",)], ids=["all queues", "named"])
async def test_jobs_of_a_lost_worker_are_released(app: Holdfast, clock: ManualClock, queues: tuple[str, ...]) -> None:
    @app.task
    async def work() -> None: ...

    await app.open()
    job = await work.submit()
    await app.engine.claim("dead", ["default"], 1, 0)
    clock.advance(31)
    async with run_upkeep(app, *queues):
        await eventually(lambda: _has_state(app, job.id, State.QUEUED), "the job to be released")
    info = await job.info()
    assert (info.meta.retry_count, info.meta.lost_leases) == (0, 1)
    (claim,) = await app.engine.claim("next", ["default"], 1, 0)
    assert claim.attempt >= 2
    # The dead worker, until it is pruned, and the next one; upkeep has deregistered.
    assert (await app.engine.stats("default")).workers == 2


async def _has_state(app: Holdfast, job_id: str, state: State) -> bool:
    return (await app.job(job_id).state()) is state


async def test_due_jobs_are_promoted(both: Holdfast) -> None:
    @both.task
    async def work() -> None: ...

    await both.open()
    async with run_upkeep(both):
        job = await work.options(delay=0.2).submit()
        await eventually(lambda: _has_delayed(both, 0), "the job to be promoted")
        (claim,) = await both.engine.claim("w", ["default"], 1, 2_000)
        assert claim.job_id == job.id


async def _has_delayed(app: Holdfast, number: int) -> bool:
    return (await app.engine.stats("default")).delayed == number


async def test_an_outage_does_not_end_upkeep(url: str, clock: ManualClock, faults: Faults) -> None:
    app = Holdfast(url, clock=clock, reclaim_interval_s=0)

    @app.task
    async def work() -> None: ...

    async with app:
        job = await work.submit()
        await app.engine.claim("dead", ["default"], 1, 0)
        async with run_upkeep(app, "default"):
            faults.down.add("everything")
            await eventually(lambda: faults.count("reclaim") > 3)
            clock.advance(31)
            faults.down = {"settle"}
            before = faults.count("settle")
            await eventually(lambda: faults.count("settle") > before, "a job that cannot be released")
            faults.down.clear()
            await eventually(lambda: _has_state(app, job.id, State.QUEUED), "the job to be released")
            faults.down.add("deregister_worker")


async def test_reclaiming_can_be_disabled(url: str, clock: ManualClock, faults: Faults) -> None:
    app = Holdfast(url, clock=clock, reclaim=False)
    async with app, run_upkeep(app, "default"):
        await eventually(lambda: faults.count("promote") and faults.count("prune"))
    assert faults.count("reclaim") == 0
