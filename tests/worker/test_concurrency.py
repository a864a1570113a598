"""Concurrency: the worker's own setting, the operator's setting, and prefetch."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast import Holdfast, State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import InvalidOption
from holdfast.worker.fetcher import Throughput
from tests.worker.support import eventually, working


class Gauge:
    """Counts runs that are inside the block at the same time."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.go = asyncio.Event()

    async def __aenter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1


async def test_concurrency_limits_the_number_of_runs(both: Holdfast) -> None:
    gauge = Gauge()

    @both.task
    async def work() -> None:
        async with gauge:
            await asyncio.sleep(0.001)

    jobs = await work.submit_many([()] * 100)
    async with working(both, concurrency=7):
        for job in jobs:
            await job.result(60)
    assert gauge.most == 7


async def test_concurrency_changes_while_the_worker_runs(app: Holdfast) -> None:
    gauge = Gauge()

    @app.task
    async def block() -> None:
        async with gauge:
            await gauge.go.wait()

    await block.submit_many([()] * 20)
    async with working(app, concurrency=2) as worker:
        await eventually(lambda: gauge.inside == 2)
        worker.set_concurrency(5)
        await eventually(lambda: gauge.inside == 5)
        await app.engine.set_control("default", QueueControl(worker_concurrency=8))
        await eventually(lambda: gauge.inside == 8, "the operator's setting")
        assert worker.concurrency == 8
        worker.set_concurrency(1)
        assert worker.concurrency == 8
        await app.engine.set_control("default", QueueControl())
        await eventually(lambda: worker.concurrency == 1)
        with pytest.raises(InvalidOption):
            worker.set_concurrency(0)
        gauge.go.set()
        await eventually(lambda: worker.finished == 20)
    assert gauge.most == 8


async def test_existing_controls_apply_from_the_start(app: Holdfast) -> None:
    await app.open()
    await app.engine.set_control("default", QueueControl(worker_concurrency=3))
    async with working(app) as worker:
        await eventually(lambda: worker.concurrency == 3)


async def test_the_limit_of_a_queue_holds_over_all_workers(both: Holdfast) -> None:
    """Two workers with room for ten jobs each run three at a time, and a fourth only when one has ended."""
    gauge = Gauge()

    @both.task
    async def work() -> None:
        async with gauge:
            await asyncio.sleep(0.002)

    await both.open()
    await both.engine.set_control("default", QueueControl(concurrency=3))
    jobs = await work.submit_many([()] * 100)
    async with working(both, concurrency=10) as first, working(both, concurrency=10) as second:
        for job in jobs:
            await job.result(60)
        assert (first.concurrency, second.concurrency) == (10, 10)
    assert gauge.most == 3


async def test_no_jobs_are_claimed_from_a_paused_queue(both: Holdfast) -> None:
    @both.task
    async def work() -> str:
        return "done"

    await both.open()
    await both.engine.set_control("default", QueueControl(paused=True))
    job = await work.submit()
    async with working(both) as worker:
        await eventually(lambda: worker.ready)
        assert await job.state() is State.QUEUED
        await both.engine.set_control("default", QueueControl())
        assert await job.result(60) == "done"


async def test_prefetched_jobs_do_not_wait_behind_slow_jobs(app: Holdfast) -> None:
    """Prefetched jobs that do not start are released, so that another worker can claim them."""
    go = asyncio.Event()

    @app.task
    async def block() -> None:
        await go.wait()

    async with working(app, concurrency=1) as worker:
        await block.submit()
        await eventually(lambda: worker.running == 1)
        waiting = await block.submit()
        claims = await app.engine.claim(worker.incarnation, ["default"], 10, 1_000)
        worker._runner.accept(claims)  # type: ignore[union-attr]
        assert await waiting.state() is State.RUNNING
        await eventually(lambda: worker.in_flight == 1, "the waiting job to be released")
        assert await waiting.state() is State.QUEUED
        go.set()
        await waiting.result(60)


def test_only_quick_jobs_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate, done = Throughput(), 0
    assert rate.prefetch(done) == 0
    for _ in range(30):  # 20 a second
        now += 0.05
        done += 1
        assert rate.prefetch(done) == 0
    for _ in range(30):  # 30,000 a second
        now += 0.005
        done += 150
    assert 290 <= rate.prefetch(done) <= 300
    for _ in range(30):  # with a store that takes 5 ms to answer
        rate.record_claim(0.005)
    assert 435 <= rate.prefetch(done) <= 450
    for _ in range(30):  # more than a batch in 10 ms
        now += 0.005
        done += 1_000
    assert rate.prefetch(done) == 500
    now += 5
    assert rate.prefetch(done) == 0
    now += 0.005
    assert rate.prefetch(done + 150) > 0
    rate.reset()
    assert rate.prefetch(done + 150) == 0
