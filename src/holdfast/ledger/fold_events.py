"""What single feed events contain: failure, envelope, attempts, approvals (A2), audit (H5). Pure.

A job's approval request is a row of `approvals` from the event that holds the job. It stays open until it is decided or
the job continues without a decision. What an operator did is a row of `operator_events`, never part of the job's
history; its id is derived from its position in the feed, so that it is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from uuid import NAMESPACE_URL, uuid5

import msgspec

from holdfast.core.codec import to_json
from holdfast.core.job import (
    ApprovalRequest,
    Attempt,
    Event,
    Meta,
    Priority,
    approval_data,
    convert_meta,
    decode_meta,
)
from holdfast.core.states import FORKED_EVENT, OPERATOR_PREFIX, RESTORED_EVENT, State
from holdfast.core.text import clean
from holdfast.core.verdict import SUPERSEDED, failure_of_event
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.port.operators import ApprovalStatus

if TYPE_CHECKING:
    from holdfast.ledger.fold import JobDraft


#: `last_error` is a summary; events and the dead letter have the full text.
LAST_ERROR_LIMIT: Final = 2_000
#: Outcome of an attempt that a lost lease ended.
RECLAIMED: Final = "reclaimed"

#: Task and payload of a job whose creation event was lost; a submission never has this payload.
UNKNOWN_TASK: Final = "unknown"
UNKNOWN_PAYLOAD: Final = "null"

#: Moves whose data is written to the job's row and read from there.
_IN_THE_ROW: Final = frozenset({State.SUCCEEDED})


def dead_letter_event(event: Event, history: Iterable[Event]) -> Event:
    """The event that dead-lettered a job.

    That is the given event or, if it only restored the job, the last such event in the history.
    """
    failed = [past for past in history if past.to_state is State.DLQ_PENDING and past.type != RESTORED_EVENT]
    return failed[-1] if event.type == RESTORED_EVENT and failed else event


def dead_letter_id(event: Event) -> str:
    """Derive a dead letter's id from its event: folded again, it is written once."""
    return uuid5(NAMESPACE_URL, f"{event.tenant_id}/{event.job_id}/{event.at_ms}").hex


# Rows ----------------------------------------------------------------------------------------------


def envelope_of(draft: JobDraft) -> tuple[str, int, str, str, str, str | None, str | None, str | None]:
    """Type, priority, idempotency key, trace id, payload, context, meta, webhook of a new job."""
    data = (draft.creation.data if draft.creation else None) or {}
    context, meta = data.get("context"), data.get("meta") or None
    return (
        data.get("task", UNKNOWN_TASK),
        data.get("priority", int(Priority.NORMAL)),
        data.get("idempotency_key") or draft.job_id,
        data.get("trace_id") or "",
        data.get("payload", UNKNOWN_PAYLOAD),
        None if context is None else to_json(context),
        meta,
        # Most jobs have no webhook, and their `meta` is not decoded.
        _webhook_of(meta) if meta is not None and '"webhook"' in meta else None,
    )


def meta_of(text: Any) -> Meta:
    """`Meta` of an envelope, given as text or decoded. Raises `msgspec.MsgspecError`."""
    if isinstance(text, str):
        return decode_meta(text)
    return convert_meta(text) if text else Meta()


def _webhook_of(meta: str) -> str | None:
    try:
        return meta_of(meta).webhook or None
    except msgspec.MsgspecError:
        return None


def data_of(event: Event) -> str | None:
    """The `data` column of the event's row; the envelope and the result are in the job's row."""
    data = event.data
    if not data or event.to_state in _IN_THE_ROW:
        return None
    if event.from_state is None and event.to_state is not None:
        # The job's row has its current due time, which may differ.
        return to_json({"run_at_ms": data["run_at_ms"]}) if data.get("run_at_ms") else None
    if "history" in data:
        # The dead letter has the full history.
        data = {key: value for key, value in data.items() if key != "history"}
    return to_json(data)


