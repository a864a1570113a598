"""Killed processes of this host, with the default lease of 30 s: their jobs run again in seconds. On both engines."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast.core.states import FINAL
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, WorkerProcess, eventually, pause_outside_commit
from tests.worker.support import working

pytestmark = [pytest.mark.faults]

#: Below the lease, on a busy machine; a free one needs 1 to 3 s.
WITHIN_S = 25.0


@pytest.fixture
def slow_site(engine_url: str, make_site: MakeSite) -> Site:
    """A site with the default leases."""
    return make_site(engine_url, visibility_timeout_s=30.0, heartbeat_interval_s=10.0, reclaim_interval_s=1.0)


async def _ids(site: Site, count: int) -> list[str]:
    return [job.id for job in await site.tasks.hold.submit_many((str(site.gate()),) for _ in range(count))]


def _jobs_of(site: Site, worker: WorkerProcess) -> list[str]:
    return [run.job_id for run in site.runs() if run.pid == worker.pid]


async def test_jobs_of_a_killed_worker_run_again_at_once(slow_site: Site) -> None:
    """Three workers: one is killed, one is stopped by a signal. The jobs of the first run again, each alone."""
    site = slow_site
    workers = await site.start_workers(3, "--concurrency", "2")
    jobs = await _ids(site, 6)
    await site.wait_runs(jobs, 1)
    killed, paused, _ = workers
    lost, kept = _jobs_of(site, killed), _jobs_of(site, paused)
    assert len(lost) == len(kept) == 2
    pause_outside_commit(paused, site.url)
    killed.kill()
    await eventually(lambda: len([run for run in site.runs() if run.job_id in lost]) == 4, "new runs", WITHIN_S)
    # Killed and paused in the same second, and checked in the same check.
    paused.resume()
    site.gate().touch()
    await site.assert_all_ended(jobs)
    assert {len(site.runs(job_id)) for job_id in kept} == {1}


async def test_a_worker_that_starts_again_runs_the_jobs_of_its_predecessor(slow_site: Site) -> None:
    site = slow_site
    worker = await site.start_worker("--concurrency", "10")
    jobs = [job.id for job in await site.tasks.nap.submit_many((number, 0.05) for number in range(200))]
    await eventually(lambda: len(site.runs()) >= 50, "fifty runs")
    worker.kill()
    # Besides those that it was running, runs whose end was not recorded: how many depends on the disk.
    begun = {run.job_id for run in site.runs()}
    ended = {info.job_id for info in await site.get_infos(jobs) if info is not None and info.state in FINAL}
    assert len(begun) >= 50
    site.start("worker", "--concurrency", "10")
    async with asyncio.timeout(WITHIN_S):
        await site.assert_all_ended(jobs)
    runs = Counter(run.job_id for run in site.runs())
    assert all(runs[job_id] == 1 for job_id in ended)
    assert max(runs.values()) <= 2
    assert {job_id for job_id, count in runs.items() if count > 1} <= begun - ended


@pytest.mark.parametrize(
    "command",
    [
        ("upkeep",),
        ("serve", "--dev", "--port", "0", "--no-worker"),
        ("serve", "--dev", "--port", "0", "--no-worker", "--no-upkeep"),
    ],
    ids=["upkeep", "serve with upkeep", "serve"],
)
async def test_processes_without_a_worker_let_leases_expire(slow_site: Site, command: tuple[str, ...]) -> None:
    site = slow_site
    worker = await site.start_worker("--no-upkeep")
    (job,) = await _ids(site, 1)
    await site.wait_running(job)
    process = site.start(*command)
    worker.kill()
    await process.wait_for_log("its 1 leases expire now")
    site.gate().touch()
    site.app, site.tasks = site.make_app(dead_worker_detection=False)
    async with asyncio.timeout(WITHIN_S), working(site.app):
        await site.assert_all_ended([job])


async def test_detection_can_be_disabled(slow_site: Site) -> None:
    site = slow_site
    worker = await site.start_worker()
    (job,) = await _ids(site, 1)
    await site.wait_running(job)
    worker.kill()
    other = await site.start_worker(HOLDFAST_DEAD_WORKER_DETECTION="false")
    (later,) = await _ids(site, 1)
    await site.wait_running(later)
    # The first check is before the first claim.
    assert not other.has_logged("has ended without a drain")
    other.kill()
    await site.start_worker()
    site.gate().touch()
    async with asyncio.timeout(WITHIN_S):
        await site.assert_all_ended([job, later])
