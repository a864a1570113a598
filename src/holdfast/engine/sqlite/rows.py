"""Typed rows of the statements, and their conversion to claims, job infos and events.

`LeaseRow.fence` is the check at settle and renew that a lease still holds.

The rows are JSON arrays; the order of their fields is that of the SELECT.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import msgspec

from holdfast.core.job import EMPTY_META, Claim, Event, Failure, JobInfo, Lease, Meta, decode_meta
from holdfast.core.states import State
from holdfast.core.text import MESSAGE_DEPTH, too_deep
from holdfast.core.verdict import SettleResult
from holdfast.engine.port.feed import FeedEntry
from holdfast.engine.port.operators import QueueControl, TenantControl

_log: Final = logging.getLogger("holdfast.engine.sqlite")

#: `Meta` contains values that may be nested to `MESSAGE_DEPTH`.
_META_DEPTH: Final = MESSAGE_DEPTH + 20


class WorkRow(msgspec.Struct, array_like=True, frozen=True):
    """A job with all fields that a claim or a move needs."""

    id: int
    job_id: str
    job_type: str
    tenant_id: str
    idempotency_key: str
    trace_id: str
    state: State
    attempt: int
    claim_seq: int
    deliveries: int
    worker: str | None
    claimed_at: int | None
    created_at: int
    run_at: int | None
    last_seq: int
    payload: str
    meta: str | None

    def to_claim(self, queue: str) -> Claim:
        """The claim of the current lease."""
        lease = Lease(queue, self.job_id, f"{self.id}.{self.claim_seq}", self.deliveries, self.worker or "")
        return self._claim(lease, self.attempt, self.claimed_at or 0)

    def to_started_claim(self, queue: str, worker: str, now_ms: int) -> Claim:
        """The claim that `lease_jobs` makes."""
        return self._claim(
            Lease(queue, self.job_id, f"{self.id}.{self.claim_seq + 1}", 1, worker), self.attempt + 1, now_ms
        )

    def to_reclaimed_claim(self, queue: str, worker: str, now_ms: int) -> Claim:
        """The claim that `reclaim` makes."""
        lease = Lease(queue, self.job_id, f"{self.id}.{self.claim_seq}", self.deliveries + 1, worker)
        return self._claim(lease, self.attempt + 1, now_ms)

    def _claim(self, lease: Lease, attempt: int, claimed_at_ms: int) -> Claim:
        return Claim(
            lease,
            self.job_type,
            self.payload.encode(),
            self.tenant_id,
            self.idempotency_key or self.job_id,
            self.trace_id,
            attempt,
            self.created_at,
            claimed_at_ms,
            read_meta(self.meta),
        )


class LeaseRow(msgspec.Struct, array_like=True, frozen=True):
    """A job as settle and renew read it."""

    id: int
    queue: str
    job_id: str
    state: State
    claim_seq: int
    deliveries: int
    worker: str | None
    token: str | None
    attempt: int
    last_seq: int
    run_at: int | None

    def fence(self, lease: Lease, token: str) -> SettleResult:
        """Whether this lease still holds: the job runs, with this worker, position and delivery count.

        The delivery count distinguishes attempts of one worker. An expired lease holds until the job is reclaimed.
        """
        if self.token == token:
            return SettleResult.ALREADY
        holds = (
            self.state is State.RUNNING
            and self.deliveries == lease.deliveries
            and self.worker == lease.worker
            and self.job_id == lease.job_id
            and self.queue == lease.queue
            and f"{self.id}.{self.claim_seq}" == lease.position
        )
        return SettleResult.APPLIED if holds else SettleResult.STALE


class JobInfoRow(msgspec.Struct, array_like=True, frozen=True):
    """A job as a reader gets it."""

    id: int
    job_id: str
    job_type: str
    queue: str
    tenant_id: str
    state: State
    attempt: int
    payload: str
    idempotency_key: str
    trace_id: str
    meta: str | None
    created_at: int
    worker: str | None
    result: str | None
    error_code: str | None
    last_error: str | None
    due_at: int | None
    next_retry_at: int | None
    finished_at: int | None
    schema_fingerprint: str | None

    def to_info(self) -> JobInfo:
        meta = read_meta(self.meta)
        return JobInfo(
            job_id=self.job_id,
            task=self.job_type,
            queue=self.queue,
            tenant_id=self.tenant_id,
            state=self.state,
            attempt=self.attempt,
            payload=self.payload.encode(),
            idempotency_key=self.idempotency_key or self.job_id,
            trace_id=self.trace_id,
            meta=meta,
            created_at_ms=self.created_at,
            worker=self.worker or "",
            result=None if self.result is None else self.result.encode(),
            failure=self._failure(meta),
            next_attempt_at_ms=self.next_retry_at or self.due_at or 0,
            finished_at_ms=self.finished_at or 0,
            schema="" if self.finished_at else self.schema_fingerprint or "",
        )

    def _failure(self, meta: Meta) -> Failure | None:
        """The last failure, in full if the history has it; an operator's dead letter has no attempt."""
        if self.error_code is None:
            return None
        last = meta.history[-1].failure if meta.history else None
        if last is not None and last.code == self.error_code:
            return last
        return Failure(self.error_code, self.last_error or "")


