"""What single feed events say: failure, envelope, attempts, approval requests (A2), audit entries (H5). Pure.

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
from holdfast.core.job import ApprovalRequest, Attempt, Event, Failure, Meta, Priority
from holdfast.core.states import FORKED_EVENT, OPERATOR_PREFIX, RESTORED_EVENT, State
from holdfast.core.text import clean
from holdfast.core.verdict import operator_failure
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.port.operators import ApprovalStatus

if TYPE_CHECKING:
    from holdfast.ledger.fold import JobDraft


#: `last_error` is for looking at; the events and the dead letter have the whole.
LAST_ERROR_LIMIT: Final = 2_000
#: A lost lease ended this attempt.
RECLAIMED: Final = "reclaimed"

#: What a job is called whose creation nobody told us, and its payload, which is no submission's.
UNKNOWN_TASK: Final = "unknown"
UNKNOWN_PAYLOAD: Final = "null"

#: Written as they are in the job's row, and told from there.
_IN_THE_ROW: Final = frozenset({State.SUCCEEDED})


def failure_of(event: Event) -> Failure | None:
    """Why it happened, where an event tells of a failure or of a person who ended the job."""
    data = event.data or {}
    if "code" in data:
        said = (data["code"], data.get("message"), data.get("type"), data.get("stack"))
        return Failure(*(str(word or "") for word in said))
    if event.to_state is State.CANCELLED:
        return operator_failure(State.CANCELLED, str(data.get("actor") or "unknown"), str(data.get("reason") or ""))
    return None


def dead_letter_event(letter: Event, story: Iterable[Event]) -> Event:
    """The event that a dead letter is about: its own, or, if the job was only put back, the one in its story."""
    deaths = [event for event in story if event.to_state is State.DLQ_PENDING and event.type != RESTORED_EVENT]
    return deaths[-1] if letter.type == RESTORED_EVENT and deaths else letter


def dead_letter_id(event: Event) -> str:
    """The same one whenever this is folded: an item is written once."""
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
        # Most have none, and need not be read.
        _webhook_of(meta) if meta is not None and '"webhook"' in meta else None,
    )


def meta_of(text: Any) -> Meta:
    """Of an envelope, as text or decoded. Raises `msgspec.MsgspecError`."""
    if isinstance(text, str):
        return msgspec.json.decode(text, type=Meta) if text else Meta()
    return msgspec.convert(text, Meta) if text else Meta()


def _webhook_of(meta: str) -> str | None:
    try:
        return meta_of(meta).webhook or None
    except msgspec.MsgspecError:
        return None


def data_of(event: Event) -> str | None:
    """What the event's own row says beside its columns; the envelope and the result are in the job's row."""
    data = event.data
    if not data or event.to_state in _IN_THE_ROW:
        return None
    if event.from_state is None and event.to_state is not None:
        # The row says when the job is due next, which may have changed since.
        return to_json({"run_at_ms": data["run_at_ms"]}) if data.get("run_at_ms") else None
    if "history" in data:
        # In full with the dead letter.
        data = {key: value for key, value in data.items() if key != "history"}
    return to_json(data)


def attempts_of(events: Iterable[Event], told: Sequence[Any] = ()) -> str:
    """Every attempt in a job's story, as JSON (requirement Y6); `told` is the engine's bounded history, for stories
    that began before the ledger did."""
    attempts: list[Any] = []
    begun: Event | None = None
    for event in events:
        if event.to_state is None:
            continue
        if begun is not None and (event.data or {}).get("started") is not False:
            attempts.append(_attempt(begun, event))
        begun = event if event.to_state is State.RUNNING and event.type != FORKED_EVENT else None
    return to_json(attempts if len(attempts) >= len(told) else list(told))


def _attempt(begun: Event, end: Event) -> Attempt:
    outcome = RECLAIMED if end.to_state is State.RUNNING else str(end.to_state)
    return Attempt(begun.attempt, begun.worker, begun.at_ms, end.at_ms, outcome, failure_of(end))


def sanitize_event(event: Event) -> Event:
    """The event with no text in it that a store would refuse; the same one if there is none."""
    data = event.data
    if data:
        data = {key: clean(value) if type(value) is str else value for key, value in data.items()}
    fresh = (clean(event.tenant_id), clean(event.job_id), clean(event.worker), clean(event.message), data)
    if fresh == (event.tenant_id, event.job_id, event.worker, event.message, event.data):
        return event
    tenant_id, job_id, worker, message, data = fresh
    return msgspec.structs.replace(event, tenant_id=tenant_id, job_id=job_id, worker=worker, message=message, data=data)


#: What an instant is in this store; of 0, None.
AsInstant = Callable[[int], Any]
Row = tuple[Any, ...]


#: Why a question to people is withdrawn, if nobody says.
WENT_ON: Final = "the job went on without an answer"

#: What an open question comes to when its job moves on; one that people have decided stays as they left it.
_STATUS: Final = {
    "approval.approved": ApprovalStatus.APPROVED,
    "approval.rejected": ApprovalStatus.REJECTED,
    "approval.expired": ApprovalStatus.EXPIRED,
}

#: Of a question to people, beside what its job says.
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
    """A job that does not wait any more: its open questions are closed, all but the one that `stays`."""

    draft: JobDraft
    stays: str
    status: ApprovalStatus
    by: Any
    why: Any


def feed_events(entries: Iterable[FeedEntry], queue: str) -> Iterator[Event]:
    """Their events, in order; what people did is named by its place in the feed, so that it is written once."""
    for entry in entries:
        for number, event in enumerate(entry.events):
            if event.to_state is None and event.type.startswith(OPERATOR_PREFIX):
                yield _named(event, f"{queue}/{entry.position}/{entry.nonce}/{number}")
            else:
                yield event


def _named(event: Event, place: str) -> Event:
    """With an id that is ordered by time, like a job's."""
    digits = sha256(place.encode(errors="replace")).hexdigest()
    unique = f"{max(0, event.at_ms):012x}7{digits[:3]}8{digits[3:18]}"
    return msgspec.structs.replace(event, data={**(event.data or {}), "id": unique})


