"""Logs of the long-running commands: to stderr, as plain text or one JSON object per line, redacted.

Log records written during a run, including those of the user's code, carry the job's fields. `current_claim` is set
around each run and read by the formatter.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from holdfast.core.job import Claim

#: The run that this task or thread is in. An asyncio task has a context of its own, so that nothing has to be reset.
current_claim: Final[ContextVar[Claim | None]] = ContextVar("holdfast_current", default=None)


def log_fields(claim: Claim) -> dict[str, Any]:
    """The fields by which a log line names a run, for `extra=`."""
    return {
        "trace_id": claim.trace_id,
        "job_id": claim.job_id,
        "task": claim.task,
        "queue": claim.queue,
        "tenant_id": claim.tenant_id,
        "attempt": claim.attempt,
        "worker": claim.lease.worker,
    }
