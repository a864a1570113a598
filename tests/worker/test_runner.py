"""The runner alone: runs that are stopped from outside at critical moments."""

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


class RecordingSettler:
    """Replaces the settler and records the verdicts."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    def put(self, run: Run, settlement: Settlement) -> None:
        run.settlement = settlement
        self.verdicts.append(settlement.verdict)


class Rig:
    """A runner with its app, its runs in flight and their verdicts."""

    def __init__(self) -> None:
        self.app = Holdfast("sqlite://")
        self.in_flight: InFlight = set()
        self.settler = RecordingSettler()
        settler: Any = self.settler
        self.runner = Runner(backend_of(self.app).specs, settler, self.in_flight, 2, cancel_grace_s=0.05)
        self._number = 0

    def accept(self, task: str) -> Run:
        self._number += 1
        before = set(self.in_flight)
        lease = Lease("default", f"job-{self._number}", "1-0", 1, "me")
        self.runner.accept([Claim(lease, task, b"{}", "default", "", "", 1, 0, 1_000, EMPTY_META)])
        (run,) = self.in_flight - before
        return run


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.runner.close()


@pytest.mark.parametrize("process", [False, True], ids=["loop", "process"])
@pytest.mark.parametrize("reason", [StopReason.DRAIN, StopReason.LOST])
async def test_a_run_that_is_stopped_before_it_starts_never_starts(rig: Rig, reason: StopReason, process: bool) -> None:
    ran: list[int] = []

    @rig.app.task(name="work", process=process)
    async def work() -> None:
        ran.append(1)

    run = rig.accept("work")
    rig.runner.stop(run, reason)
    await eventually(lambda: rig.runner.running == 0)
    expected = [] if reason is StopReason.LOST else [Release("not started: the worker drains", 0, started=False)]
    assert (ran, rig.settler.verdicts) == ([], expected)


async def test_a_draining_runner_starts_nothing(rig: Rig) -> None:
    go = asyncio.Event()

    @rig.app.task
    async def work() -> int:
        await go.wait()
        return 1

    for _ in range(3):
        rig.accept("work")
    assert (rig.runner.running, rig.runner.queued, rig.runner.load) == (2, 1, 3)
    rig.runner.stop_starting()
    rig.accept("work")
    assert rig.settler.verdicts == [Release("not started: the worker drains")] * 2
    await asyncio.sleep(0)
    go.set()
    await eventually(lambda: rig.runner.running == 0)
    assert rig.settler.verdicts[2:] == [Succeed(b"1")] * 2


async def test_a_verdict_in_flight_survives_a_lost_lease(rig: Rig) -> None:
    """The renewer may report a lease that has just been settled as lost; the settle result counts."""

    @rig.app.task
    async def work() -> int:
        return 1

    run = rig.accept("work")
    await eventually(lambda: run.settlement)
    rig.runner.stop(run, StopReason.LOST)
    assert run in rig.in_flight
    assert rig.settler.verdicts == [Succeed(b"1")]


async def test_a_timed_out_run_that_then_loses_its_lease_gets_no_verdict(rig: Rig) -> None:
    @rig.app.task(timeout=30)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
            raise

    run = rig.accept("slow")
    await asyncio.sleep(0)
    rig.runner.stop(run, StopReason.TIMEOUT)
    rig.runner.stop(run, StopReason.DRAIN)
    assert run.stopped is StopReason.TIMEOUT
    rig.runner.stop(run, StopReason.LOST)
    await eventually(lambda: rig.runner.running == 0)
    assert (rig.settler.verdicts, rig.in_flight) == ([], set())


async def test_an_error_during_cleanup_after_a_timeout_is_still_a_timeout(rig: Rig) -> None:
    @rig.app.task(timeout=0.02, retry=Retry(max_retries=1))
    async def messy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyError("cleaning up went wrong")

    rig.accept("messy")
    await eventually(lambda: rig.runner.running == 0)
    (verdict,) = rig.settler.verdicts
    assert isinstance(verdict, RetryLater)
    assert verdict.failure.code == "TASK_TIMEOUT"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_coroutine_that_swallows_every_exception_is_abandoned(rig: Rig) -> None:
    @rig.app.task(timeout=0.02, retry=Retry(max_retries=1))
    async def unkillable() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:  # noqa: BLE001 - swallows everything on purpose
                continue

    rig.accept("unkillable")
    await eventually(lambda: rig.runner.running == 0)
    assert [type(verdict) for verdict in rig.settler.verdicts] == [RetryLater]


async def test_a_thread_that_outlives_its_loop_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    go, started = threading.Event(), threading.Event()

    def run_loop() -> None:
        async def run_task() -> None:
            rig = Rig()

            @rig.app.task
            def work(ctx: Context) -> None:
                started.set()
                go.wait(20)

            rig.accept("work")
            await asyncio.to_thread(started.wait, 20)

        asyncio.run(run_task())

    await asyncio.to_thread(run_loop)
    go.set()
    await eventually(lambda: "its thread ended after the worker" in caplog.text)


def test_verdicts_are_timed_by_the_engines_clock() -> None:
    async def read_time() -> int:
        runner = Rig().runner
        runner.set_engine_time(5_000_000)
        return runner.now_ms()

    assert 5_000_000 <= asyncio.run(read_time()) < 5_060_000
