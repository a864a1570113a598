"""The app that fault tests run: in the test's own process, and in worker processes (`holdfast worker sample.py:app`).

Every run of a task appends a line to the file named by `FAULTS_RUNS`, so that a test can count the runs of a job
independently of the engine. Runs that must last until the test ends them wait for a file, the gate.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from holdfast import Context, Holdfast, Retry, Task

RUNS_VARIABLE: Final = "FAULTS_RUNS"
#: How many seconds the wall clock of this process is ahead.
SKEW_VARIABLE: Final = "FAULTS_SKEW_S"

QUICK: Final = Retry(max_retries=3, base=0.05, jitter=None)
_POLL_S: Final = 0.005


@dataclass(frozen=True)
class Tasks:
    """The registered tasks."""

    work: Task[[int], int]
    nap: Task[[int, float], int]
    hold: Task[[str], str]
    hold_in_thread: Task[[str], str]
    block: Task[[str, float], str]
    die: Task[[], None]
    end: Task[[str], None]
    end_in_thread: Task[[str], None]
    flaky: Task[[], str]
    fail: Task[[], None]
    big: Task[[int], str]
    unwritable: Task[[], Any]
    overlap: Task[[str, str, float], int]


def register(app: Holdfast) -> Tasks:
    """Register all tasks on this app."""

    @app.task(retry=QUICK)
    async def work(ctx: Context, number: int) -> int:
        record_run(ctx)
        return number

    @app.task(retry=QUICK)
    async def nap(ctx: Context, number: int, seconds: float) -> int:
        record_run(ctx)
        await asyncio.sleep(seconds)
        return number

    @app.task(retry=QUICK)
    async def hold(ctx: Context, gate: str) -> str:
        record_run(ctx)
        while not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 - the gate is opened by another process
            await asyncio.sleep(_POLL_S)
        return f"attempt {ctx.attempt}"

    @app.task(retry=QUICK)
    def hold_in_thread(ctx: Context, gate: str) -> str:
        record_run(ctx)
        while not Path(gate).exists() and not ctx.cancelled:
            time.sleep(_POLL_S)
        return f"attempt {ctx.attempt}"

    @app.task(retry=QUICK)
    async def block(ctx: Context, started: str, seconds: float) -> str:
        """Block the event loop."""
        record_run(ctx)
        Path(started).touch()  # noqa: ASYNC240
        time.sleep(seconds)  # noqa: ASYNC251 - blocks on purpose
        return f"attempt {ctx.attempt}"

    @app.task(retry=QUICK)
    async def die(ctx: Context) -> None:
        record_run(ctx)
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(retry=QUICK)
    async def end(ctx: Context, how: str) -> None:
        record_run(ctx)
        await asyncio.sleep(0.05)
        end_process(how)

    @app.task(retry=QUICK)
    def end_in_thread(ctx: Context, how: str) -> None:
        record_run(ctx)
        time.sleep(0.05)
        end_process(how)

    @app.task(retry=QUICK)
    async def flaky(ctx: Context) -> str:
        record_run(ctx)
        if ctx.retry_count == 0:
            raise ValueError("not yet")
        return "now"

    @app.task(retry=Retry(max_retries=0))
    async def fail(ctx: Context) -> None:
        record_run(ctx)
        raise ValueError("never")

    @app.task(retry=QUICK)
    async def big(ctx: Context, size: int) -> str:
        record_run(ctx)
        return "x" * size

    @app.task(retry=QUICK)
    async def unwritable(ctx: Context) -> object:
        record_run(ctx)
        return object()

    @app.task(retry=QUICK)
    async def overlap(ctx: Context, folder: str, gate: str, seconds: float) -> int:
        """Return how many runs of this task there were at its start, this one included."""
        record_run(ctx)
        with counted_run(Path(folder)) as running:
            while not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 - the gate is opened by another process
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(seconds)
        return running

    return Tasks(work, nap, hold, hold_in_thread, block, die, end, end_in_thread, flaky, fail, big, unwritable, overlap)


def end_process(how: str) -> None:
    """End this process as native code, a library or the kernel would."""
    match how:
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def counted_run(folder: Path) -> Iterator[int]:
    """Count the runs between start and end, in all processes, and append the count to `counts` in the folder.

    Each run has a locked file. The kernel releases the locks of a process that is killed.
    """
    with (folder / "gate").open("w") as gate, (folder / f"run-{uuid4().hex}").open("w") as own:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(own, fcntl.LOCK_EX)
        running = sum(_is_locked(path) for path in folder.glob("run-*"))
        with (folder / "counts").open("a") as counts:
            counts.write(f"{running}\n")
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield running


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def record_run(ctx: Context) -> None:
    """Record the start of a run with a single append, so that lines of processes do not interleave."""
    line = f"{ctx.job_id} {ctx.attempt} {os.getpid()}\n".encode()
    descriptor = os.open(os.environ[RUNS_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def skew_clock(seconds: float) -> None:
    """Shift the wall clock of this process from now on."""
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + seconds
    time.time_ns = lambda: real_time_ns() + round(seconds * 1e9)


if os.environ.get(SKEW_VARIABLE):
    skew_clock(float(os.environ[SKEW_VARIABLE]))

app: Final = Holdfast()
tasks: Final = register(app)


@app.task(retry=QUICK, process=True)
def end_in_process(how: str) -> None:
    """Only on the app of worker processes: a child finds it at the module's top level."""
    end_process(how)
