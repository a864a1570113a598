"""Log fields that identify the current run.

Log records written during a run, including those of the user's code, carry the job's fields. `current_claim` is set
around each run and read by the formatters (`observe.log_formats`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from holdfast.core.job import Claim

#: Claim of the current run. Every asyncio task has its own context, so that it need not be reset.
current_claim: Final[ContextVar[Claim | None]] = ContextVar("holdfast_current", default=None)


def log_fields(claim: Claim) -> dict[str, Any]:
    """Fields that identify a run in a log record, for `extra=`."""
    return {
        "trace_id": claim.trace_id,
        "job_id": claim.job_id,
        "task": claim.task,
        "queue": claim.queue,
        "tenant_id": claim.tenant_id,
        "attempt": claim.attempt,
        "worker": claim.lease.worker,
    }