def attempts_of(events: Iterable[Event], engine_history: Sequence[Any] = ()) -> str:
    """All attempts in a job's history, as JSON (requirement Y6).

    If the engine's bounded history has more, the job is older than the ledger, and the engine's history is used.
    """
    attempts: list[Any] = []
    begun: Event | None = None
    for event in events:
        if event.to_state is None:
            continue
        if begun is not None and (event.data or {}).get("started") is not False:
            attempts.append(_attempt(begun, event))
        begun = event if event.to_state is State.RUNNING and event.type != FORKED_EVENT else None
    return to_json(attempts if len(attempts) >= len(engine_history) else list(engine_history))


def _attempt(begun: Event, end: Event) -> Attempt:
    outcome = RECLAIMED if end.to_state is State.RUNNING else str(end.to_state)
    return Attempt(begun.attempt, begun.worker, begun.at_ms, end.at_ms, outcome, failure_of_event(end))


def sanitize_event(event: Event) -> Event:
    """The event without text that a store would refuse; the same object if it has none."""
    data = event.data
    if data:
        data = {key: clean(value) if type(value) is str else value for key, value in data.items()}
    fresh = (clean(event.tenant_id), clean(event.job_id), clean(event.worker), clean(event.message), data)
    if fresh == (event.tenant_id, event.job_id, event.worker, event.message, event.data):
        return event
    tenant_id, job_id, worker, message, data = fresh
    return msgspec.structs.replace(event, tenant_id=tenant_id, job_id=job_id, worker=worker, message=message, data=data)


#: Converts milliseconds to an instant of the store, 0 to None.
AsInstant = Callable[[int], Any]
Row = tuple[Any, ...]


#: Status of an open approval request when its job continues; a decided one keeps its status.
_STATUS: Final = {
    "approval.approved": ApprovalStatus.APPROVED,
    "approval.rejected": ApprovalStatus.REJECTED,
    "approval.expired": ApprovalStatus.EXPIRED,
}

#: Columns of an approval request, besides those taken from its job.
APPROVAL_REQUEST_COLUMNS: Final = (
    "tenant_id",
    "job_id",
    "approval_id",
    "name",
    "payload_hash",
    "policies",
    "reason",
    "details",
    "quorum",
    "deadline",
    "requested_by",
    "requested_at",
)
CLOSING_COLUMNS: Final = ("tenant_id", "job_id", "stays", "status", "decided_by", "decision_reason", "at")
AUDIT_COLUMNS: Final = (
    "tenant_id",
    "id",
    "type",
    "actor",
    "target",
    "target_id",
    "queue",
    "reason",
    "before",
    "after",
    "at",
)


class ApprovalClosing(msgspec.Struct, frozen=True):
    """Closes the open approval requests of a job, except the one that `stays`."""

    draft: JobDraft
    stays: str
    status: ApprovalStatus
    by: Any
    reason: Any


def feed_events(entries: Iterable[FeedEntry], queue: str) -> Iterator[Event]:
    """Events of the entries, in order.

    An audit event gets an id derived from its position, so that it is written once.
    """
    for entry in entries:
        for number, event in enumerate(entry.events):
            if event.to_state is None and event.type.startswith(OPERATOR_PREFIX):
                yield _with_id(event, f"{queue}/{entry.position}/{entry.nonce}/{number}")
            else:
                yield event


def _with_id(event: Event, position: str) -> Event:
    """Add an id that is ordered by time, like a job's."""
    digits = sha256(position.encode(errors="replace")).hexdigest()
    unique = f"{max(0, event.at_ms):012x}7{digits[:3]}8{digits[3:18]}"
    return msgspec.structs.replace(event, data={**(event.data or {}), "id": unique})


