"""Detect from another thread that the worker's event loop is blocked, and by which job.

The watch schedules a callback on the loop and waits for it to run. Callbacks run in the order in which they were
scheduled, so a task that is found running twice while one of them waits has not yielded in between: its code blocks the
loop. Jobs have no overhead: the watch inspects the loop only while it is blocked.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any, Final

from holdfast.core.job import Claim
from holdfast.observe.logs import current_claim, log_fields
from holdfast.worker.in_flight import InFlight

_log: Final = logging.getLogger("holdfast.worker")

#: A block that lasts longer is logged.
BLOCKED_S: Final = 1.0
#: Sampling interval.
_SAMPLE_S: Final = 0.1
_PAUSE_S: Final = 0.15
#: A sample counts for at most this long: if it comes later, the whole process was stopped, not blocked by the task.
_STALL_S: Final = 0.5

Task = asyncio.Task[Any]


class LoopWatch:
    """Watches the event loop on which it was created; `run` belongs on another thread's loop."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._answered = True

    async def run(self) -> None:
        """Watch until cancelled, or until the loop is closed."""
        try:
            while True:
                self._answered = False
                self._loop.call_soon_threadsafe(self._answer)
                await self._wait_answered()
                await asyncio.sleep(_PAUSE_S)
        except RuntimeError as exc:
            _log.debug("watch of the worker's loop ended: %s", exc)

    def _answer(self) -> None:
        self._answered = True

    async def _wait_answered(self) -> None:
        block = _Block()
        while not self._answered:
            asleep_at = time.monotonic()
            await asyncio.sleep(_SAMPLE_S)
            slept_s = time.monotonic() - asleep_at
            task = asyncio.current_task(self._loop)
            if task is not block.task:
                block.end()
                block = _Block(task)
            block.seen_s += min(slept_s, _STALL_S)
            if not self._answered:
                self._check(block, task)
        block.end()

    def _check(self, block: _Block, task: Task | None) -> None:
        if block.seen_s < BLOCKED_S:
            return
        claim = None if task is None else _claim_of(task)
        if not block.logged:
            block.logged = True
            block.name = _name(claim, task)
            block.fields = {} if claim is None else log_fields(claim)
            _log.warning(
                "%s has blocked the event loop for %.1f s, everything else in this worker waits, at %s; "
                "await instead, or make the task a plain function",
                block.name,
                block.seen_s,
                _where(sys._current_frames().get(self._thread)),
                extra=block.fields,
            )
        if claim is not None and not block.overtime:
            block.overtime = self._is_overtime(claim)

    def _is_overtime(self, claim: Claim) -> bool:
        """Whether the timeout of this run has passed; logs it."""
        run = next((run for run in self._in_flight.copy() if run.claim is claim), None)
        if run is None or run.spec.timeout_s is None or time.perf_counter() - run.began_at < run.spec.timeout_s:
            return False
        _log.warning(
            "the timeout of job %s (%s), %g s, has passed, "
            "but its code blocks the event loop and cannot be interrupted",
            claim.job_id,
            claim.task,
            run.spec.timeout_s,
            extra=log_fields(claim),
        )
        return True


class _Block:
    """A task found running, and for how long."""

    def __init__(self, task: Task | None = None) -> None:
        self.task = task
        self.seen_s = 0.0
        self.name = ""
        self.fields: dict[str, Any] = {}
        self.logged = False
        self.overtime = False

    def end(self) -> None:
        if self.logged:
            _log.warning(
                "the event loop continues; %s blocked it for %.1f s",
                self.name,
                self.seen_s,
                extra=self.fields,
            )


def _claim_of(task: Task) -> Claim | None:
    """The claim of the job that this task, or the task that started it, is part of."""
    claims = (context.get(current_claim) for context in _contexts_of(task))
    return next((claim for claim in claims if claim is not None), None)


def _contexts_of(task: Task) -> list[Context]:
    get_context: Callable[[], Context] | None = getattr(task, "get_context", None)
    if get_context is not None:
        return [get_context()]
    # Before Python 3.12 a task has no `get_context`.
    return [found for found in gc.get_referents(task) if isinstance(found, Context)]


def _name(claim: Claim | None, task: Task | None) -> str:
    if claim is not None:
        return f"job {claim.job_id} ({claim.task})"
    return "code outside of any job" if task is None else f"task {task.get_name()}"


def _where(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
