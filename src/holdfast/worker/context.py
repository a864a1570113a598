"""What a running task may know about its own job.

A task gets one if a parameter is annotated with `Context`; it is not part of the payload, and is not
made for tasks that do not ask.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.job import Claim


class Context:
    """One run of one job, as its function sees it."""

    __slots__ = ("_claim", "cancelled")

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        #: True once the run is over from outside: cancelled, out of time, lease lost, or the worker drains.
        #: An async task is cancelled as well; a function in a thread has to look here, nobody can stop it.
        self.cancelled = False

    @property
    def job_id(self) -> str:
        return self._claim.lease.job_id

    @property
    def task(self) -> str:
        return self._claim.task

    @property
    def queue(self) -> str:
        return self._claim.lease.queue

    @property
    def tenant_id(self) -> str:
        return self._claim.tenant_id

    @property
    def attempt(self) -> int:
        """Which run this is, counted from 1 at claim: runs whose worker died count too."""
        return self._claim.attempt

    @property
    def retry_count(self) -> int:
        """How many retries the job has used up."""
        return self._claim.meta.retry_count

    @property
    def idempotency_key(self) -> str:
        """The job's own key; its id if it was submitted without one."""
        return self._claim.idempotency_key or self._claim.lease.job_id

    @property
    def run_key(self) -> str:
        """The key of this run: job id and retry count (requirement Y3)."""
        return f"{self._claim.lease.job_id}:{self._claim.meta.retry_count}"

    @property
    def trace_id(self) -> str:
        return self._claim.trace_id

    @property
    def context(self) -> dict[str, Any]:
        """What the submitter sent along beside the arguments: user, trace, anything."""
        return self._claim.meta.context or {}

    def __repr__(self) -> str:
        return f"<Context {self.task} job={self.job_id} attempt={self.attempt}>"
