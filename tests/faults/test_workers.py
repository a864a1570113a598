"""Workers that are killed, stopped, blocked or told to go: their jobs end once, and soon. On both engines."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import Any

import pytest

from holdfast import Job, State
from holdfast.core.verdict import POISON_PILL
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, WorkerProcess, eventually, stand_still
from tests.worker.support import working

pytestmark = [pytest.mark.faults]

#: A dead worker's jobs are back this long after their lease ran out at the latest.
RECLAIM_WITHIN_MS = 2_000


def lease_ms(site: Site) -> float:
    return float(site.settings["visibility_timeout_s"]) * 1000


async def test_a_killed_worker_is_replaced_within_the_lease_and_two_seconds(site: Site) -> None:
    gate = site.gate()
    workers = await site.started_all(2)
    jobs = [await site.tasks.hold.submit(str(gate)) for _ in range(4)]
    victim, orphans = await _busy_one(site, workers, [job.id for job in jobs])
    killed_at_ms = victim.kill()
    await site.has_runs(orphans, 2)
    gate.touch()

    history = await site.all_is_well(job.id for job in jobs)
    reclaimed = [event for event in await site.events() if event.type == "task.reclaimed"]
    assert {event.job_id for event in reclaimed} == set(orphans)
    assert max(event.at_ms for event in reclaimed) - killed_at_ms <= lease_ms(site) + RECLAIM_WITHIN_MS
    for job in jobs:
        attempts = 2 if job.id in orphans else 1
        assert await job.result() == f"attempt {attempts}"
        assert history.histories[job.id].moves.count("task.reclaimed") == attempts - 1
        # A lost lease uses up no retry.
        assert (await job.info()).meta.retry_count == 0


async def _busy_one(site: Site, workers: list[WorkerProcess], job_ids: list[str]) -> tuple[WorkerProcess, list[str]]:
    """One of the workers that run these jobs, and those that it runs."""
    await site.has_runs(job_ids, 1)
    pid = site.runs()[0].pid
    (worker,) = (worker for worker in workers if worker.pid == pid)
    return worker, [run.job_id for run in site.runs() if run.pid == pid]


async def test_what_was_settled_before_the_kill_does_not_run_again(site: Site) -> None:
    """The worker dies with a stream of short jobs in its hands: some settled, some running, some on their way."""
    worker = await site.started("--concurrency", "20")
    jobs = await site.tasks.nap.submit_many((number, 0.01) for number in range(400))
    await eventually(lambda: len(site.runs()) >= 100, "a hundred runs")
    worker.kill()
    settled = {event.job_id for event in await site.events() if event.type == "task.succeeded"}
    assert 0 < len(settled) < 400

    async with working(site.app):
        await site.all_is_well(job.id for job in jobs)
    runs = Counter(run.job_id for run in site.runs())
    assert {job_id: runs[job_id] for job_id in settled} == dict.fromkeys(settled, 1)
    # What was in hand runs a second time, and no more than that.
    assert max(runs.values()) <= 2
    assert sum(count - 1 for count in runs.values()) <= 100


async def test_a_worker_that_was_stopped_past_its_lease_changes_nothing(site: Site) -> None:
    gate = site.gate()
    workers = await site.started_all(2)
    jobs = [(await task.submit(str(gate))).id for task in (site.tasks.hold, site.tasks.hold_in_thread) * 2]
    late, taken = await _busy_one(site, workers, jobs)
    stand_still(late, site.url)
    await site.has_runs(taken, 2)
    gate.touch()
    await site.all_is_well(jobs)

    # It wakes with these jobs in its hands, done or lost as the moment has it, and goes on working all the same.
    late.resume()
    await eventually(lambda: late.said("came too late") or late.said("is lost; its run is stopped"), "the stale answer")
    more = [job.id for job in await site.tasks.work.submit_many((number,) for number in range(20))]
    await site.all_is_well([*jobs, *more])
    assert [await site.app.job(job_id).result() for job_id in taken] == ["attempt 2"] * len(taken)
    assert set((await site.final_events()).values()) == {1}
    late.terminate()
    assert await late.ended() == 0


@pytest.mark.redis
async def test_a_blocked_event_loop_keeps_its_lease(redis_site: Site) -> None:
    """For two and a half times the lease, with a second worker that would take the job at once.
    (Embedded: `tests/worker/test_leases.py`.)"""
    site, started = redis_site, redis_site.gate("started")
    await site.started_all(2)
    job = await site.tasks.block.submit(str(started), 2.5)
    await eventually(started.exists, "the loop to be blocked")
    history = await site.all_is_well([job.id])
    assert await job.result() == "attempt 1"
    assert len(site.runs(job.id)) == 1
    assert list(history.histories[job.id].moves) == ["task.created", "task.claimed", "task.succeeded"]


async def test_a_poison_pill_is_a_dead_letter_after_max_deliveries(engine_url: str, make_site: MakeSite) -> None:
    """Every worker that takes it dies. An operator's supervisor starts a new one each time."""
    site = make_site(
        engine_url, max_deliveries=2, visibility_timeout_s=0.5, heartbeat_interval_s=0.1, reclaim_interval_s=0.05
    )
    pill = await site.tasks.die.submit()
    for attempt in (1, 2):
        worker = site.start()
        assert await worker.ended() == -signal.SIGKILL
        assert [run.attempt for run in site.runs(pill.id)] == list(range(1, attempt + 1))
    # In a process of its own as well: if the pill were not stopped, it should not kill the test.
    survivor = await site.started()
    healthy = await site.tasks.work.submit(7)
    assert await healthy.result(60) == 7
    history = await site.all_is_well([pill.id], State.FAILED)
    assert survivor.alive
    assert len(site.runs(pill.id)) == 2
    view = await pill.info()
    assert view.failure is not None
    assert view.failure.code == POISON_PILL
    assert (view.meta.retry_count, view.meta.lost_leases) == (0, 2)
    assert list(history.histories[pill.id].moves)[-3:] == ["task.dlq_pending", "task.dlq", "task.failed"]
    assert (await site.app.engine.stats("default")).dead_letters == 1


