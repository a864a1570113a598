"""Tasks of a run, and a worker process to kill or pause.

`build` makes the app with these tasks, both for the checking process and for its worker processes.

`python -m holdfast.verification.acceptance.worker_process QUEUE` is the worker process. It reads its settings as one
line of JSON from stdin, so that passwords do not appear in the process list. It prints `ready`, and `begun JOB_ID` when
it runs a job. The job waits for a line on stdin (`continue`); then it returns, the worker drains, and the process
prints the engine's answers as JSON counts (`refused`, `succeeded`). It ends when its parent ends: stdin closes, and on
Linux the kernel kills it even if it is stopped.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.app import Holdfast
from holdfast.core.retry import Retry
from holdfast.execution.context import Context
from holdfast.settings import Settings
from holdfast.verification.acceptance.sandbox import MAIN
from holdfast.worker.worker import Worker

#: Without backoff, to save time.
_AT_ONCE: Final = Retry(max_retries=3, base=0, jitter=None)

#: What the task `hold` does with a job id: a killed or paused worker waits, the one that reclaims returns at once.
Hold = Callable[[str], Awaitable[str]]


class ExternalSystem:
    """Records external effects."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    async def act(self, key: str) -> str:
        self.happened.append(key)
        return f"done for {key}"


def build(settings: Settings, hold: Hold, outside: ExternalSystem) -> Holdfast:
    """Make an app with all tasks of a run."""
    app = Holdfast(settings=settings)

    @app.task(name="add", queue=MAIN)
    async def add(left: int, right: int) -> int:
        return left + right

    @app.task(name="fail", queue=MAIN, retry=_AT_ONCE)
    async def fail(ctx: Context, times: int) -> str:
        if ctx.retry_count < times:
            raise RuntimeError(f"failure {ctx.retry_count + 1} of {times}")
        return "succeeded"

    @app.task(name="fail_and_suspend", queue=MAIN, retry=_AT_ONCE, on_exhausted="suspend")
    async def fail_and_suspend(ctx: Context, mended: str) -> str:
        if mended not in outside.happened:
            raise RuntimeError("the external system is broken")
        return "succeeded"

    @app.task(name="pay", queue=MAIN, retry=_AT_ONCE)
    async def pay(ctx: Context, order: str) -> str:
        receipt = await ctx.effect(f"pay:{order}", outside.act, order)
        if ctx.retry_count == 0:
            raise RuntimeError("the run fails after its effect")
        return str(receipt)

    @app.task(name="act", queue=MAIN)
    async def act(key: str) -> str:
        return await outside.act(key)

    @app.task(name="ask", queue=MAIN)
    async def ask(ctx: Context, what: str) -> str:
        approval = await ctx.approval("proceed", {"what": what}, reason="requested by holdfast verify")
        return f"{what}, approved by {', '.join(approval.by)}"

    @app.task(name="hold", queue=MAIN)
    async def hold_on(ctx: Context) -> str:
        return await hold(ctx.job_id)

    return app


RESULT = "the worker that was paused"

#: Option of `prctl`: the signal to receive when the parent ends.
_PR_SET_PDEATHSIG = 1


async def main(queue: str) -> None:
    """Work on one queue until a line arrives on stdin."""
    _die_with_parent()
    settings = Settings(**json.loads(sys.stdin.readline()))
    resumed = asyncio.Event()
    _watch_stdin(asyncio.get_running_loop(), resumed)

    async def hold(job_id: str) -> str:
        _print(f"begun {job_id}")
        await resumed.wait()
        return RESULT

    app = build(settings, hold, ExternalSystem())
    worker = Worker(app, [queue], concurrency=1, upkeep=False, name="acceptance")
    running = asyncio.create_task(worker.run())
    _print("ready")
    await resumed.wait()
    worker.drain()
    await running
    counts = worker.counters
    _print(json.dumps({"refused": counts.stale_settles + counts.leases_lost, "succeeded": counts.succeeded}))
    await app.close()


def _die_with_parent() -> None:
    """Have the kernel kill this process with its parent: a stopped process cannot read the end of stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_stdin(loop: asyncio.AbstractEventLoop, resumed: asyncio.Event) -> None:
    def read() -> None:
        if sys.stdin.readline():
            loop.call_soon_threadsafe(resumed.set)
        else:
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - read by the parent process


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