class FeedEventRow(msgspec.Struct, array_like=True, frozen=True):
    """An event in its feed entry; an entry whose events were pruned has one row without an event."""

    position: int
    nonce: str
    urgent: int
    id: int | None
    type: str | None
    job_id: str | None
    tenant_id: str | None
    at: int | None
    from_state: State | None
    to_state: State | None
    attempt: int | None
    retry_count: int | None
    worker: str | None
    message: str | None
    data: str | None

    def as_event(self) -> Event:
        return Event(
            type=self.type or "",
            job_id=self.job_id or "",
            at_ms=self.at or 0,
            tenant_id=self.tenant_id or "",
            from_state=self.from_state,
            to_state=self.to_state,
            attempt=self.attempt or 0,
            retry_count=self.retry_count or 0,
            worker=self.worker or "",
            message=self.message or "",
            data=None if self.data is None else _read_data(self.data),
        )


class ControlRow(msgspec.Struct, array_like=True, frozen=True):
    paused: bool
    intake_paused: bool
    concurrency: int | None
    worker_concurrency: int | None
    intake_limit: int | None
    backlog_alert: int | None
    tenants: str | None

    def as_control(self) -> QueueControl:
        return QueueControl(
            paused=self.paused,
            intake_paused=self.intake_paused,
            concurrency=self.concurrency,
            worker_concurrency=self.worker_concurrency,
            intake_limit=self.intake_limit,
            backlog_alert=self.backlog_alert,
            tenants=dict(tenant_controls(self.tenants)),
        )


@lru_cache(maxsize=256)
def tenant_controls(text: str | None) -> Mapping[str, TenantControl]:
    """Decode the tenants' controls in a queue's row; none if they cannot be read.

    The result is cached: do not change it.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, TenantControl]) if text else {}
    except (ValueError, RecursionError):
        _log.error("the controls of tenants %.100r cannot be read; another program has changed them", text)
        return {}


def read_meta(text: str | None) -> Meta:
    """Decode a job's `Meta`; empty if it cannot be read. One row must not stop the claims of all others."""
    try:
        if text and too_deep(text.encode(), _META_DEPTH):
            raise ValueError(f"it is nested deeper than {_META_DEPTH} levels")
        return decode_meta(text)
    except (ValueError, RecursionError) as exc:
        _log.error("the meta of a job cannot be read, another program has changed it: %.200s", exc)
        return EMPTY_META


def _read_data(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as exc:
        _log.error("the data of an event cannot be read, another program has changed it: %.200s", exc)
        return None


WORK_ROWS: Final = msgspec.json.Decoder(list[WorkRow])
LEASE_ROWS: Final = msgspec.json.Decoder(list[LeaseRow])
VIEW_ROWS: Final = msgspec.json.Decoder(list[JobInfoRow])
EVENT_ROWS: Final = msgspec.json.Decoder(list[FeedEventRow])
CONTROL: Final = msgspec.json.Decoder(ControlRow)
#: Row, job id, claim, delivery count and worker of leases.
LEASES: Final = msgspec.json.Decoder(list[tuple[int, str, int, int, str]])
NAMES: Final = msgspec.json.Decoder(list[str])
#: Queue to tenant.
OWNERS: Final = msgspec.json.Decoder(dict[str, str])
IDS: Final = msgspec.json.Decoder(list[int])
INSTANT: Final = msgspec.json.Decoder(tuple[int | None])

_encoder: Final = msgspec.json.Encoder()


def encode_meta(meta: Meta) -> str | None:
    return None if meta is EMPTY_META or meta == EMPTY_META else _encoder.encode(meta).decode()


def row_id_of(lease: Lease) -> int:
    """The row of a lease; 0 for a lease that is not from this engine."""
    row = lease.position.partition(".")[0]
    return int(row) if row.isdecimal() else 0


def group_entries(rows: Iterable[FeedEventRow]) -> list[FeedEntry]:
    """Group events into the feed entries in which they were written."""
    return [
        FeedEntry(str(position), nonce, [row.as_event() for row in step if row.id is not None], urgent=bool(urgent))
        for (position, nonce, urgent), step in groupby(rows, key=lambda row: (row.position, row.nonce, row.urgent))
    ]
