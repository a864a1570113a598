"""Jobs that end their worker, among jobs that do not. Both engines, real processes."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast import Holdfast, State
from holdfast.core.verdict import POISON_PILL, PROCESS_DIED
from tests.faults.conftest import MakeSite
from tests.faults.support import Site

pytestmark = [pytest.mark.faults]


@pytest.fixture
def short(engine_url: str, make_site: MakeSite) -> Site:
    """Leases of half a second: a lost job waits for its lease, if its worker is not known to be dead."""
    return make_site(engine_url, visibility_timeout_s=0.5, heartbeat_interval_s=0.1, max_deliveries=1)


async def test_a_job_that_ends_its_workers_takes_no_other_job_along(short: Site) -> None:
    tasks = short.tasks
    naps = [(number, 0.02) for number in range(40)]
    jobs = [job.id for job in await tasks.nap.submit_many(naps)]
    pills = [await tasks.end.submit("abort"), await tasks.end_in_thread.submit("exit"), await tasks.end.submit("kill")]
    async with Holdfast(short.url, **short.settings) as without_tasks:
        died = await without_tasks.submit_raw("end_in_process", b'{"how": "abort"}')
    jobs += [job.id for job in await tasks.nap.submit_many(naps)]
    supervisor = short.start("worker", "--processes", "2")

    infos = {info.job_id: info for info in await short.wait_ended([*jobs, *(pill.id for pill in pills), died.id])}
    assert Counter(infos[job_id].state for job_id in jobs) == {State.SUCCEEDED: len(jobs)}
    assert {(info.failure.code if info.failure else "") for info in (infos[pill.id] for pill in pills)} == {POISON_PILL}
    assert [run.attempt for run in short.runs(pills[0].id)] == [1, 2]
    failure = infos[died.id].failure
    assert failure is not None
    assert failure.code == PROCESS_DIED
    assert supervisor.alive
    await short.assert_nothing_open()


async def test_a_lost_job_runs_alone_while_others_continue(site: Site) -> None:
    """A lost job that does not end keeps its own process; the worker runs other jobs meanwhile."""
    gate = site.gate()
    worker = await site.start_worker("--concurrency", "3")
    held = [(await site.tasks.hold.submit(str(gate))).id for _ in range(3)]
    await site.wait_runs(held, 1)
    worker.kill()
    successor = await site.start_worker("--concurrency", "3")
    others = await site.tasks.nap.submit_many((number, 0.01) for number in range(30))
    assert [await job.result(60) for job in others] == list(range(30))
    # After a lease each is cleared, so that the next may start although none has ended.
    await site.wait_runs(held, 2)
    again = [run for run in site.runs() if run.job_id in held and run.attempt == 2]
    assert len({run.pid for run in again} - {successor.pid}) == 3
    gate.touch()
    await site.assert_all_ended([*held, *(job.id for job in others)])


async def test_a_drained_worker_ends_the_processes_of_lost_jobs(site: Site) -> None:
    gate = site.gate()
    worker = await site.start_worker()
    job = await site.tasks.hold.submit(str(gate))
    await site.wait_running(job.id)
    worker.kill()
    successor = await site.start_worker()
    await site.wait_runs([job.id], 2)
    successor.terminate()
    await successor.wait_for_log("draining")
    gate.touch()
    assert await successor.wait_ended() == 0
    await site.assert_all_ended([job.id])
    assert len(site.runs(job.id)) == 2


async def test_a_process_of_a_lost_job_ends_with_its_worker(site: Site) -> None:
    """It releases its job after the grace time, and another worker runs it."""
    gate = site.gate()
    worker = await site.start_worker()
    job = await site.tasks.hold.submit(str(gate))
    for attempt in (2, 3):
        await site.wait_runs([job.id], attempt - 1)
        worker.kill()
        worker = await site.start_worker()
        await site.wait_runs([job.id], attempt)
    gate.touch()
    await site.assert_all_ended([job.id])
