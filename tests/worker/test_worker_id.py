"""Workers with a stable identity: a second start takes over from the first, dead or alive."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast import Holdfast, Worker
from holdfast.engine.port.worker_ids import WorkerStart
from holdfast.errors import InvalidOption
from holdfast.worker.recycling import WorkerExit
from tests.worker.support import TIMEOUT_S, Faults, eventually, working

LEASE_S = 30


async def test_a_restarted_worker_takes_over_the_leases_of_its_last_start(both: Holdfast) -> None:
    """Long before they expire, and as new attempts."""

    @both.task
    async def add(a: int, b: int) -> int:
        return a + b

    assert both.settings.visibility_timeout_s == LEASE_S
    async with both:
        # The last start was killed: it keeps its id and its leases.
        engine = both.engine
        killed = WorkerStart("web-0", "web-0@killed", await engine.next_generation("web-0", ["default"]))
        await engine.keep_worker_id(killed, ["default"])
        jobs = [await add.submit(number, 1) for number in range(3)]
        assert len(await engine.claim("web-0@killed", ["default"], 3, 0)) == 3
        others = await add.submit(7, 1)
        assert len(await engine.claim("web-1@elsewhere", ["default"], 1, 0)) == 1
        began = time.monotonic()
        async with working(both, worker_id="web-0") as worker:
            assert worker.incarnation.startswith("web-0@")
            assert [await job.result(LEASE_S) for job in jobs] == [1, 2, 3]
            assert time.monotonic() - began < LEASE_S / 2
            assert {(await job.info()).attempt for job in jobs} == {2}
            # The leases of others stay.
            assert (await others.info()).worker == "web-1@elsewhere"


async def test_a_worker_that_was_replaced_stops_its_runs_and_ends(
    both: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    runs, finished = list[str](), asyncio.Event()

    @both.task
    async def long() -> str:
        runs.append("begun")
        try:
            await finished.wait()
        except asyncio.CancelledError:
            runs.append("cancelled")
            raise
        return "done"

    async with both:
        first = Worker(both, worker_id="web-0", name="first")
        running = asyncio.create_task(first.run())
        job = await long.submit()
        await eventually(lambda: runs, "the job to run")
        async with working(both, worker_id="web-0", name="second") as second:
            async with asyncio.timeout(TIMEOUT_S):
                assert await running is WorkerExit.REPLACED
            assert "cancelled" in runs
            await eventually(lambda: second.running, "the job to run again")
            finished.set()
            assert await job.result(TIMEOUT_S) == "done"
            assert (await job.info()).attempt == 2
    assert sorted(runs) == ["begun", "begun", "cancelled"]
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (
        f"another process has worker id web-0: {second.incarnation} has replaced {first.incarnation}" in error.message
    )


async def test_an_engine_that_fails_to_keep_an_id_does_not_affect_leases(url: str, faults: Faults) -> None:
    app = Holdfast(url, visibility_timeout_s=1, heartbeat_interval_s=0.1, reclaim_interval_s=0.05)

    @app.task
    async def long() -> str:
        await asyncio.sleep(2)
        return "done"

    faults.down |= {"next_generation", "keep_worker_id"}
    async with app, working(app, worker_id="web-0"):
        job = await long.submit()
        assert await job.result(TIMEOUT_S) == "done"
        assert (await job.info()).attempt == 1
        faults.down.clear()
        before = faults.count("keep_worker_id")
        await eventually(lambda: faults.count("keep_worker_id") > before + 1)


@pytest.mark.parametrize("worker_id", ["", " ", "a b", "ä", "a\n", "a/b", "x" * 129, "\x1b[2J", 7])
def test_an_id_is_short_and_printable(app: Holdfast, worker_id: str) -> None:
    with pytest.raises(InvalidOption, match="1 to 128 characters"):
        Worker(app, worker_id=worker_id)
