"""Event loop, signals and process supervision for long-running commands.

`run_async` runs a command's coroutine, on uvloop if it is installed. While a long-running command works, the first
SIGTERM, SIGINT or SIGHUP makes it finish, the second makes it stop now.

`Supervisor` implements `holdfast worker --processes N`: it runs the same command once per process and restarts those
that end. A process that exits with 0 (recycled) is replaced immediately; one that crashed, ended very early or could
not be started, after a growing pause. The first signal drains all processes, the second makes them stop now. It signals
and kills only processes that it started and has not yet waited for. A worker whose supervisor has died drains.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from holdfast.app import Holdfast
from holdfast.cli.session import EngineTarget
from holdfast.core.retry import Backoff
from holdfast.errors import InvalidOption
from holdfast.extras import loop_factory, require
from holdfast.observe.redact import redact

_worker_log: Final = logging.getLogger("holdfast.supervisor")

#: A process that lived this long was healthy: its next crash is a first one again.
_HEALTHY_S: Final = 30.0
#: One that ended sooner did no work, even if it ended well: at once would be a hot loop.
_SHORT_S: Final = 5.0
#: What a drained process may take beyond its grace time before it is killed.
_EXTRA_S: Final = 15.0


class Supervisor:
    """Keeps `processes` copies of a command running. `run` returns when it was stopped and all have ended."""

    def __init__(
        self, command: Sequence[str] | Callable[[int], Sequence[str]], processes: int, drain_grace_s: float
    ) -> None:
        """`command` is the same for all, or made for the number of each process."""
        if processes < 1:
            raise InvalidOption(f"processes must be 1 or more, got {processes!r}")
        self._command = command if callable(command) else lambda _: command
        self._processes = processes
        self._patience_s = drain_grace_s + _EXTRA_S
        self._alive: set[Process] = set()
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [process.pid for process in self._alive]

    def stop(self) -> None:
        """Ask every process to drain; called again, to hurry."""
        self._stopping.set()
        for process in self._alive:
            _signal(process, signal.SIGTERM)

    async def run(self) -> None:
        """Start them and keep them running until `stop`."""
        seats = [asyncio.create_task(self._keep(number)) for number in range(self._processes)]
        try:
            await self._stopping.wait()
            _, late = await asyncio.wait(seats, timeout=self._patience_s)
            if late:
                _worker_log.error("%d worker processes do not end, they are killed: %s", len(late), self.pids)
        finally:
            self._stopping.set()
            for process in self._alive:
                _signal(process, signal.SIGKILL)
            await asyncio.gather(*seats)

    async def _keep(self, number: int) -> None:
        backoff = Backoff(base_s=0.5, cap_s=30.0)
        while not self._stopping.is_set():
            began = time.monotonic()
            exit_code = await self._run_one(number)
            if self._stopping.is_set():
                return
            self.restarts += 1
            lived_s = time.monotonic() - began
            if lived_s > _HEALTHY_S:
                backoff.reset()
            if exit_code == 0 and lived_s >= _SHORT_S:
                _worker_log.info("worker process %d has ended to be started again", number)
                continue
            pause_s = backoff.next_s()
            if exit_code is not None:
                _worker_log.error("worker process %d ended with %s after %.1f s", number, exit_code, lived_s)
            _worker_log.info("a new worker process %d in %.1f s", number, pause_s)
            await self._pause(pause_s)

    async def _run_one(self, number: int) -> int | None:
        """Its exit code; None if it could not be started."""
        # A session of its own: Ctrl-C reaches a whole process group, and with ours as the second signal it would hurry.
        try:
            process = await asyncio.create_subprocess_exec(*self._command(number), start_new_session=True)
        except OSError as exc:
            _worker_log.error("worker process %d cannot be started: %s", number, exc)
            return None
        self._alive.add(process)
        _worker_log.info("worker process %d is %d", number, process.pid)
        if self._stopping.is_set():
            # Told to stop while it was being started.
            _signal(process, signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            self._alive.discard(process)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _signal(process: Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        _worker_log.debug("process %d has ended by itself", process.pid)


R = TypeVar("R")


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """The coroutine's result; Ctrl-C cancels it and comes out as `KeyboardInterrupt`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at every such signal that comes while the block runs."""
    loop = asyncio.get_running_loop()
    # What is ignored stays so: that is what nohup and a shell's background jobs ask for.
    heard = [number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


@contextmanager
def run_until_signal(stop: Callable[[], None]) -> Iterator[None]:
    """As `on_signals`, for a command that works until it is told to end."""
    freeze_gc()
    with on_signals(stop):
        yield


def freeze_gc() -> None:
    """Code stays until the end: the garbage collector need not look at it again in the middle of the work.

    It is most of what a process has, and each full collection is a pause of some 40 ms that finds none of it.
    """
    gc.freeze()


_log: Final = logging.getLogger("holdfast.cli")

#: Where metrics are served unless told otherwise.
LOOPBACK: Final = "127.0.0.1"

_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """What a person asked of `holdfast worker`, beside how many."""

    at: EngineTarget
    app: str
    queues: list[str] | None
    concurrency: int | None
    upkeep: bool
    name: str | None
    log_json: bool
    log_level: str
    metrics_port: int | None = None
    metrics_host: str = LOOPBACK

    def argv(self, number: int = 0) -> list[str]:
        """The call for one process; each serves its metrics on a port of its own."""
        port = self.metrics_port + number if self.metrics_port else self.metrics_port
        given = {
            "--metrics-port": port,
            "--metrics-host": None if port is None else self.metrics_host,
            "--url": self.at.url,
            "--namespace": self.at.namespace,
            "--concurrency": self.concurrency,
            "--name": self.name,
            "--log-level": self.log_level,
        }
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        words += [word for queue in self.queues or [] for word in ("--queue", queue)]
        words += [] if self.upkeep else ["--no-upkeep"]
        words += ["--log-json"] if self.log_json else []
        return [sys.executable, "-m", "holdfast", "worker", self.app, *words, "--supervisor", str(os.getpid())]


async def supervise(app: Holdfast, call: WorkerCommand, processes: int) -> None:
    """Run them until told to stop. An app, an engine or an extra that is not there is reported here, once."""
    if call.upkeep and app.settings.delivers:
        require("sending webhooks", "httpcore")
    async with app:
        app.require_ledger()
    supervisor = Supervisor(call.argv, processes, app.settings.drain_grace_s)
    with on_signals(supervisor.stop):
        _log.info("supervisor started: %d worker processes on %s", processes, redact(app.settings.url))
        await supervisor.run()
    _log.info("all worker processes have ended")


@asynccontextmanager
async def watch_parent(supervisor: int | None, drain: Callable[[], None]) -> AsyncIterator[None]:
    """While the block runs: drain if the supervisor dies, since nobody could end this process any more."""
    if supervisor is None:
        yield
        return
    watching = asyncio.create_task(_drain_when_orphaned(supervisor, drain))
    try:
        yield
    finally:
        watching.cancel()


async def _drain_when_orphaned(supervisor: int, drain: Callable[[], None]) -> None:
    while os.getppid() == supervisor:  # noqa: ASYNC110 - nothing tells a process that its parent has died
        await asyncio.sleep(_LOOK_S)
    _log.error("the supervisor (process %d) is gone; draining", supervisor)
    drain()
