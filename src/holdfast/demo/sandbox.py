"""Where the demo runs: a temporary folder with its own store, which no setting of this machine reaches.

Its workers and commands are child processes and inherit the folder and the settings.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: End the demo as Ctrl-C does: the workers must not outlive it.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
#: Short leases, so that a killed worker's job comes back while you watch.
_SETTINGS: Final = {
    "HOLDFAST_VISIBILITY_TIMEOUT_S": "3",
    "HOLDFAST_HEARTBEAT_INTERVAL_S": "1",
    "HOLDFAST_RECLAIM_INTERVAL_S": "0.5",
}


@contextmanager
def sandbox() -> Iterator[Path]:
    """A temporary folder as working directory, and settings for a store in it instead of all others."""
    before, variables = Path.cwd(), dict(os.environ)
    with TemporaryDirectory(prefix="holdfast-demo-") as name:
        for variable in [variable for variable in os.environ if variable.startswith("HOLDFAST_")]:
            del os.environ[variable]
        os.environ |= {**_SETTINGS, "HOLDFAST_URL": f"sqlite:///{name}/demo.db"}
        if path := os.environ.get("PYTHONPATH"):
            os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep))
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ |= variables


async def until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """The result of `work`, or the exit code of an end by signal.

    The work is cancelled at its next `await`: in the middle of a worker's start it would leave that worker behind.
    """
    task = asyncio.create_task(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _ENDINGS:
        # An ignored signal stays ignored: nohup asks for that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def run_holdfast(*words: str, **variables: str) -> int:
    """Run a command of `holdfast` on this terminal; its exit code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *words, env=os.environ | variables, stdin=asyncio.subprocess.DEVNULL
    )
    return await _wait(process, process.wait())


async def read_holdfast(*words: str) -> str:
    """What a command of `holdfast` prints for programs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await _wait(process, process.communicate())
    if process.returncode != 0:
        raise SystemExit(f"holdfast {' '.join(words)} failed: {errors.decode()}")
    return printed.decode().strip()


async def _wait(process: asyncio.subprocess.Process, end: Coroutine[Any, Any, T]) -> T:
    """Wait for the end of a command; if the demo is ended meanwhile, so is the command."""
    try:
        return await end
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