async def test_two_workers_and_upkeep_together(site: Site) -> None:
    """Three processes promote, reclaim and prune at once, while one of the workers dies."""
    keeper = site.start("upkeep")
    workers = await site.started_all(2, "--concurrency", "10")
    await keeper.has_said("upkeep started")
    tasks = site.tasks
    jobs = [job.id for job in await tasks.nap.submit_many((number, 0.02) for number in range(100))]
    jobs += [(await tasks.flaky.submit()).id for _ in range(20)]
    jobs += [(await tasks.work.options(delay=0.3 + number / 100).submit(number)).id for number in range(20)]
    await eventually(lambda: len(site.runs()) >= 40, "a good part to have run")
    workers[0].kill()

    await site.all_is_well(jobs)
    assert all(process.alive for process in (workers[1], keeper))
    for process in (workers[1], keeper):
        process.terminate()
        assert await process.ended() == 0


async def test_sigterm_drains(site: Site) -> None:
    """What runs is finished, what waits stays in line with its attempt unused, and the worker ends well."""
    gate = site.gate()
    worker = await site.started("--concurrency", "2")
    running: list[Job[Any]] = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    waiting: list[Job[Any]] = [await site.tasks.work.submit(number) for number in range(5)]
    await site.has_runs([job.id for job in running], 1)
    worker.terminate()
    await _claims_nothing_more(site, worker, [job.id for job in waiting])
    gate.touch()
    assert await worker.ended() == 0

    assert [await job.state() for job in running] == [State.SUCCEEDED] * 2
    views = [await job.info() for job in waiting]
    assert {(view.state, view.attempt, view.meta.retry_count) for view in views} == {(State.QUEUED, 0, 0)}
    assert (await site.app.engine.stats("default")).workers == 0
    async with working(site.app):
        await site.all_is_well(job.id for job in running + waiting)
    assert {run.attempt for job in waiting for run in site.runs(job.id)} == {1}


async def _claims_nothing_more(site: Site, worker: WorkerProcess, job_ids: list[str]) -> None:
    """It still runs, since its jobs do, and the rest of the line is nobody's."""

    async def look() -> bool:
        views = await site.views(job_ids)
        return all(view is not None and view.state is State.QUEUED for view in views)

    await eventually(look, "the waiting jobs to be in line")
    assert worker.alive


@pytest.mark.redis
async def test_a_second_sigterm_hurries_and_the_jobs_go_on_elsewhere(redis_site: Site) -> None:
    site, gate = redis_site, redis_site.gate()
    worker = await site.started()
    jobs = [await task.submit(str(gate)) for task in (site.tasks.hold, site.tasks.hold_in_thread)]
    await site.has_runs([job.id for job in jobs], 1)
    worker.terminate()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await worker.ended()
    worker.terminate()
    assert await worker.ended() == 0
    gate.touch()
    async with working(site.app):
        await site.all_is_well(job.id for job in jobs)
    assert [(await job.info()).meta.retry_count for job in jobs] == [0, 0]
