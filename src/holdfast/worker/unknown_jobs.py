"""Jobs that this worker cannot run, but another worker may: during a deployment, or if two apps share a queue.

The task is unknown here, or the payload does not fit and was checked with another schema than this worker's. Such a job
is released unstarted, with a delay that grows from 1 s to 30 s. After the grace time it is dead-lettered.

The release of many such jobs must not cost the others their worker: the more jobs of this kind a worker has released in
the last 30 s, the longer the next one waits, up to the same 30 s.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

import msgspec

from holdfast.core.job import Claim, JobInfo
from holdfast.core.verdict import UNKNOWN_MAX_MS, Deferred, FailureKind, Outcome, Raised, defer_unknown
from holdfast.errors import HoldfastError
from holdfast.execution.invoke import unknown_task
from holdfast.execution.spec import TaskSpec
from holdfast.observe.logs import log_fields

_log: Final = logging.getLogger("holdfast.worker")

#: Releases that a worker makes in a second before it lets such jobs wait for longer.
_RATE_PER_S: Final = 50
_WINDOW_S: Final = UNKNOWN_MAX_MS / 1000
#: At most one warning for a task in this time.
_WARN_S: Final = 60.0
#: Names of tasks that are kept here; any program can submit a job of any name.
_MAX_TASKS: Final = 1_000


class JobFinder(Protocol):
    """The part of an engine that is needed here."""

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]: ...


class UnknownJobs:
    """Decides what happens to jobs that one worker cannot run. Runs on one event loop."""

    def __init__(self, engine: JobFinder, grace_s: float, random: Random | None = None) -> None:
        self._engine = engine
        self._grace_ms = round(grace_s * 1000)
        self._random = random or Random()
        #: When the releases of the last 30 s were made, oldest first.
        self._releases: deque[float] = deque(maxlen=round(_RATE_PER_S * _WINDOW_S))
        #: By task: when its next warning may be logged, and how it is refused.
        self._warn_at: dict[str, float] = {}
        self._refusals: dict[str, Raised] = {}

    def judge_unknown(self, claim: Claim, known: tuple[str, ...]) -> Outcome:
        """The outcome of a job whose task is unknown here."""
        refusal = self._refusals.get(claim.task)
        if refusal is None:
            if len(self._refusals) >= _MAX_TASKS:
                self._refusals.clear()
            refusal = self._refusals[claim.task] = unknown_task(claim.task, known)
        return self._release(claim, refusal)

    async def judge_invalid(self, claim: Claim, spec: TaskSpec, refusal: Raised) -> Outcome:
        """The outcome of a job whose payload does not fit: final if it was checked with this worker's schema."""
        if not self._grace_ms:
            return refusal
        try:
            (info,) = await self._engine.get(claim.queue, [claim.job_id])
        except HoldfastError as exc:
            _log.warning("cannot read with which schema job %s was submitted: %s", claim.job_id, exc)
            return self._release(claim, refusal)
        if info is None or not info.schema or info.schema == spec.fingerprint:
            return refusal
        message = f"submitted with schema {info.schema}, this worker has {spec.fingerprint}: {refusal.failure.message}"
        other = Raised(refusal.kind, msgspec.structs.replace(refusal.failure, message=message), refusal.error)
        return self._release(claim, other)

    def _release(self, claim: Claim, refusal: Raised) -> Outcome:
        outcome = defer_unknown(claim, refusal, self._grace_ms)
        if isinstance(outcome, Raised):
            return outcome
        now = time.monotonic()
        self._warn(claim, refusal, now)
        return self._spread(claim, outcome, now)

    def _warn(self, claim: Claim, refusal: Raised, now: float) -> None:
        if now < self._warn_at.get(claim.task, 0.0):
            return
        if len(self._warn_at) >= _MAX_TASKS:
            self._warn_at.clear()
        self._warn_at[claim.task] = now + _WARN_S
        text = "job %s (%s) cannot run here and is released for another worker, like others of its task: %s"
        _log.warning(text, claim.job_id, claim.task, refusal.failure.message, extra=log_fields(claim))

    def _spread(self, claim: Claim, outcome: Deferred, now: float) -> Outcome:
        """Lengthen the delay of one of many; the first time at random, so that they do not return all at once."""
        releases = self._releases
        while releases and releases[0] < now - _WINDOW_S:
            releases.popleft()
        releases.append(now)
        crowd_ms = len(releases) * 1000 // _RATE_PER_S
        if crowd_ms <= outcome.delay_ms:
            return outcome
        if not claim.meta.unknown_since_ms:
            crowd_ms = round(crowd_ms * self._random.random())
        return msgspec.structs.replace(outcome, delay_ms=max(outcome.delay_ms, crowd_ms))


def is_invalid(outcome: Outcome) -> bool:
    """Whether the payload does not fit the task."""
    return isinstance(outcome, Raised) and outcome.kind is FailureKind.INVALID