def approval_requests(draft: JobDraft) -> list[tuple[Event, ApprovalRequest]]:
    """The questions to people in a draft's events."""
    asks = ((event, approval_request_of(event)) for event in draft.events if event.to_state is State.WAITING_APPROVAL)
    return [(event, ask) for event, ask in asks if ask is not None]


def approval_request_of(event: Event) -> ApprovalRequest | None:
    """What people are asked by it: at the creation of a held job it is in the envelope, later in the event itself."""
    data = event.data or {}
    try:
        if event.from_state is None:
            return meta_of(data.get("meta")).ask
        return msgspec.convert(data["ask"], ApprovalRequest) if data.get("ask") else None
    except msgspec.MsgspecError:
        # Held all the same; but there is no question that anybody could answer.
        return None


def approval_changes(
    drafts: Iterable[JobDraft],
) -> tuple[list[tuple[JobDraft, Event, ApprovalRequest]], list[ApprovalClosing]]:
    """What jobs ask people, and whose questions nobody has to answer any more."""
    asked, closed = [], []
    for draft in drafts:
        if draft.awaiting_approval or (draft.previous_state is State.WAITING_APPROVAL and draft.state is not None):
            asks = approval_requests(draft)
            asked += [(draft, event, ask) for event, ask in asks]
            if draft.state is not State.WAITING_APPROVAL:
                closed.append(_closing(draft, ""))
            elif len(asks) > 1 or (asks and draft.previous_state is State.WAITING_APPROVAL):
                closed.append(_closing(draft, asks[-1][1].approval_id))
    return asked, closed


def _closing(draft: JobDraft, stays: str) -> ApprovalClosing:
    leaving = (event for event in reversed(draft.events) if event.from_state is State.WAITING_APPROVAL)
    event = next(leaving, None)
    data = (event.data if event is not None else None) or {}
    status = _STATUS.get(event.type, ApprovalStatus.WITHDRAWN) if event is not None else ApprovalStatus.WITHDRAWN
    if status is ApprovalStatus.APPROVED and not data.get("consent"):
        status = ApprovalStatus.WITHDRAWN
    return ApprovalClosing(draft, stays, status, data.get("actor"), data.get("reason") or WENT_ON)


# Rows ----------------------------------------------------------------------------------------------


def approval_request_row(draft: JobDraft, event: Event, ask: ApprovalRequest, instant: AsInstant) -> Row:
    """Of a question to people, in the order of `ASK_COLUMNS`."""
    return (
        draft.tenant_id,
        draft.job_id,
        clean(ask.approval_id),
        clean(ask.name),
        clean(ask.payload_hash),
        clean(to_json(ask.policies)),
        clean(ask.reason),
        None if ask.details is None else clean(to_json(ask.details)),
        ask.quorum,
        instant(ask.deadline_at_ms),
        clean(ask.requested_by),
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
        clean(str(closing.why)),
        instant(closing.draft.at_ms),
    )


def audit_row(event: Event, queue: str, instant: AsInstant) -> Row:
    """Of what a person did to a job or a queue, in the order of `DEED_COLUMNS`."""
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