def approval_requests(draft: JobDraft) -> list[tuple[Event, ApprovalRequest]]:
    """The approval requests in a draft's events."""
    waiting = (event for event in draft.events if event.to_state is State.WAITING_APPROVAL)
    return [(event, request) for event in waiting if (request := approval_request_of(event)) is not None]


def approval_request_of(event: Event) -> ApprovalRequest | None:
    """The approval request of an event, or None.

    It is in the envelope if the job was held at its creation, otherwise in the event's data.
    """
    data = event.data or {}
    try:
        if event.from_state is None:
            return meta_of(data.get("meta")).approval_request
        request = approval_data(data, "approval_request")
        return msgspec.convert(request, ApprovalRequest) if request else None
    except msgspec.MsgspecError:
        # The job is held nevertheless, without a request to decide.
        return None


def approval_changes(
    drafts: Iterable[JobDraft],
) -> tuple[list[tuple[JobDraft, Event, ApprovalRequest]], list[ApprovalClosing]]:
    """The approval requests to insert, and those to close."""
    requested, closed = [], []
    for draft in drafts:
        if draft.awaiting_approval or (draft.previous_state is State.WAITING_APPROVAL and draft.state is not None):
            requests = approval_requests(draft)
            requested += [(draft, event, request) for event, request in requests]
            if draft.state is not State.WAITING_APPROVAL:
                closed.append(_closing(draft, ""))
            elif len(requests) > 1 or (requests and draft.previous_state is State.WAITING_APPROVAL):
                closed.append(_closing(draft, requests[-1][1].approval_id))
    return requested, closed


def _closing(draft: JobDraft, stays: str) -> ApprovalClosing:
    leaving = (event for event in reversed(draft.events) if event.from_state is State.WAITING_APPROVAL)
    event = next(leaving, None)
    data = (event.data if event is not None else None) or {}
    status = _STATUS.get(event.type, ApprovalStatus.WITHDRAWN) if event is not None else ApprovalStatus.WITHDRAWN
    if status is ApprovalStatus.APPROVED and not approval_data(data, "approval"):
        status = ApprovalStatus.WITHDRAWN
    return ApprovalClosing(draft, stays, status, data.get("actor"), data.get("reason") or SUPERSEDED)


# Rows ----------------------------------------------------------------------------------------------


def approval_request_row(draft: JobDraft, event: Event, request: ApprovalRequest, instant: AsInstant) -> Row:
    """In the order of `APPROVAL_REQUEST_COLUMNS`."""
    return (
        draft.tenant_id,
        draft.job_id,
        clean(request.approval_id),
        clean(request.name),
        clean(request.payload_hash),
        clean(to_json(request.policies)),
        clean(request.reason),
        None if request.details is None else clean(to_json(request.details)),
        request.quorum,
        instant(request.deadline_at_ms),
        clean(request.requested_by),
        instant(event.at_ms),
    )


def approval_closing_row(closing: ApprovalClosing, instant: AsInstant) -> Row:
    """In the order of `CLOSING_COLUMNS`."""
    return (
        closing.draft.tenant_id,
        closing.draft.job_id,
        clean(closing.stays),
        closing.status.value,
        None if closing.by is None else clean(str(closing.by)),
        clean(str(closing.reason)),
        instant(closing.draft.at_ms),
    )


def audit_row(event: Event, queue: str, instant: AsInstant) -> Row:
    """What an operator did to a job or queue, in the order of `AUDIT_COLUMNS`."""
    data = event.data or {}
    before, after = data.get("before"), data.get("after")
    target, target_id = ("job", event.job_id) if event.job_id else ("queue", queue)
    return (
        event.tenant_id,
        data["id"],
        event.type,
        clean(str(data.get("actor") or "unknown")),
        clean(str(data.get("target") or target)),
        clean(str(data.get("target_id") or target_id)),
        queue,
        clean(str(data.get("reason") or "")),
        None if before is None else clean(to_json(before)),
        None if after is None else clean(to_json(after)),
        instant(max(1, event.at_ms)),
    )
