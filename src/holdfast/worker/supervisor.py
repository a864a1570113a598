"""`--processes N`: worker processes side by side, started again when they end, until told to stop.

A process that ends well (it was recycled) is replaced at once; one that crashes, that has hardly lived, or
that cannot be started at all, after a growing pause.
The first signal asks all to drain, a second one to hurry. It signals and kills only processes that it
started itself and has not yet waited for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.core.backoff import Backoff
from holdfast.errors import InvalidOption

_log: Final = logging.getLogger("holdfast.supervisor")

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
                _log.error("%d worker processes do not end, they are killed: %s", len(late), self.pids)
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
                _log.info("worker process %d has ended to be started again", number)
                continue
            pause_s = backoff.next_s()
            if exit_code is not None:
                _log.error("worker process %d ended with %s after %.1f s", number, exit_code, lived_s)
            _log.info("a new worker process %d in %.1f s", number, pause_s)
            await self._pause(pause_s)

    async def _run_one(self, number: int) -> int | None:
        """Its exit code; None if it could not be started."""
        # A session of its own: Ctrl-C reaches a whole process group, and with ours as the second signal it would hurry.
        try:
            process = await asyncio.create_subprocess_exec(*self._command(number), start_new_session=True)
        except OSError as exc:
            _log.error("worker process %d cannot be started: %s", number, exc)
            return None
        self._alive.add(process)
        _log.info("worker process %d is %d", number, process.pid)
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
        _log.debug("process %d has ended by itself", process.pid)
