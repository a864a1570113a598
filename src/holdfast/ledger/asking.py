"""What feed events mean for people: questions that are asked or void (requirement A2), deeds of operators (H5). Pure.

A job's question is a row of `approvals` from the event that holds the job, and open until people answer it or the job
goes on without them. What an operator did is a row of `operator_events`, and never of the job's story.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

import msgspec

from holdfast.core.job import Ask, Event
from holdfast.core.states import OPERATOR_PREFIX, State
from holdfast.engine.port import FeedEntry
from holdfast.ledger.folding import Draft, meta_of, to_json
from holdfast.ledger.people import ApprovalStatus
from holdfast.ledger.rows import AsInstant, Row
from holdfast.ledger.text import clean

#: Why a question to people is withdrawn, if nobody says.
WENT_ON: Final = "the job went on without an answer"

#: What an open question comes to when its job moves on; one that people have decided stays as they left it.
_STATUS: Final = {
    "approval.approved": ApprovalStatus.APPROVED,
    "approval.rejected": ApprovalStatus.REJECTED,
    "approval.expired": ApprovalStatus.EXPIRED,
}

#: Of a question to people, beside what its job says.
ASK_COLUMNS: Final = (
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
DEED_COLUMNS: Final = (
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


class Closing(msgspec.Struct, frozen=True):
    """A job that does not wait any more: its open questions are closed, all but the one that `stays`."""

    draft: Draft
    stays: str
    status: ApprovalStatus
    by: Any
    why: Any


def told(entries: Iterable[FeedEntry], queue: str) -> Iterator[Event]:
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


def asks_of(draft: Draft) -> list[tuple[Event, Ask]]:
    """The questions to people in a draft's events."""
    asks = ((event, ask_of(event)) for event in draft.events if event.to_state is State.WAITING_APPROVAL)
    return [(event, ask) for event, ask in asks if ask is not None]


def ask_of(event: Event) -> Ask | None:
    """What people are asked by it: at the creation of a held job it is in the envelope, later in the event itself."""
    data = event.data or {}
    try:
        if event.from_state is None:
            return meta_of(data.get("meta")).ask
        return msgspec.convert(data["ask"], Ask) if data.get("ask") else None
    except msgspec.MsgspecError:
        # Held all the same; but there is no question that anybody could answer.
        return None


def answers_of(drafts: Iterable[Draft]) -> tuple[list[tuple[Draft, Event, Ask]], list[Closing]]:
    """What jobs ask people, and whose questions nobody has to answer any more."""
    asked, closed = [], []
    for draft in drafts:
        if draft.held or (draft.came_from is State.WAITING_APPROVAL and draft.state is not None):
            asks = asks_of(draft)
            asked += [(draft, event, ask) for event, ask in asks]
            if draft.state is not State.WAITING_APPROVAL:
                closed.append(_closing(draft, ""))
            elif len(asks) > 1 or (asks and draft.came_from is State.WAITING_APPROVAL):
                closed.append(_closing(draft, asks[-1][1].approval_id))
    return asked, closed


def _closing(draft: Draft, stays: str) -> Closing:
    leaving = (event for event in reversed(draft.events) if event.from_state is State.WAITING_APPROVAL)
    event = next(leaving, None)
    data = (event.data if event is not None else None) or {}
    status = _STATUS.get(event.type, ApprovalStatus.WITHDRAWN) if event is not None else ApprovalStatus.WITHDRAWN
    if status is ApprovalStatus.APPROVED and not data.get("consent"):
        status = ApprovalStatus.WITHDRAWN
    return Closing(draft, stays, status, data.get("actor"), data.get("reason") or WENT_ON)


# Rows ----------------------------------------------------------------------------------------------


def ask_row(draft: Draft, event: Event, ask: Ask, instant: AsInstant) -> Row:
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


def closing_row(closing: Closing, instant: AsInstant) -> Row:
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


def deed_row(event: Event, queue: str, instant: AsInstant) -> Row:
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
