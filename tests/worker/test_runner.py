"""The runner by itself: runs that are ended from outside at awkward moments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Context, Holdfast, Retry
from holdfast.core.job import EMPTY_META, Claim, Lease
from holdfast.core.verdict import Release, RetryLater, Settlement, Succeed, Verdict
from holdfast.execution.backend import backend_of
from holdfast.worker.in_flight import InFlight, Run, StopReason
from holdfast.worker.runner import Runner
from tests.worker.support import eventually


class Notebook:
    """Stands where the settler does, and writes down what it is given."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def put(self, run: Run, settlement: Settlement) -> None:
        run.settlement = settlement
        self.verdicts.append(settlement.verdict)


class Bench:
    """A runner with its app, its leases, and what it said about them."""

    def __init__(self) -> None:
        self.app = Holdfast("sqlite://")
        self.held: InFlight = set()
        self.notebook = Notebook()
        settler: Any = self.notebook
        self.runner = Runner(backend_of(self.app).specs, settler, self.held, 2, cancel_grace_s=0.05)
        self._number = 0

    def accept(self, task: str) -> Run:
        self._number += 1
        before = set(self.held)
        lease = Lease("default", f"job-{self._number}", "1-0", 1, "me")
        self.runner.accept([Claim(lease, task, b"{}", "default", "", "", 1, 0, 1_000, EMPTY_META)])
        (run,) = self.held - before
        return run


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.runner.close()


@pytest.mark.parametrize("process", [False, True], ids=["loop", "process"])
@pytest.mark.parametrize("why", [StopReason.DRAIN, StopReason.LOST])
async def test_a_run_that_is_stopped_before_its_first_step_never_starts(
    bench: Bench, why: StopReason, process: bool
) -> None:
    ran: list[int] = []

    @bench.app.task(name="work", process=process)
    async def work() -> None:
        ran.append(1)

    run = bench.accept("work")
    bench.runner.stop(run, why)
    await eventually(lambda: bench.runner.running == 0)
    expected = [] if why is StopReason.LOST else [Release("not started: the worker drains", 0, started=False)]
    assert (ran, bench.notebook.verdicts) == ([], expected)


async def test_a_draining_runner_starts_nothing(bench: Bench) -> None:
    go = asyncio.Event()

    @bench.app.task
    async def work() -> int:
        await go.wait()
        return 1

    for _ in range(3):
        bench.accept("work")
    assert (bench.runner.running, bench.runner.queued, bench.runner.load) == (2, 1, 3)
    bench.runner.stop_starting()
    bench.accept("work")
    assert bench.notebook.verdicts == [Release("not started: the worker drains")] * 2
    await asyncio.sleep(0)
    go.set()
    await eventually(lambda: bench.runner.running == 0)
    assert bench.notebook.verdicts[2:] == [Succeed(b"1")] * 2


async def test_a_verdict_on_its_way_survives_a_lost_lease(bench: Bench) -> None:
    """The renewer may be told of a lease that has just been settled; the engine's answer is what counts."""

    @bench.app.task
    async def work() -> int:
        return 1

    run = bench.accept("work")
    await eventually(lambda: run.settlement)
    bench.runner.stop(run, StopReason.LOST)
    assert run in bench.held
    assert bench.notebook.verdicts == [Succeed(b"1")]


async def test_a_run_out_of_time_that_then_loses_its_lease_gets_no_verdict(bench: Bench) -> None:
    @bench.app.task(timeout=30)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
            raise

    run = bench.accept("slow")
    await asyncio.sleep(0)
    bench.runner.stop(run, StopReason.TIMEOUT)
    bench.runner.stop(run, StopReason.DRAIN)
    assert run.stopped is StopReason.TIMEOUT
    bench.runner.stop(run, StopReason.LOST)
    await eventually(lambda: bench.runner.running == 0)
    assert (bench.notebook.verdicts, bench.held) == ([], set())


async def test_an_error_on_the_way_out_of_a_timeout_is_still_a_timeout(bench: Bench) -> None:
    @bench.app.task(timeout=0.02, retry=Retry(max_retries=1))
    async def messy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyError("cleaning up went wrong")

    bench.accept("messy")
    await eventually(lambda: bench.runner.running == 0)
    (verdict,) = bench.notebook.verdicts
    assert isinstance(verdict, RetryLater)
    assert verdict.failure.code == "TASK_TIMEOUT"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_even_a_coroutine_that_swallows_everything_is_thrown_away(bench: Bench) -> None:
    @bench.app.task(timeout=0.02, retry=Retry(max_retries=1))
    async def unkillable() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:  # noqa: BLE001 - as bad as it gets
                continue

    bench.accept("unkillable")
    await eventually(lambda: bench.runner.running == 0)
    assert [type(verdict) for verdict in bench.notebook.verdicts] == [RetryLater]


async def test_a_thread_that_outlives_its_loop_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    go, started = threading.Event(), threading.Event()

    def live_and_die() -> None:
        async def live() -> None:
            bench = Bench()

            @bench.app.task
            def work(ctx: Context) -> None:
                started.set()
                go.wait(20)

            bench.accept("work")
            await asyncio.to_thread(started.wait, 20)

        asyncio.run(live())

    await asyncio.to_thread(live_and_die)
    go.set()
    await eventually(lambda: "its thread ended after the worker" in caplog.text)


def test_verdicts_are_stamped_by_the_engines_clock() -> None:
    async def stamp() -> int:
        runner = Bench().runner
        runner.set_engine_time(5_000_000)
        return runner.now_ms()

    assert 5_000_000 <= asyncio.run(stamp()) < 5_060_000
