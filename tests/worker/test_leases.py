"""Leases of a worker: renewed while its process runs; a run stops when its lease is lost or its job is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from holdfast import Context, Holdfast, State
from holdfast.core.job import Event
from holdfast.core.verdict import Succeed
from holdfast.testing.inline import ManualClock
from holdfast.worker.renewer import Renewer
from tests.worker.support import Faults, eventually, working


async def test_a_blocked_event_loop_keeps_its_lease(engine_url: str, namespace: str) -> None:
    """The loop is blocked for longer than the lease, while a second worker tries to reclaim it."""
    app = Holdfast(
        engine_url, namespace=namespace, visibility_timeout_s=2, heartbeat_interval_s=0.1, reclaim_interval_s=0.05
    )
    rival = Holdfast(engine_url, settings=None, namespace=namespace, visibility_timeout_s=2, heartbeat_interval_s=0.1)
    reclaimed_claims: list[Any] = []
    stop = threading.Event()

    async def reclaim_repeatedly() -> None:
        async with rival:
            while not stop.is_set():
                reclaimed_claims.extend(await rival.engine.reclaim("rival", ["default"], 10))
                await asyncio.sleep(0.05)

    @app.task
    async def block() -> str:
        time.sleep(3)  # noqa: ASYNC251 - blocks on purpose
        return "mine"

    reclaimer = threading.Thread(target=lambda: asyncio.run(reclaim_repeatedly()))
    async with app, working(app):
        job = await block.submit()
        reclaimer.start()
        try:
            assert await job.result(60) == "mine"
        finally:
            stop.set()
            await asyncio.to_thread(reclaimer.join)
    assert reclaimed_claims == []
    assert (await _get_info(app, job)).attempt == 1


async def _get_info(app: Holdfast, job: Any) -> Any:
    async with app:
        return await job.info()


async def test_a_lost_lease_stops_the_run_and_its_result_is_ignored(
    url: str, clock: ManualClock, faults: Faults
) -> None:
    app = Holdfast(url, clock=clock, heartbeat_interval_s=0.05, reclaim=False)
    stopped: list[bool] = []

    @app.task
    async def long(ctx: Context) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(ctx.cancelled)
            return "too late"
        return "never"

    async with app, working(app) as worker:
        faults.down.add("renew")
        job = await long.submit()
        await eventually(lambda: worker.running == 1)
        clock.advance(31)
        (claim,) = await eventually(lambda: app.engine.reclaim("other", ["default"], 10), "the lease to be reclaimed")
        faults.down.clear()
        await eventually(lambda: worker.running == 0, "the run to be stopped")
        assert stopped == [True]
        assert worker.counters.leases_lost == 1
        assert worker.in_flight == 0
        info = await job.info()
        assert (info.state, info.worker, info.attempt) == (State.RUNNING, "other", 2)
        await app.engine.settle([_settlement(claim, b'"other"')])
        assert await job.result(60) == "other"


async def test_a_worker_does_not_reclaim_the_expired_lease_of_its_own_run(
    url: str, clock: ManualClock, faults: Faults
) -> None:
    """The code would run twice in one process. A renewal restores the lease, unless another worker was faster."""
    app = Holdfast(url, clock=clock, heartbeat_interval_s=0.05, reclaim_interval_s=0.05)
    go, runs = asyncio.Event(), list[int]()

    @app.task
    async def wait(ctx: Context) -> str:
        runs.append(ctx.attempt)
        await go.wait()
        return "done"

    # Not even if it counts as not started, so that it would be released.
    async with app, working(app, has_started=lambda worker, job_id: False) as worker:
        faults.down.add("renew")
        job = await wait.submit()
        await eventually(lambda: worker.running == 1)
        clock.advance(31)
        before = faults.count("reclaim")
        await eventually(lambda: faults.count("reclaim") > before + 2)
        faults.down.clear()
        go.set()
        assert await job.result(60) == "done"
        assert runs == [1]


def _settlement(claim: Any, result: bytes) -> Any:
    from holdfast.core.verdict import Settlement

    return Settlement(claim, Succeed(result), claim.claimed_at_ms)


async def test_a_verdict_after_the_lease_expired_is_refused_and_counted(
    url: str, clock: ManualClock, faults: Faults
) -> None:
    """As after a pause of the whole process: the worker does not know yet that its lease is lost."""
    app = Holdfast(url, clock=clock, heartbeat_interval_s=0.05, reclaim=False)
    go = asyncio.Event()

    @app.task
    async def wait() -> str:
        await go.wait()
        return "late"

    async with app, working(app) as worker:
        faults.down.add("renew")
        job = await wait.submit()
        await eventually(lambda: worker.running == 1)
        clock.advance(31)
        (claim,) = await eventually(lambda: app.engine.reclaim("other", ["default"], 10), "the lease to be reclaimed")
        go.set()
        await eventually(lambda: worker.in_flight == 0)
        assert worker.counters.stale_settles == 1
        assert await job.state() is State.RUNNING
        await app.engine.settle([_settlement(claim, b'"other"')])
        assert await job.result(60) == "other"


async def test_cancelling_a_running_job_stops_it(both: Holdfast) -> None:
    ends: list[str] = []

    @both.task
    async def long(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("async")

    @both.task
    def long_in_thread(ctx: Context) -> None:
        deadline = time.monotonic() + 20
        while not ctx.cancelled and time.monotonic() < deadline:
            time.sleep(0.005)
        ends.append("thread" if ctx.cancelled else "not cancelled")

    async with working(both) as worker:
        jobs = [await long.submit(), await long_in_thread.submit()]
        await eventually(lambda: worker.running == 2)
        for job in jobs:
            await job.cancel("no longer needed", actor="ada")
        await eventually(lambda: worker.running == 0, "both runs to end")
        assert sorted(ends) == ["async", "thread"]
        assert [await job.state() for job in jobs] == [State.CANCELLED, State.CANCELLED]


async def test_a_job_can_be_cancelled_before_it_starts(app: Holdfast, clock: ManualClock) -> None:
    """A prefetched job that waits for a slot never starts."""
    ran: list[str] = []
    go = asyncio.Event()

    @app.task
    async def step(name: str) -> None:
        ran.append(name)
        await go.wait()

    async with working(app, concurrency=1) as worker:
        first = await step.submit("first")
        await eventually(lambda: worker.running == 1)
        (claim,) = await _claim_for(app, worker, step)
        worker._runner.accept([claim])  # type: ignore[union-attr]
        await app.job(claim.job_id).cancel()
        await eventually(lambda: worker.in_flight == 1, "the waiting job to be released")
        go.set()
        await first.result(60)
    assert ran == ["first"]


async def _claim_for(app: Holdfast, worker: Any, task: Any) -> Any:
    await task.submit("second")
    return await app.engine.claim(worker.incarnation, ["default"], 1, 1_000)


async def test_an_expired_lease_is_reclaimed_and_the_job_runs_again(app: Holdfast, clock: ManualClock) -> None:
    @app.task
    async def work(ctx: Context) -> int:
        return ctx.attempt

    async with app:
        job = await work.submit()
        await app.engine.claim("dead", ["default"], 1, 0)
        clock.advance(31)
        async with working(app) as worker:
            assert await job.result(60) == 2
            assert worker.counters.reclaimed == 1


async def test_a_long_job_leaves_a_heartbeat_each_interval_and_a_short_one_none(both: Holdfast) -> None:
    release = asyncio.Event()

    @both.task
    async def long() -> None:
        await release.wait()

    @both.task
    async def short() -> None:
        pass

    async def heartbeats() -> list[Event]:
        entries = await both.engine.read_feed("default", "", 1_000)
        return [event for entry in entries for event in entry.events if event.type == "task.heartbeat"]

    async def has_three() -> bool:
        return len(await heartbeats()) >= 3

    async with working(both):
        job = await long.submit()
        await eventually(has_three, "three heartbeats")
        for _ in range(5):
            await (await short.submit()).result(60)
        release.set()
        await job.result(60)
    events = await heartbeats()
    assert {(event.job_id, event.attempt) for event in events} == {(job.id, 1)}
    assert both.engine.counters.heartbeats == len(events)
    started = next(
        event.at_ms
        for entry in await both.engine.read_feed("default", "", 10)
        for event in entry.events
        if event.type == "task.claimed" and event.job_id == job.id
    )
    # The interval is 100 ms; the first heartbeat of a run leaves no event.
    assert len(events) <= (events[-1].at_ms - started) / 100 + 1


async def test_a_lease_settled_while_it_is_being_renewed_is_not_counted_as_lost(
    both: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewing, settled = threading.Event(), threading.Event()
    notified: list[Any] = []
    renew = Renewer._renew

    async def renew_late(self: Renewer, leases: Any, heartbeats: Any = ()) -> Any:
        if leases := list(leases):
            renewing.set()
            await asyncio.to_thread(settled.wait, 20)
        return await renew(self, leases, heartbeats)

    @both.task
    async def work() -> str:
        await eventually(renewing.is_set, "a heartbeat")
        return "done"

    monkeypatch.setattr(Renewer, "_renew", renew_late)
    async with working(both) as worker:
        lost = worker.on_leases_lost

        def on_leases_lost(leases: Any) -> None:
            lost(leases)
            notified.append(leases)

        monkeypatch.setattr(worker, "on_leases_lost", on_leases_lost)
        job = await work.submit()
        assert await job.result(60) == "done"
        await eventually(lambda: worker.in_flight == 0)
        settled.set()
        await eventually(lambda: notified, "the engine to report the lease as lost")
        assert worker.counters.leases_lost == 0
