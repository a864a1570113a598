"""What the ledger's queries answer with: rows as frozen structs, instants aware, JSON decoded when it is asked for."""

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
        """Decoded; what is no JSON (a foreign message may carry anything) is its text."""
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return self.text


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as lists show it."""

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
    """A job with all that it carries."""

    payload: JsonText
    context: JsonText | None
    result: JsonText | None
    meta: JsonText | None


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, newest first. While there is a cursor there may be more, even where a page is short or empty: filters that
    no index serves look through a bounded number of jobs at a time."""

    jobs: list[JobRow]
    cursor: str | None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a job's story."""

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
        """As the feed told it."""
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
    """A job that was given up, with everything that is needed to decide about it (requirement D2)."""

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
    """Jobs by state. Counts of the states in `estimated` are the planner's guess, all others are exact."""

    states: Mapping[State, int]
    estimated: frozenset[State] = frozenset()
