"""Rows of a folded batch in column order, outbox rows included; the same for every store.

Stores differ only in how they represent an instant, so each passes its own conversion (`AsInstant`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from holdfast.core.codec import to_json
from holdfast.core.job import Event, Failure, new_job_ids
from holdfast.core.publishing import EventPublishing, PublishedRow
from holdfast.core.states import State
from holdfast.core.text import clean, error_fingerprint
from holdfast.core.verdict import failure_of_event
from holdfast.ledger.fold import Anomaly, JobDraft
from holdfast.ledger.fold_events import (
    AsInstant,
    Row,
    attempts_of,
    data_of,
    dead_letter_event,
    dead_letter_id,
    envelope_of,
)

#: Names of an anomaly are truncated to this, to fit an index; its event has them in full …
_NAME_LIMIT: Final = 500
#: … and is truncated to this.
_EVENT_LIMIT: Final = 64 * 1024

JOB_COLUMNS: Final = (
    "tenant_id",
    "job_id",
    "queue",
    "state",
    "attempt",
    "retry_count",
    "last_seq",
    "worker",
    "error_code",
    "last_error",
    "error_message",
    "result",
    "run_at",
    "next_retry_at",
    "dlq_id",
    "created_at",
    "updated_at",
    "finished_at",
    "job_type",
    "priority",
    "idempotency_key",
    "trace_id",
    "payload",
    "context",
    "meta",
    "webhook",
)
EVENT_COLUMNS: Final = (
    "tenant_id",
    "job_id",
    "queue",
    "seq",
    "type",
    "from_state",
    "to_state",
    "attempt",
    "retry_count",
    "worker",
    "message",
    "data",
    "at",
)
ANOMALY_COLUMNS: Final = ("tenant_id", "id", "job_id", "queue", "reason", "event", "at")


def job_row(draft: JobDraft, queue: str, instant: AsInstant) -> Row:
    """The row of a new job."""
    at = instant(draft.at_ms)
    return (
        draft.tenant_id,
        draft.job_id,
        queue,
        draft.state,
        draft.attempt,
        draft.retry_count,
        len(draft.events),
        draft.worker,
        draft.error_code,
        draft.last_error,
        draft.error_message,
        draft.result,
        instant(draft.run_at_ms),
        instant(draft.next_retry_at_ms),
        draft.dlq_id,
        instant(draft.events[0].at_ms),
        at,
        at if draft.ended else None,
        *envelope_of(draft),
    )


def event_rows(drafts: Iterable[JobDraft], queue: str, instant: AsInstant) -> list[Row]:
    """The rows of all events, numbered from each draft's `seq` + 1."""
    rows: list[Row] = []
    for draft in drafts:
        tenant_id, job_id = draft.tenant_id, draft.job_id
        for seq, event in enumerate(draft.events, draft.seq + 1):
            rows.append(
                (
                    tenant_id,
                    job_id,
                    queue,
                    seq,
                    event.type,
                    event.from_state,
                    event.to_state,
                    event.attempt,
                    event.retry_count,
                    event.worker or None,
                    event.message or None,
                    data_of(event) if event.data else None,
                    instant(event.at_ms),
                )
            )
    return rows


def shared_values(draft: JobDraft) -> Row:
    """Values that many moves of known jobs share.

    Tenant, number of events, previous state, and attempts and retries before and after.
    """
    return (
        draft.tenant_id,
        len(draft.events),
        draft.previous_state,
        draft.previous_attempt,
        draft.previous_retries,
        draft.attempt,
        draft.retry_count,
    )


def own_values(draft: JobDraft, instant: AsInstant) -> Row:
    """All other values that a move of a known job may change, except its time."""
    return (
        draft.state,
        instant(draft.finished_at_ms),
        draft.worker,
        draft.result,
        instant(draft.next_retry_at_ms),
        instant(draft.run_at_ms),
        draft.dlq_id,
        draft.keeps_errors,
        draft.error_code,
        draft.last_error,
        draft.error_message,
    )


def expedited_rows(drafts: Iterable[JobDraft], instant: AsInstant) -> list[Row]:
    """Known jobs that were expedited: tenant, id, instant."""
    return [
        (draft.tenant_id, draft.job_id, instant(draft.expedited_at_ms))
        for draft in drafts
        if draft.expedited_at_ms and draft.creation is None
    ]


def dead_letter_row(draft: JobDraft, job_type: str, history: Iterable[Event], instant: AsInstant) -> Row:
    """The row of a dead letter, with all attempts that the ledger knows (requirements D2, Y6).

    Tenant, job id, dlq id, error code, error, stack, retries, history, failed at, acknowledged at, fingerprint.
    """
    assert draft.dead_letter is not None
    history = list(history)
    event = dead_letter_event(draft.dead_letter, history)
    failure = failure_of_event(event) or Failure("UNKNOWN", event.message)
    engine_history = (event.data or {}).get("history") or ()
    return (
        draft.tenant_id,
        draft.job_id,
        draft.dlq_id or (event.data or {}).get("dlq_id") or dead_letter_id(event),
        failure.code,
        failure.message,
        failure.stack,
        event.retry_count,
        attempts_of(history, engine_history),
        instant(event.at_ms),
        instant(draft.at_ms) if draft.state is State.FAILED else None,
        error_fingerprint(job_type, failure),
    )


def anomaly_rows(anomalies: Sequence[Anomaly], queue: str, instant: AsInstant) -> list[Row]:
    """The rows of anomalies, truncated to what every store accepts."""
    return [
        (
            clean(anomaly.event.tenant_id)[:_NAME_LIMIT],
            unique,
            clean(anomaly.event.job_id)[:_NAME_LIMIT],
            queue,
            clean(anomaly.reason)[:_NAME_LIMIT],
            clean(to_json(anomaly.event))[:_EVENT_LIMIT],
            instant(max(1, anomaly.event.at_ms)),
        )
        for anomaly, unique in zip(anomalies, new_job_ids(len(anomalies)), strict=True)
    ]


def published_rows(
    publishing: EventPublishing, drafts: Iterable[JobDraft], queue: str, instant: Callable[[int], Any]
) -> list[PublishedRow]:
    """Outbox rows of the events to publish, numbered from each draft's `seq` + 1."""
    return [
        publishing.row(queue, seq, event, instant)
        for draft in drafts
        for seq, event in enumerate(draft.events, draft.seq + 1)
        if publishing.includes(event.type)
    ]
