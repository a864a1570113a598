"""The demo's temporary folder and store, and its `holdfast worker` and command processes.

The sandbox replaces all `HOLDFAST_*` variables and the working directory; child processes inherit both. Workers are
real `holdfast worker` processes, as in production.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

#: End the demo like Ctrl-C, so that no worker outlives it.
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
#: Short leases, so that a killed worker's job is reclaimed within seconds.
_SETTINGS: Final = {
    "HOLDFAST_VISIBILITY_TIMEOUT_S": "3",
    "HOLDFAST_HEARTBEAT_INTERVAL_S": "1",
    "HOLDFAST_RECLAIM_INTERVAL_S": "0.5",
}


@contextmanager
def sandbox() -> Iterator[Path]:
    """Use a temporary directory as working directory, and settings for a store in it."""
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
    """Run `work`; return its result, or 128 plus the number of the signal that ended it.

    The work is cancelled at an `await`: an interruption in the middle of a worker's start would leave that worker
    running.
    """
    task = asyncio.create_task(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _ENDINGS:
        # An ignored signal stays ignored: nohup relies on that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def run_holdfast(*words: str, **variables: str) -> int:
    """Run a `holdfast` command on this terminal. Returns its exit code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *words, env=os.environ | variables, stdin=asyncio.subprocess.DEVNULL
    )
    return await _wait(process, process.wait())


async def read_holdfast(*words: str) -> str:
    """Run a `holdfast` command. Returns its stdout."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await _wait(process, process.communicate())
    if process.returncode != 0:
        raise SystemExit(f"holdfast {' '.join(words)} failed: {errors.decode()}")
    return printed.decode().strip()


async def _wait(process: asyncio.subprocess.Process, end: Coroutine[Any, Any, T]) -> T:
    """Wait for a command to end; terminate it if the demo is cancelled."""
    try:
        return await end
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


APP: Final = "holdfast.demo.orders:app"
DRAINED_WITHIN_S: Final = 40


class Workers:
    """The demo's worker processes. Leaving the block stops them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended_badly: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "holdfast", "worker", APP, "--name", name]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, incarnation: str) -> str:
        """Kill the worker of this incarnation with SIGKILL. Returns its name."""
        name = next(name for name in self._processes if name in incarnation)
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        return name

    def check(self) -> None:
        """End the demo with the log of any worker that ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise SystemExit(f"worker {name} ended with {process.returncode}:\n{self._log(name)}")

    def stop(self) -> None:
        """Drain all workers with SIGTERM; kill those that do not end in time."""
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            if _code(process) != 0:
                self.ended_badly.append(f"worker {name} ended with {process.returncode}:\n{self._log(name)}")
        self._processes.clear()

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]


def _code(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=DRAINED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
