"""Workers that are killed, paused, blocked or terminated: their jobs end once, and in time. On both engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast import Job, State
from holdfast.core.verdict import POISON_PILL
from holdfast.engine.port.operators import QueueControl
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, WorkerProcess, eventually, pause_outside_commit
from tests.worker.support import working

pytestmark = [pytest.mark.faults]

#: A job of a dead worker is reclaimed at most this long after its lease expired, on a busy machine: a process has to
#: be started for it.
RECLAIM_WITHIN_MS = 15_000


def lease_ms(site: Site) -> float:
    return float(site.settings["visibility_timeout_s"]) * 1000


async def test_a_job_of_a_killed_worker_is_reclaimed_after_its_lease(site: Site) -> None:
    gate = site.gate()
    workers = await site.start_workers(2, "--concurrency", "1")
    jobs = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    victim, lost_jobs = await _find_busy_worker(site, workers, [job.id for job in jobs])
    killed_at_ms = victim.kill()
    await site.wait_runs(lost_jobs, 2)
    gate.touch()

    history = await site.assert_all_ended(job.id for job in jobs)
    reclaimed = [event for event in await site.events() if event.type == "task.reclaimed"]
    assert {event.job_id for event in reclaimed} == set(lost_jobs)
    assert max(event.at_ms for event in reclaimed) - killed_at_ms <= lease_ms(site) + RECLAIM_WITHIN_MS
    for job in jobs:
        attempts = 2 if job.id in lost_jobs else 1
        assert await job.result() == f"attempt {attempts}"
        assert history.histories[job.id].moves.count("task.reclaimed") == attempts - 1
        # A lost lease does not use up a retry.
        assert (await job.info()).meta.retry_count == 0


async def test_the_limit_of_a_queue_holds_while_workers_are_killed(site: Site) -> None:
    """Three workers with room for ten jobs each. The runs count themselves, independently of the engine."""
    limit, gate, folder = 3, site.gate(), site.folder / "overlap"
    folder.mkdir()
    await site.app.open()
    await site.app.engine.set_control("default", QueueControl(concurrency=limit))
    workers = await site.start_workers(3, "--concurrency", "10")
    jobs = [job.id for job in await site.tasks.overlap.submit_many((str(folder), str(gate), 0.01) for _ in range(60))]
    started = limit
    for _ in range(2):
        await _wait_overlaps(folder, started)
        # A worker, or a process that a worker has started for a lost job. Nothing ends before the gate is opened:
        # every run of this process is lost.
        pid = site.runs()[-1].pid
        started += sum(run.pid == pid for run in site.runs())
        os.kill(pid, signal.SIGKILL)
        workers.append(await site.start_worker("--concurrency", "10"))
    await _wait_overlaps(folder, started)
    gate.touch()
    history = await site.assert_all_ended(jobs)
    overlaps = _overlaps(folder)
    assert len(overlaps) == len(jobs) + started - limit
    # Never exceeded, and used in full.
    assert max(overlaps) == limit
    reclaimed = [past.moves.count("task.reclaimed") for past in history.histories.values()]
    assert sum(reclaimed) == started - limit


def _overlaps(folder: Path) -> list[int]:
    """For each run that has started, how many there were."""
    counts = folder / "counts"
    return [int(line) for line in counts.read_text().splitlines()] if counts.exists() else []


async def _wait_overlaps(folder: Path, count: int) -> None:
    """Wait until this many runs have started."""
    await eventually(lambda: len(_overlaps(folder)) == count, f"{count} runs")


async def _find_busy_worker(
    site: Site, workers: list[WorkerProcess], job_ids: list[str]
) -> tuple[WorkerProcess, list[str]]:
    """Return one of the workers that run these jobs, and its jobs."""
    await site.wait_runs(job_ids, 1)
    pid = site.runs()[0].pid
    (worker,) = (worker for worker in workers if worker.pid == pid)
    return worker, [run.job_id for run in site.runs() if run.pid == pid]


async def test_jobs_settled_before_a_kill_do_not_run_again(site: Site) -> None:
    """The worker is killed with short jobs in flight: some settled, some running, some claimed."""
    worker = await site.start_worker("--concurrency", "20")
    jobs = await site.tasks.nap.submit_many((number, 0.01) for number in range(400))
    await eventually(lambda: len(site.runs()) >= 100, "a hundred runs")
    worker.kill()
    settled = {event.job_id for event in await site.events() if event.type == "task.succeeded"}
    assert 0 < len(settled) < 400

    async with working(site.app):
        await site.assert_all_ended(job.id for job in jobs)
    runs = Counter(run.job_id for run in site.runs())
    assert {job_id: runs[job_id] for job_id in settled} == dict.fromkeys(settled, 1)
    # Jobs in flight run a second time, and not more often.
    assert max(runs.values()) <= 2
    assert sum(count - 1 for count in runs.values()) <= 100


async def test_a_worker_paused_past_its_lease_changes_nothing(site: Site) -> None:
    gate = site.gate()
    workers = await site.start_workers(2)
    jobs = [(await task.submit(str(gate))).id for task in (site.tasks.hold, site.tasks.hold_in_thread) * 2]
    paused, its_jobs = await _find_busy_worker(site, workers, jobs)
    pause_outside_commit(paused, site.url)
    await site.wait_runs(its_jobs, 2)
    gate.touch()
    await site.assert_all_ended(jobs)

    # It resumes with these jobs in flight, finished or lost, and continues to work.
    paused.resume()
    await eventually(
        lambda: paused.has_logged("came too late") or paused.has_logged("is lost; its run is stopped"),
        "the stale answer",
    )
    later_jobs = [job.id for job in await site.tasks.work.submit_many((number,) for number in range(20))]
    await site.assert_all_ended([*jobs, *later_jobs])
    assert [await site.app.job(job_id).result() for job_id in its_jobs] == ["attempt 2"] * len(its_jobs)
    assert set((await site.final_events()).values()) == {1}
    paused.terminate()
    assert await paused.wait_ended() == 0


@pytest.mark.redis
async def test_a_blocked_event_loop_keeps_its_lease(redis_site: Site) -> None:
    """For 2.5 times the lease, with a second worker that would reclaim the job at once.
    (Embedded: `tests/worker/test_leases.py`.)"""
    site, started = redis_site, redis_site.gate("started")
    await site.start_workers(2)
    job = await site.tasks.block.submit(str(started), 2.5)
    await eventually(started.exists, "the loop to be blocked")
    history = await site.assert_all_ended([job.id])
    assert await job.result() == "attempt 1"
    assert len(site.runs(job.id)) == 1
    assert list(history.histories[job.id].moves) == ["task.created", "task.claimed", "task.succeeded"]


async def test_a_poison_pill_is_a_dead_letter_after_max_deliveries(engine_url: str, make_site: MakeSite) -> None:
    """It kills its worker, then the process in which the next worker runs it alone."""
    site = make_site(
        engine_url, max_deliveries=1, visibility_timeout_s=0.5, heartbeat_interval_s=0.1, reclaim_interval_s=0.05
    )
    pill = await site.tasks.die.submit()
    worker = site.start()
    assert await worker.wait_ended() == -signal.SIGKILL
    assert [run.attempt for run in site.runs(pill.id)] == [1]
    # In a separate process as well: otherwise the pill could kill the test.
    survivor = await site.start_worker()
    healthy = await site.tasks.work.submit(7)
    assert await healthy.result(60) == 7
    history = await site.assert_all_ended([pill.id], State.FAILED)
    assert survivor.alive
    assert [run.attempt for run in site.runs(pill.id)] == [1, 2]
    info = await pill.info()
    assert info.failure is not None
    assert info.failure.code == POISON_PILL
    assert (info.meta.retry_count, info.meta.lost_leases) == (0, 2)
    assert list(history.histories[pill.id].moves)[-3:] == ["task.dlq_pending", "task.dlq", "task.failed"]
    assert (await site.app.engine.stats("default")).dead_letters == 1


async def test_two_workers_and_upkeep_together(site: Site) -> None:
    """Three processes promote, reclaim and prune concurrently while one of the workers is killed."""
    upkeep = site.start("upkeep")
    workers = await site.start_workers(2, "--concurrency", "10")
    await upkeep.wait_for_log("upkeep started")
    tasks = site.tasks
    jobs = [job.id for job in await tasks.nap.submit_many((number, 0.02) for number in range(100))]
    jobs += [(await tasks.flaky.submit()).id for _ in range(20)]
    jobs += [(await tasks.work.options(delay=0.3 + number / 100).submit(number)).id for number in range(20)]
    await eventually(lambda: len(site.runs()) >= 40, "a good part to have run")
    workers[0].kill()

    await site.assert_all_ended(jobs)
    assert all(process.alive for process in (workers[1], upkeep))
    for process in (workers[1], upkeep):
        process.terminate()
        assert await process.wait_ended() == 0


async def test_sigterm_drains(site: Site) -> None:
    """Running jobs finish, ready jobs stay queued without an attempt, and the exit code is 0."""
    gate = site.gate()
    worker = await site.start_worker("--concurrency", "2")
    running: list[Job[Any]] = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    waiting: list[Job[Any]] = [await site.tasks.work.submit(number) for number in range(5)]
    await site.wait_runs([job.id for job in running], 1)
    worker.terminate()
    await worker.wait_for_log("draining: starting no more jobs")
    await _check_claims_nothing(site, worker, [job.id for job in waiting])
    gate.touch()
    assert await worker.wait_ended() == 0

    assert [await job.state() for job in running] == [State.SUCCEEDED] * 2
    infos = [await job.info() for job in waiting]
    assert {(info.state, info.attempt, info.meta.retry_count) for info in infos} == {(State.QUEUED, 0, 0)}
    assert (await site.app.engine.stats("default")).workers == 0
    async with working(site.app):
        await site.assert_all_ended(job.id for job in running + waiting)
    assert {run.attempt for job in waiting for run in site.runs(job.id)} == {1}


async def _check_claims_nothing(site: Site, worker: WorkerProcess, job_ids: list[str]) -> None:
    """The worker still runs its jobs, and the ready jobs are not claimed."""

    async def check() -> bool:
        infos = await site.get_infos(job_ids)
        return all(info is not None and info.state is State.QUEUED for info in infos)

    await eventually(check, "the waiting jobs to be queued")
    assert worker.alive


@pytest.mark.redis
async def test_a_second_sigterm_stops_at_once_and_the_jobs_run_elsewhere(redis_site: Site) -> None:
    site, gate = redis_site, redis_site.gate()
    worker = await site.start_worker()
    jobs = [await task.submit(str(gate)) for task in (site.tasks.hold, site.tasks.hold_in_thread)]
    await site.wait_runs([job.id for job in jobs], 1)
    worker.terminate()
    # Not before: two signals at once are one.
    await worker.wait_for_log("draining: starting no more jobs")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await worker.wait_ended()
    worker.terminate()
    assert await worker.wait_ended() == 0
    gate.touch()
    async with working(site.app):
        await site.assert_all_ended(job.id for job in jobs)
    assert [(await job.info()).meta.retry_count for job in jobs] == [0, 0]
