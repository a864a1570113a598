"""A job that the engine has forgotten, by the ledger's row: for a story that does not add up any more."""

from __future__ import annotations

from datetime import datetime

from holdfast.core.job import Failure, JobView, Meta
from holdfast.ledger.records import JobDetail


def as_view(row: JobDetail) -> JobView:
    """What the row says; less than the events would."""
    failed = row.error_code or row.last_error
    return JobView(
        job_id=row.job_id,
        task=row.job_type,
        queue=row.queue,
        tenant_id=row.tenant_id,
        state=row.state,
        attempt=row.attempt,
        payload=row.payload.text.encode(),
        idempotency_key=row.idempotency_key,
        trace_id=row.trace_id,
        meta=Meta(priority=row.priority, retry_count=row.retry_count, dlq_id=row.dlq_id or ""),
        created_at_ms=_ms(row.created_at),
        worker=row.worker or "",
        failure=Failure(row.error_code or "", row.last_error or "") if failed else None,
        result=None if row.result is None else row.result.text.encode(),
        next_attempt_at_ms=_ms(row.next_retry_at),
        finished_at_ms=_ms(row.finished_at),
    )


def _ms(at: datetime | None) -> int:
    return 0 if at is None else round(at.timestamp() * 1000)
