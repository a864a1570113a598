"""A worker process to be killed or paused: `python -m holdfast.acceptance.child QUEUE`.

Its settings come as one line of JSON on stdin, where nobody else sees a password. It says `ready`, then `begun` when it
holds a job. It never ends one by itself: told `go on` it returns from it, leaves, and says what the engine made of it.
When whoever started it has died, it goes: stdin closes, and on Linux the kernel kills it even if it stands still.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading

from holdfast.acceptance.tasks import Outside, build
from holdfast.settings import Settings
from holdfast.worker.worker import Worker

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

    app = build(settings, hold, Outside())
    worker = Worker(app, [queue], concurrency=1, upkeep=False, name="acceptance")
    running = asyncio.create_task(worker.run())
    _say("ready")
    await go_on.wait()
    worker.drain()
    await running
    counts = worker.counts
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
