"""Drain: finish running jobs, release the rest, settle, deregister."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast import Context, Holdfast, State, Worker
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.in_flight import Drain
from holdfast.worker.recycling import WorkerExit
from tests.worker.support import Faults, eventually, working


async def start(app: Holdfast, **options: Any) -> tuple[Worker, asyncio.Task[WorkerExit]]:
    worker = Worker(app, **options)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker.ready)
    return worker, running


async def test_a_drain_finishes_running_jobs_and_releases_waiting_ones(app: Holdfast) -> None:
    go = asyncio.Event()

    @app.task
    async def wait(number: int) -> int:
        await go.wait()
        return number

    worker, running = await start(app, concurrency=2)
    jobs = await wait.submit_many((number,) for number in range(4))
    await eventually(lambda: worker.running == 2)
    prefetched = await app.engine.claim(worker.incarnation, ["default"], 1, 1_000)
    worker._runner.accept(prefetched)  # type: ignore[union-attr]
    assert worker.ready
    worker.drain()
    assert not worker.ready
    await eventually(lambda: worker.in_flight == 2, "the waiting job to be released")
    assert not running.done()
    go.set()
    assert await running is WorkerExit.DRAINED
    assert [await job.result(60) for job in jobs[:2]] == [0, 1]
    infos = [await job.info() for job in jobs[2:]]
    assert [info.state for info in infos] == [State.QUEUED, State.QUEUED]
    assert [info.meta.retry_count for info in infos] == [0, 0]
    assert all(not info.meta.history for info in infos)
    assert (await app.engine.stats("default")).workers == 0


async def test_a_second_drain_stops_now_and_uses_up_no_retry(app: Holdfast) -> None:
    cleaned: list[str] = []
    release = threading.Event()

    @app.task
    async def long(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(ctx.job_id)

    @app.task
    def long_in_thread() -> None:
        release.wait(20)

    worker, running = await start(app)
    jobs = [await long.submit(), await long_in_thread.submit()]
    await eventually(lambda: worker.running == 2)
    worker.drain()
    worker.drain()
    async with asyncio.timeout(10):
        assert await running is WorkerExit.DRAINED
    for job in jobs:
        info = await job.info()
        assert (info.state, info.meta.retry_count) == (State.QUEUED, 0)
    assert cleaned == [jobs[0].id]
    release.set()


async def test_a_drain_ends_after_its_grace_time(url: str) -> None:
    app = Holdfast(url, drain_grace_s=0.05)

    @app.task
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async with app:
        worker, running = await start(app, cancel_grace_s=0.05)
        job = await stubborn.submit()
        await eventually(lambda: worker.running == 1)
        worker.drain()
        async with asyncio.timeout(10):
            await running
        assert await job.state() is State.QUEUED


async def test_cancelling_run_drains_without_grace_time(app: Holdfast) -> None:
    @app.task
    async def long() -> None:
        await asyncio.sleep(60)

    worker, running = await start(app)
    job = await long.submit()
    await eventually(lambda: worker.running == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await job.state() is State.QUEUED
    assert worker.in_flight == 0


async def test_a_worker_drained_before_it_started_ends_at_once(app: Holdfast, faults: Faults) -> None:
    worker = Worker(app)
    worker.drain()
    assert await worker.run() is WorkerExit.DRAINED

    unreachable = Holdfast(app.settings.url)
    faults.down.add("open")
    worker = Worker(unreachable)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: faults.count("open") >= 2, "a second try")
    assert not worker.ready
    worker.drain()
    assert await running is WorkerExit.DRAINED


async def test_a_claim_whose_reply_was_lost_is_released(url: str, faults: Faults) -> None:
    """The drain cancels the waiting claim; jobs that it has already leased must not wait until their leases expire."""
    app = Holdfast(url)

    @app.task
    async def work() -> None: ...

    async with app:
        worker, running = await start(app)
        faults.down |= {"claim", "recover_claims"}
        await eventually(lambda: not worker.ready, "the claim to fail")
        job = await work.submit()
        inner: Any = app.engine
        (claim,) = await inner._engine.claim(worker.incarnation, ["default"], 1, 0)
        worker.drain()
        faults.down.clear()
        await running
        assert claim.job_id == job.id
        assert await job.state() is State.QUEUED


async def test_a_worker_ends_after_max_jobs(app: Holdfast) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> None:
        ran.append(number)

    jobs = await work.submit_many((number,) for number in range(10))
    async with asyncio.timeout(20):
        assert await Worker(app, max_jobs=3).run() is WorkerExit.MAX_JOBS
    assert len(ran) == 3
    states = [await job.state() for job in jobs]
    assert (states.count(State.SUCCEEDED), states.count(State.QUEUED)) == (3, 7)


async def test_a_worker_ends_above_max_rss(app: Holdfast) -> None:
    async with asyncio.timeout(20):
        assert await Worker(app, max_rss=1).run() is WorkerExit.MAX_RSS


async def test_drained_workers_leave_nothing_running(app: Holdfast) -> None:
    @app.task
    async def work() -> None: ...

    before = {thread.name for thread in threading.enumerate()}
    async with working(app):
        await (await work.submit()).result(60)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if name.startswith("holdfast-renewer")]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def _renewers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("holdfast-renewer")}


async def test_cancelling_a_drain_still_ends_everything(app: Holdfast) -> None:
    @app.task
    async def long() -> None:
        await asyncio.sleep(60)

    before = _renewers()
    worker, running = await start(app)
    job = await long.submit()
    await eventually(lambda: worker.running == 1)
    worker.drain()
    await eventually(lambda: worker._runner._draining, "the drain to begin")  # type: ignore[union-attr]
    running.cancel()
    # A second cancellation, at any point of the immediate stop.
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(20):
            await running
    assert _renewers() == before
    assert (await job.state(), worker.in_flight) == (State.QUEUED, 0)
    assert (await app.engine.stats("default")).workers == 0


@pytest.mark.parametrize("step", ["_recover_claims", "_wait_judged"])
async def test_a_failed_drain_leaves_no_renewer_behind(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    before = _renewers()
    worker, running = await start(app)
    monkeypatch.setattr(Drain, step, broken)
    worker.drain()
    with pytest.raises(RuntimeError, match="a bug"):
        await running
    assert _renewers() == before
    assert (await app.engine.stats("default")).workers == 0


async def test_failing_claim_recovery_does_not_prevent_settling(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def long() -> None:
        await asyncio.sleep(60)

    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    worker, running = await start(app)
    job = await long.submit()
    await eventually(lambda: worker.running == 1)
    monkeypatch.setattr(Fetcher, "recover_claims", broken)
    worker.drain()
    worker.drain()
    assert await running is WorkerExit.DRAINED
    assert "recovering claims in flight failed" in caplog.text
    assert await job.state() is State.QUEUED


async def test_a_cancelled_drain_logs_its_error_and_stays_cancelled(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered = asyncio.Event()

    async def broken(draining: Drain, *_: Any) -> None:
        entered.set()
        await draining._stop_now.wait()
        raise RuntimeError("a bug")

    before = _renewers()
    worker, running = await start(app)
    monkeypatch.setattr(Drain, "finish", broken)
    worker.drain()
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "worker did not drain cleanly" in caplog.text
    assert _renewers() == before


async def test_cancelling_a_drain_shortens_the_wait_for_the_store(
    url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.in_flight._LAST_CALL_S", 0.05)
    app = Holdfast(url, visibility_timeout_s=600)

    @app.task
    async def work() -> None: ...

    async with app:
        worker, running = await start(app)
        faults.down |= {"settle", "recover_claims", "deregister_worker"}
        await work.submit()
        await eventually(lambda: worker.finished == 1)
        worker.drain()
        await eventually(lambda: faults.count("recover_claims"), "the drain to begin")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await running
        faults.down.clear()


async def test_dead_letters_of_unknown_tasks_count_towards_max_jobs(url: str) -> None:
    elsewhere, app = Holdfast(url), Holdfast(url, unknown_task_grace_s=0)

    @elsewhere.task(name="unknown")
    async def unknown() -> None: ...

    async with elsewhere, app:
        for _ in range(2):
            await unknown.submit()
        async with asyncio.timeout(20):
            assert await Worker(app, max_jobs=2).run() is WorkerExit.MAX_JOBS


async def test_released_jobs_do_not_count_towards_max_jobs(app: Holdfast) -> None:
    go = asyncio.Event()

    @app.task
    async def work() -> None:
        await go.wait()

    worker, running = await start(app, concurrency=1, max_jobs=2)
    jobs = [await work.submit()]
    await eventually(lambda: worker.running == 1)
    jobs.append(await work.submit())
    prefetched = await app.engine.claim(worker.incarnation, ["default"], 1, 1_000)
    worker._fetcher._accept(prefetched)  # type: ignore[union-attr]
    worker._runner.release_queued("released: the worker is busy")  # type: ignore[union-attr]
    go.set()
    async with asyncio.timeout(20):
        assert await running is WorkerExit.MAX_JOBS
    assert [await job.state() for job in jobs] == [State.SUCCEEDED, State.SUCCEEDED]
