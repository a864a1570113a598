"""The handle of a submitted job."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from holdfast.core.codec import decode_json
from holdfast.core.job import Attempt, JobInfo
from holdfast.core.retry import Backoff, Duration, duration_ms
from holdfast.core.states import State
from holdfast.core.verdict import OUTBOX_DEAD
from holdfast.errors import (
    EngineRefused,
    JobCancelled,
    JobFailed,
    LedgerRefused,
    Unavailable,
    UnknownJob,
    WaitTimeout,
)
from holdfast.ledger.port.messages import OutboxStatus
from holdfast.outbox.writer import original_job_id

if TYPE_CHECKING:
    from holdfast.client.backend import Backend


R = TypeVar("R")

#: Longest single wait on the engine; longer waits consist of several.
_WAIT_MS: Final = 5_000
#: How often to check whether a relay has submitted a job.
_POLL_S: Final = 0.05
#: How long `result` waits for a store that does not answer, and its longest pause between two attempts.
_OUTAGE_S: Final = 60.0
_MAX_PAUSE_S: Final = 0.5


def decode_plain(result: bytes) -> Any:
    """Decode a result to plain values, for an unknown return type."""
    return decode_json(result, "the result")


class Job(Generic[R]):
    """A job's handle. Cheap to create: the engine is called only by its methods."""

    __slots__ = ("_backend", "_decode", "_outbox_of", "duplicate", "id", "queue")

    def __init__(
        self,
        backend: Backend,
        job_id: str,
        queue: str,
        duplicate: bool,
        decode: Callable[[bytes], Any] = decode_plain,
        *,
        outbox_of: str = "",
    ) -> None:
        """`outbox_of`: the tenant of a job that a relay submits."""
        #: For a job submitted in a transaction with an idempotency key: the first job's id, once `result` or `info`
        #: has found that the key was known.
        self.id = job_id
        self.queue = queue
        #: Whether the idempotency key was known: this is the first job with that key.
        self.duplicate = duplicate
        self._backend = backend
        self._decode = decode
        self._outbox_of = outbox_of

    async def info(self) -> JobInfo:
        """What is known about the job: the engine's record of it, or what the ledger has once that has expired.

        Raises `UnknownJob` if neither has it.
        """
        submitter = await self._backend.connections.submitter()
        view = await submitter.get(self.queue, self.id)
        if view is None and self._outbox_of and await self._is_submitted():
            view = await submitter.get(self.queue, self.id)
        return self._require(view)

    async def state(self) -> State:
        """Its current state."""
        return (await self.info()).state

    async def history(self) -> list[Attempt]:
        """Its attempts: when, by which worker, and why they failed (requirement Y6)."""
        return list((await self.info()).meta.history)

    async def cancel(self, reason: str = "", actor: str = "api") -> None:
        """Cancel it, whether it waits or runs. Raises `TransitionInvalid` if it has already ended."""
        submitter = await self._backend.connections.submitter()
        await submitter.cancel(self.queue, self.id, actor, reason)

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for its end; returns the function's result, or raises `JobFailed` or `JobCancelled`.

        Raises `WaitTimeout` after `timeout`; the job continues. A suspended job is waited for, since an operator may
        resume it. While the store does not answer, it is asked again, for a minute or until the timeout.
        """
        submitter = await self._backend.connections.submitter()
        timeout_ms = None if timeout is None else duration_ms(timeout, "timeout")
        began = time.monotonic()
        left_ms = _WAIT_MS
        outage: _OutageLimit | None = None
        while True:
            if timeout_ms is not None:
                left_ms = max(0, timeout_ms - round((time.monotonic() - began) * 1000))
            try:
                view = await submitter.wait_final(self.queue, self.id, min(left_ms, _WAIT_MS))
            except Unavailable as exc:
                outage = outage or _OutageLimit()
                await outage.pause(exc, math.inf if timeout_ms is None else left_ms / 1000)
                continue
            outage = None
            if view is None and self._outbox_of and not await self._is_submitted():
                if timeout_ms is not None and left_ms <= 0:
                    raise WaitTimeout(self.id, "in the outbox", timedelta(milliseconds=timeout_ms))
                await asyncio.sleep(_POLL_S)
                continue
            # The relay may have submitted it since then, or its key may be another job's.
            view = self._require(view or (await submitter.get(self.queue, self.id) if self._outbox_of else None))
            match view.state:
                case State.SUCCEEDED:
                    value: R = self._decode(view.result or b"null")
                    return value
                case State.CANCELLED:
                    raise _to_error(JobCancelled, view)
                case State.FAILED:
                    raise _to_error(JobFailed, view)
                case _ if timeout_ms is not None and left_ms <= 0:
                    raise WaitTimeout(self.id, view.state, timedelta(milliseconds=timeout_ms))

    def result_sync(self, timeout: Duration | None = None) -> R:
        """`result` for code without an event loop."""
        return self._backend.portal.call("result_sync", lambda: self.result(timeout), "await job.result(…)")

    async def _is_submitted(self) -> bool:
        """Whether the relay has submitted it; sets `id` to the first job with its key.

        Raises `UnknownJob` if there is no event (the transaction was rolled back, or is still open), `JobFailed` if the
        event is DEAD.
        """
        event = await self._backend.transactional_event(self._outbox_of, self.id)
        if event is None:
            raise UnknownJob(self.id)
        if event.status is OutboxStatus.DEAD:
            raise JobFailed(self.id, State.FAILED, OUTBOX_DEAD, event.last_error)
        if event.status is not OutboxStatus.SENT:
            return False
        if first := original_job_id(event):
            self.id, self.duplicate = first, True
        return True

    def _require(self, view: JobInfo | None) -> JobInfo:
        if view is None:
            raise UnknownJob(self.id)
        return view

    def __repr__(self) -> str:
        return f"<Job {self.id} in {self.queue!r}{' (duplicate)' if self.duplicate else ''}>"


class _OutageLimit:
    """How long a wait continues while the store does not answer."""

    def __init__(self) -> None:
        self._backoff = Backoff(cap_s=_MAX_PAUSE_S)
        self._until = time.monotonic() + _OUTAGE_S

    async def pause(self, error: Unavailable, left_s: float) -> None:
        """Wait before the next attempt. Raises the error if another one may not help, or it lasts for too long."""
        if isinstance(error, EngineRefused | LedgerRefused) or left_s <= 0 or time.monotonic() > self._until:
            raise error
        await asyncio.sleep(min(self._backoff.next_s(), left_s))


def _to_error(error: type[JobFailed], view: JobInfo) -> JobFailed:
    if (failure := view.failure) is None:
        return error(view.job_id, view.state, None, None)
    return error(view.job_id, view.state, failure.code, failure.message)
