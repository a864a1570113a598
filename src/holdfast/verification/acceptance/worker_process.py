"""Tasks of a run, and a worker process to kill or pause.

`build` makes the app with these tasks, for the checking process and its worker processes alike.

`python -m holdfast.verification.acceptance.worker_process QUEUE` is the worker process. It reads its settings as one
line of JSON from stdin, so that passwords do not appear in the process list. It prints `ready`, and `begun JOB_ID` when
it runs a job. The job does not end until stdin brings `go on`; then the job returns, the worker drains, and it
prints the engine's answers as JSON counts (`refused`, `succeeded`). It ends when its parent dies: stdin closes, and on
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

#: Retries at once: nobody waits for a backoff here.
_AT_ONCE: Final = Retry(max_retries=3, base=0, jitter=None)

#: What `hold` does, by job id: the killed and the paused worker never end it, the one that takes over does at once.
Hold = Callable[[str], Awaitable[str]]


class ExternalSystem:
    """The world outside, where effects happen; it counts them."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    async def act(self, key: str) -> str:
        self.happened.append(key)
        return f"done for {key}"


def build(settings: Settings, hold: Hold, outside: ExternalSystem) -> Holdfast:
    """An app with all tasks of a run."""
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
            raise RuntimeError("the outside is broken")
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
        consent = await ctx.approval("proceed", {"what": what}, reason="holdfast verify asks")
        return f"{what}, approved by {', '.join(consent.by)}"

    @app.task(name="hold", queue=MAIN)
    async def hold_on(ctx: Context) -> str:
        return await hold(ctx.job_id)

    return app


RESULT = "the worker that was away"

#: `prctl`: the signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1


async def main(queue: str) -> None:
    """Work on one queue until told to go on."""
    _die_with_parent()
    settings = Settings(**json.loads(sys.stdin.readline()))
    go_on = asyncio.Event()
    _hear(asyncio.get_running_loop(), go_on)

    async def hold(job_id: str) -> str:
        _say(f"begun {job_id}")
        await go_on.wait()
        return RESULT

    app = build(settings, hold, ExternalSystem())
    worker = Worker(app, [queue], concurrency=1, upkeep=False, name="acceptance")
    running = asyncio.create_task(worker.run())
    _say("ready")
    await go_on.wait()
    worker.drain()
    await running
    counts = worker.counters
    _say(json.dumps({"refused": counts.stale_settles + counts.leases_lost, "succeeded": counts.succeeded}))
    await app.close()


def _die_with_parent() -> None:
    """Who is stopped does not hear that stdin was closed, and would stand there for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _hear(loop: asyncio.AbstractEventLoop, go_on: asyncio.Event) -> None:
    def listen() -> None:
        if sys.stdin.readline():
            loop.call_soon_threadsafe(go_on.set)
        else:
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
