"""`holdfast worker --processes N`: run the same command N times and restart processes that end.

A process that exits with 0 (recycled) or was killed by a signal is replaced immediately; one that failed, ended very
early or could not be started, after a growing pause. The first signal drains all processes, the second makes them stop
now. The supervisor signals and kills only processes that it started and has not yet waited for. A worker drains when
its supervisor ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import ExitCode
from holdfast.cli.lifecycle import LOOPBACK, on_signals
from holdfast.cli.session import EngineTarget
from holdfast.core.retry import Backoff
from holdfast.errors import InvalidOption
from holdfast.execution.backend import backend_of
from holdfast.extras import require
from holdfast.identity import check_worker_id
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.cli")
_worker_log: Final = logging.getLogger("holdfast.worker")

#: A process that ran for this long was healthy: the backoff is reset.
_HEALTHY_S: Final = 30.0
#: A process that ended sooner is restarted with a pause, even after exit code 0, to avoid a hot loop.
_SHORT_S: Final = 5.0
#: How long a draining process may exceed its grace time before it is killed.
_EXTRA_S: Final = 15.0


#: Exit code of a supervised process whose worker id another process has: it is not restarted.
REPLACED_CODE: Final = 10
#: `--url` of the supervisor. Unlike HOLDFAST_URL it takes precedence over a URL in the app's code.
URL_VARIABLE: Final = "HOLDFAST_SUPERVISOR_URL"
#: How often a process checks whether its supervisor is alive.
_POLL_INTERVAL_S: Final = 1.0


class Supervisor:
    """Keeps `processes` copies of a command running. `run` returns after `stop`, or when all have been replaced."""

    def __init__(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        processes: int,
        drain_grace_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is the same for all processes, or a function of the process number.

        `variables` are added to the environment, which the process list does not show to other users.
        """
        if processes < 1:
            raise InvalidOption(f"processes must be 1 or more, got {processes!r}")
        self._command = command if callable(command) else lambda _: command
        self._processes = processes
        self._environment = {**os.environ, **(variables or {})}
        self._stop_timeout_s = drain_grace_s + _EXTRA_S
        self._alive: set[Process] = set()
        self._stopping = asyncio.Event()
        self.restarts = 0
        #: Processes that are not restarted, because another process has their id.
        self.replaced = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return [process.pid for process in self._alive]

    def stop(self) -> None:
        """Make every process drain; a second call makes them stop now."""
        self._stopping.set()
        for process in self._alive:
            _signal(process, signal.SIGTERM)

    async def run(self) -> None:
        """Start the processes and keep them running until `stop`."""
        tasks = [asyncio.create_task(self._keep(number)) for number in range(self._processes)]
        try:
            await self._stopping.wait()
            _, late = await asyncio.wait(tasks, timeout=self._stop_timeout_s)
            if late:
                _worker_log.error("killing %d worker processes that did not end in time: %s", len(late), self.pids)
        finally:
            self._stopping.set()
            for process in self._alive:
                _signal(process, signal.SIGKILL)
            await asyncio.gather(*tasks)

    async def _keep(self, number: int) -> None:
        backoff = Backoff(base_s=0.5, cap_s=30.0)
        while not self._stopping.is_set():
            began = time.monotonic()
            exit_code = await self._run_one(number)
            if exit_code == REPLACED_CODE:
                _worker_log.error("worker process %d is not restarted: another process has its id", number)
                self.replaced += 1
                if self.replaced == self._processes:
                    self._stopping.set()
                return
            if self._stopping.is_set():
                return
            self.restarts += 1
            lived_s = time.monotonic() - began
            if lived_s > _HEALTHY_S:
                backoff.reset()
            if exit_code is not None:
                level = logging.ERROR if exit_code or lived_s < _SHORT_S else logging.INFO
                _worker_log.log(level, "worker process %d ended with %s after %.1f s", number, exit_code, lived_s)
            # Negative: killed by a signal. The other processes detect it by themselves.
            if exit_code is not None and exit_code <= 0 and lived_s >= _SHORT_S:
                _worker_log.info("restarting worker process %d", number)
                continue
            pause_s = backoff.next_s()
            _worker_log.info("restarting worker process %d in %.1f s", number, pause_s)
            await self._pause(pause_s)

    async def _run_one(self, number: int) -> int | None:
        """Run one process. Returns its exit code; None if it could not be started."""
        # A separate session: Ctrl-C reaches the whole process group, and our SIGTERM would be its second signal.
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(number), start_new_session=True, env=self._environment
            )
        except OSError as exc:
            _worker_log.error("cannot start worker process %d: %s", number, exc)
            return None
        self._alive.add(process)
        _worker_log.info("worker process %d started with pid %d", number, process.pid)
        if self._stopping.is_set():
            # `stop` was called during the start.
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
        _worker_log.debug("process %d has already ended", process.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Arguments of `holdfast worker`, except the number of processes."""

    at: EngineTarget
    app: str
    queues: list[str] | None
    concurrency: int | None
    upkeep: bool
    name: str | None
    log_json: bool
    log_level: str
    worker_id: str | None = None
    metrics_port: int | None = None
    metrics_host: str = LOOPBACK

    def argv(self, number: int = 0) -> list[str]:
        """Build the command line of one process; each serves its metrics on its own port."""
        port = self.metrics_port + number if self.metrics_port else self.metrics_port
        given = {
            "--metrics-port": port,
            "--metrics-host": None if port is None else self.metrics_host,
            "--namespace": self.at.namespace,
            "--concurrency": self.concurrency,
            "--name": self.name,
            "--id": None if self.worker_id is None else f"{self.worker_id}-{number}",
            "--log-level": self.log_level,
        }
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        words += [word for queue in self.queues or [] for word in ("--queue", queue)]
        words += [] if self.upkeep else ["--no-upkeep"]
        words += ["--log-json"] if self.log_json else []
        return [sys.executable, "-m", "holdfast", "worker", self.app, *words, "--supervisor", str(os.getpid())]

    def isolated_argv(self, lock: int) -> list[str]:
        """Build the command line of a process for jobs that must run alone, started by this process."""
        name = "isolated" if self.name is None else f"{self.name}-isolated"
        alone = replace(self, concurrency=1, upkeep=False, metrics_port=None, name=name, worker_id=None)
        return [*alone.argv(), "--isolated", str(lock)]

    @property
    def variables(self) -> dict[str, str]:
        """What a process gets by environment, because it may contain a password."""
        return {} if self.at.url is None else {URL_VARIABLE: self.at.url}


async def supervise(app: Holdfast, call: WorkerCommand, processes: int) -> None:
    """Run the worker processes until a signal. A missing app, engine or extra is reported once, here.

    Raises `typer.Exit` if other processes have the ids of all of them.
    """
    if call.upkeep and app.settings.delivers:
        require("sending webhooks", "httpcore")
    if call.worker_id is not None:
        check_worker_id(call.worker_id)
        # The longest of those that the processes get.
        check_worker_id(f"{call.worker_id}-{processes - 1}")
    async with app:
        backend_of(app).require_ledger()
    supervisor = Supervisor(call.argv, processes, app.settings.drain_grace_s, call.variables)
    with on_signals(supervisor.stop):
        _log.info("supervisor started: %d worker processes on %s", processes, redact(app.settings.url))
        await supervisor.run()
    _log.info("supervisor ended: all worker processes have ended")
    if supervisor.replaced == processes:
        raise typer.Exit(ExitCode.USAGE)


def supervised_target(at: EngineTarget) -> EngineTarget:
    """The target of a process that a supervisor has started. The variable is removed: jobs do not inherit it."""
    return replace(at, url=os.environ.pop(URL_VARIABLE, None))


@asynccontextmanager
async def watch_parent(supervisor: int | None, drain: Callable[[], None]) -> AsyncIterator[None]:
    """Drain if the supervisor ends while the block runs, because nothing else would stop this process."""
    if supervisor is None:
        yield
        return
    watching = asyncio.create_task(_drain_when_orphaned(supervisor, drain))
    try:
        yield
    finally:
        watching.cancel()


async def _drain_when_orphaned(supervisor: int, drain: Callable[[], None]) -> None:
    while os.getppid() == supervisor:  # noqa: ASYNC110 - there is no notification of a parent's end
        await asyncio.sleep(_POLL_INTERVAL_S)
    _log.error("supervisor (pid %d) has died, draining", supervisor)
    drain()
