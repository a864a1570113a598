"""Results of ledger queries: rows as frozen structs, with aware instants and JSON decoded on access."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from holdfast.core.job import Event, JobKey
from holdfast.core.states import State


class JsonText(msgspec.Struct, frozen=True):
    """JSON as it was submitted, byte for byte."""

    text: str

    @property
    def value(self) -> Any:
        """The decoded value; the text itself if it is not JSON (a foreign message may carry anything)."""
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return self.text


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as shown in lists."""

    tenant_id: str
    queue: str
    job_id: str
    job_type: str
    state: State
    priority: int
    attempt: int
    retry_count: int
    last_seq: int
    idempotency_key: str
    trace_id: str
    worker: str | None
    error_code: str | None
    last_error: str | None
    error_message: str | None
    dlq_id: str | None
    run_at: datetime | None
    next_retry_at: datetime | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    @property
    def key(self) -> JobKey:
        return JobKey(self.tenant_id, self.queue, self.job_id)


class JobDetail(JobRow, frozen=True, kw_only=True):
    """A job with payload, context, result and metadata."""

    payload: JsonText
    context: JsonText | None
    result: JsonText | None
    meta: JsonText | None


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, newest first. A cursor means that there may be more.

    A page may be short or empty and still have a cursor: a filter that no index serves scans a bounded number of jobs
    per page.
    """

    jobs: list[JobRow]
    cursor: str | None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job's history."""

    tenant_id: str
    queue: str
    job_id: str
    seq: int
    type: str
    from_state: State | None
    to_state: State | None
    attempt: int
    retry_count: int
    worker: str | None
    message: str | None
    data: JsonText | None
    at: datetime

    @property
    def key(self) -> JobKey:
        return JobKey(self.tenant_id, self.queue, self.job_id)

    def event(self) -> Event:
        """Convert to an `Event` as in the feed."""
        data = self.data.value if self.data is not None else None
        return Event(
            type=self.type,
            job_id=self.job_id,
            at_ms=round(self.at.timestamp() * 1000),
            tenant_id=self.tenant_id,
            from_state=self.from_state,
            to_state=self.to_state,
            attempt=self.attempt,
            retry_count=self.retry_count,
            worker=self.worker or "",
            message=self.message or "",
            data=data if isinstance(data, dict) else None,
        )


class JobDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letter of a job, with everything needed to decide about it (requirement D2)."""

    tenant_id: str
    dlq_id: str
    job_id: str
    queue: str
    job_type: str
    trace_id: str
    payload: JsonText
    error_code: str
    error: str
    stack: str
    retry_count: int
    history: JsonText
    failed_at: datetime
    status: str
    requested_by: str | None
    confirmed_by: str | None
    reason: str | None
    replayed_as: str | None
    replay_count: int
    fingerprint: str


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint inside a job."""

    position: int
    name: str
    result: JsonText
    attempt: int
    at: datetime


class EffectRow(msgspec.Struct, frozen=True, kw_only=True):
    """An effect that a job holds, has recorded, or left in doubt."""

    key: str
    state: str
    function: str
    attempt: int
    worker: str
    value: JsonText | None
    reason: str | None
    updated_at: datetime


class StateCounts(msgspec.Struct, frozen=True):
    """Jobs by state. Counts of states in `estimated` are the planner's estimate; all others are exact."""

    states: Mapping[State, int]
    estimated: frozenset[State] = frozenset()
