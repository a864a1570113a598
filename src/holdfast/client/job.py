"""A submitted job, as its submitter holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, Protocol, TypeVar

from holdfast.aio import BlockingPortal
from holdfast.client.submitter import Submitter
from holdfast.core.codec import decode_json
from holdfast.core.job import Attempt, Envelope, JobInfo, Receipt
from holdfast.core.retry import Duration, duration_ms
from holdfast.core.states import State
from holdfast.core.verdict import OUTBOX_DEAD
from holdfast.errors import JobCancelled, JobFailed, UnknownJob, WaitTimeout
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus
from holdfast.outbox.writer import original_job_id

R = TypeVar("R")

#: One wait on the engine; longer ones are made of several.
_WAIT_MS: Final = 5_000
#: How often to look whether a relay has handed a job in.
_LOOK_S: Final = 0.05


class SubmissionBackend(Protocol):
    """How a handle reaches its engine."""

    _portal: BlockingPortal

    async def submitter(self) -> Submitter: ...

    async def enqueue_in_transaction(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """Make jobs part of a transaction of the user's."""
        ...

    def enqueue_in_transaction_sync(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]: ...

    async def transactional_event(self, tenant_id: str, job_id: str) -> OutboxEvent | None:
        """The event of such a job, if the transaction is committed and a relay can see it."""
        ...


def decode_plain(result: bytes) -> Any:
    """A result as plain values, where nobody knows the task's return type."""
    return decode_json(result, "the result")


class Job(Generic[R]):
    """A handle: cheap, and nothing is asked until a method is called."""

    __slots__ = ("_decode", "_outbox_of", "_way", "duplicate", "id", "queue")

    def __init__(
        self,
        way: SubmissionBackend,
        job_id: str,
        queue: str,
        duplicate: bool,
        decode: Callable[[bytes], Any] = decode_plain,
        *,
        outbox_of: str = "",
    ) -> None:
        """`outbox_of`: the tenant of a job that a relay hands in."""
        #: Of a job that was submitted in a transaction with an idempotency key: once `result` or `view` has found that
        #: the key was known, the first job's id.
        self.id = job_id
        self.queue = queue
        #: The idempotency key was known: this is the job that was there first.
        self.duplicate = duplicate
        self._way = way
        self._decode = decode
        self._outbox_of = outbox_of

    async def info(self) -> JobInfo:
        """Everything the engine knows about it; raises `UnknownJob` once its record has expired."""
        desk = await self._way.submitter()
        view = await desk.get(self.queue, self.id)
        if view is None and self._outbox_of and await self._arrival():
            view = await desk.get(self.queue, self.id)
        return self._known(view)

    async def state(self) -> State:
        """Where it is now."""
        return (await self.info()).state

    async def history(self) -> list[Attempt]:
        """Its runs so far: when, by which worker, and why they failed (requirement Y6)."""
        return list((await self.info()).meta.history)

    async def cancel(self, reason: str = "", actor: str = "api") -> None:
        """End it, whether it waits or runs. Raises `TransitionInvalid` if it has ended already."""
        desk = await self._way.submitter()
        await desk.cancel(self.queue, self.id, actor, reason)

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for its end: the function's return value, `JobFailed` or `JobCancelled`.

        Raises `WaitTimeout` after `timeout`; the job goes on. A suspended job is waited for: an operator
        may resume it.
        """
        desk = await self._way.submitter()
        timeout_ms = None if timeout is None else duration_ms(timeout, "timeout")
        began = time.monotonic()
        left_ms = _WAIT_MS
        while True:
            if timeout_ms is not None:
                left_ms = max(0, timeout_ms - round((time.monotonic() - began) * 1000))
            view = await desk.wait_final(self.queue, self.id, min(left_ms, _WAIT_MS))
            if view is None and self._outbox_of and not await self._arrival():
                if timeout_ms is not None and left_ms <= 0:
                    raise WaitTimeout(self.id, "in the outbox", timedelta(milliseconds=timeout_ms))
                await asyncio.sleep(_LOOK_S)
                continue
            view = self._known(view or await desk.get(self.queue, self.id))
            match view.state:
                case State.SUCCEEDED:
                    value: R = self._decode(view.result or b"null")
                    return value
                case State.CANCELLED:
                    raise _ended(JobCancelled, view)
                case State.FAILED:
                    raise _ended(JobFailed, view)
                case _ if timeout_ms is not None and left_ms <= 0:
                    raise WaitTimeout(self.id, view.state, timedelta(milliseconds=timeout_ms))

    def result_sync(self, timeout: Duration | None = None) -> R:
        """`result` for code without an event loop."""
        return self._way._portal.call("result_sync", lambda: self.result(timeout), "await job.result(…)")

    async def _arrival(self) -> bool:
        """Whether the relay has handed it in; then `id` is the job's, whoever submitted it first.

        Raises `UnknownJob` if there is no event (the transaction was rolled back, or is still open), `JobFailed` if the
        relay has given it up.
        """
        event = await self._way.transactional_event(self._outbox_of, self.id)
        if event is None:
            raise UnknownJob(self.id)
        if event.status is OutboxStatus.DEAD:
            raise JobFailed(self.id, State.FAILED, OUTBOX_DEAD, event.last_error)
        if event.status is not OutboxStatus.SENT:
            return False
        if first := original_job_id(event):
            self.id, self.duplicate = first, True
        return True

    def _known(self, view: JobInfo | None) -> JobInfo:
        if view is None:
            raise UnknownJob(self.id)
        return view

    def __repr__(self) -> str:
        return f"<Job {self.id} in {self.queue!r}{' (duplicate)' if self.duplicate else ''}>"


def _ended(error: type[JobFailed], view: JobInfo) -> JobFailed:
    if (failure := view.failure) is None:
        return error(view.job_id, view.state, None, None)
    return error(view.job_id, view.state, failure.code, failure.message)
