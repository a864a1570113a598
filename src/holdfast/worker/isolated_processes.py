"""Processes that a worker starts for suspects: each runs one job at a time, and ends when there are no more suspects.

The processes of one store on a host share a few locks. A process has its lock until its suspect is cleared, or
until it ends: the process inherits the locked file, so that the kernel releases it in any case. A
process drains when its parent ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from holdfast.core.retry import Backoff
from holdfast.neighbours.isolation_locks import IsolationLocks
from holdfast.worker.fetcher import Fetcher

_log: Final = logging.getLogger("holdfast.worker")

#: Processes of one worker, most of them with a suspect that is cleared but still runs. Each takes about 60 MB.
_MAX_PROCESSES: Final = 16
#: Time for a process to claim a suspect, before another one is started for what is left.
_START_S: Final = 2.0
#: How long an ending process may exceed the grace time before it is killed.
_EXTRA_S: Final = 15.0


class IsolatedCommand(Protocol):
    """How to start a worker process for suspects."""

    def isolated_argv(self, lock: int) -> Sequence[str]:
        """The command line; `lock` is a descriptor that the process closes when its suspect is cleared."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """What the process gets by environment."""
        ...


class IsolatedProcesses:
    """Starts a process when a pass has left suspects and a lock is free. Runs on one event loop."""

    def __init__(self, command: IsolatedCommand, locks: IsolationLocks, drain_grace_s: float) -> None:
        self._command = command
        self._stop_timeout_s = drain_grace_s + _EXTRA_S
        self._locks = locks
        self._backoff = Backoff(base_s=0.1, cap_s=3.0)
        self._next_at = -math.inf
        self._alive: set[Process] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run_suspects(self, fetcher: Fetcher) -> float:
        """Start a process if it is time to and a lock is free."""
        now = time.monotonic()
        if now >= self._next_at and len(self._tasks) < _MAX_PROCESSES and not self._stopping:
            if now > self._next_at + _START_S:
                self._backoff.reset()
            self._next_at = now + _START_S
            if (lock := self._locks.acquire()) is not None:
                task = asyncio.create_task(self._run_one(lock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return math.inf

    def drain(self) -> None:
        """Make every process finish its job; a second call makes them stop now."""
        self._stopping = True
        for process in self._alive:
            _signal(process, signal.SIGTERM)

    async def stop(self, stop_now: asyncio.Event) -> None:
        """Wait until all processes have ended, after `drain`; once `stop_now` is set, they stop their jobs."""
        ending = asyncio.create_task(self._end())
        stopping_now = asyncio.create_task(stop_now.wait())
        await asyncio.wait({ending, stopping_now}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            self.drain()
        stopping_now.cancel()
        await ending

    async def _end(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._stop_timeout_s)
            for process in self._alive if late else ():
                _log.error("killing process %d, which did not end in time", process.pid)
                _signal(process, signal.SIGKILL)
            await asyncio.gather(*self._tasks)
        self._locks.close()

    async def _run_one(self, lock: int) -> None:
        try:
            # A separate session: Ctrl-C reaches the whole process group, and our SIGTERM would be its second signal.
            process = await asyncio.create_subprocess_exec(
                *self._command.isolated_argv(lock),
                start_new_session=True,
                pass_fds=(lock,),
                env={**os.environ, **self._command.variables},
            )
        except OSError as exc:
            _log.error("cannot start a process for a suspect: %s", exc)
            self._next_at = time.monotonic() + self._backoff.next_s()
            return
        finally:
            os.close(lock)
        self._alive.add(process)
        _log.info("process %d started for jobs that may have ended their worker", process.pid)
        if self._stopping:
            _signal(process, signal.SIGTERM)
        try:
            exit_code = await process.wait()
        finally:
            self._alive.discard(process)
        self._next_at = time.monotonic() + self._backoff.next_s()
        if exit_code:
            _log.error("process %d ended with %d while it ran a job alone", process.pid, exit_code)


def _signal(process: Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        _log.debug("process %d has already ended", process.pid)
