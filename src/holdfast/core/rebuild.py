"""Rebuild a job from its events. Pure.

`rebuild_job` returns the job as the engine would have it; the reconciler restores lost jobs from this. It reads what
events state (states, attempt numbers, retry counts, due times) and derives the rest as the engines do
(`core.verdict.advance`, `with_approval`): lost leases, the start of an outage, the history of attempts, approval
requests and approvals.

Two things are approximate. An attempt's end is when the engine recorded it, not when the worker finished. And after
`ledger.forked` (the engine restarted with older data) the rebuild returns to the latest point at which the job was in
that state and attempt; the events in between stay in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from holdfast.core.job import (
    DEFAULT_TENANT,
    EMPTY_META,
    Approval,
    ApprovalRequest,
    Attempt,
    Event,
    Failure,
    JobInfo,
    Meta,
    append_attempt,
    approval_data,
    convert_meta,
    decode_meta,
)
from holdfast.core.states import EXPEDITED_EVENT, FINAL, FORKED_EVENT, RESTORED_EVENT, State
from holdfast.core.verdict import POISON_PILL, failure_of_event, with_approval, with_retries_reset

#: In the data of operators' events; events of a worker's verdict do not have it.
_ACTOR: Final = "actor"
#: No submission has these; a projector that did not get the creation writes `null`.
_NO_PAYLOAD: Final = (None, "", "null")

_P = TypeVar("_P", ApprovalRequest, Approval)


class IncompleteHistory(ValueError):
    """The events do not begin with a complete creation, so the job cannot be rebuilt."""


class _Point(msgspec.Struct, frozen=True):
    """The job after one of its events, with fields that `JobInfo` does not have."""

    view: JobInfo
    #: When the current attempt began.
    claimed_at_ms: int = 0


def rebuild_job(queue: str, events: Sequence[Event]) -> JobInfo:
    """Rebuild a job from its complete history, in order. Raises `IncompleteHistory`."""
    moves = [event for event in events if event.to_state is not None or event.type == EXPEDITED_EVENT]
    if not moves or moves[0].from_state is not None:
        raise IncompleteHistory(f"{len(events)} events, and the first is not a creation")
    if (moves[0].data or {}).get("payload") in _NO_PAYLOAD:
        raise IncompleteHistory("its creation was lost, and its arguments with it")
    points = [_Point(_create(queue, moves[0]))]
    for event in moves[1:]:
        points.append(_rewind(points, event) if event.type == FORKED_EVENT else _apply(points[-1], event))
    return points[-1].view


def _create(queue: str, event: Event) -> JobInfo:
    data, state = event.data or {}, event.to_state
    assert state is not None
    run_at_ms = int(data.get("run_at_ms") or 0)
    waits = state is State.QUEUED and run_at_ms > event.at_ms
    meta = _meta(data)
    return JobInfo(
        job_id=event.job_id,
        task=data.get("task", ""),
        queue=queue,
        tenant_id=data.get("tenant_id") or event.tenant_id or DEFAULT_TENANT,
        state=state,
        attempt=0,
        payload=_bytes(data.get("payload", "")),
        idempotency_key=data.get("idempotency_key") or event.job_id,
        trace_id=data.get("trace_id") or "",
        # Also kept while it waits for approval, which does not make it run earlier.
        meta=msgspec.structs.replace(meta, run_at_ms=run_at_ms if run_at_ms > event.at_ms else 0),
        created_at_ms=event.at_ms,
        next_attempt_at_ms=run_at_ms if waits else 0,
    )


def _apply(point: _Point, event: Event) -> _Point:
    if event.type == EXPEDITED_EVENT:
        return _expedite(point)
    if event.type == RESTORED_EVENT:
        return _restore(point, event)
    if event.to_state is State.RUNNING:
        return _claim(point, event)
    if event.from_state is State.RUNNING and _ACTOR not in (event.data or {}):
        return _Point(_settle(point, event))
    return _Point(_move(point, event))


def _claim(point: _Point, event: Event) -> _Point:
    view, meta = point.view, msgspec.structs.replace(point.view.meta, run_at_ms=0)
    if event.from_state is State.RUNNING:
        meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases + 1)
    claimed = msgspec.structs.replace(
        view,
        state=State.RUNNING,
        attempt=event.attempt,
        worker=event.worker,
        meta=msgspec.structs.replace(meta, retry_count=event.retry_count),
        failure=None,
        next_attempt_at_ms=0,
    )
    return _Point(claimed, event.at_ms)


def _settle(point: _Point, event: Event) -> JobInfo:
    """Apply a worker's verdict, or a poison pill, as `advance` does."""
    data, view, to = event.data or {}, point.view, event.to_state
    assert to is not None
    failure, meta, attempt = failure_of_event(event), view.meta, event.attempt or view.attempt
    if to is State.QUEUED and not data.get("started"):
        # Released before it started: the attempt's number is used again, and the history does not grow.
        attempt -= 1
        if data.get("unknown"):
            since_ms = meta.unknown_since_ms or point.claimed_at_ms
            meta = msgspec.structs.replace(meta, unknown_since_ms=since_ms)
    else:
        meta = _after_attempt(point, event, failure)
    return msgspec.structs.replace(
        view,
        state=to,
        attempt=attempt,
        worker="",
        meta=_with_dead_letter(meta, data),
        failure=failure,
        result=_bytes(data["result"]) if to is State.SUCCEEDED and data.get("result") is not None else None,
        next_attempt_at_ms=int(data.get("next_attempt_at_ms") or 0),
        finished_at_ms=event.at_ms if to in FINAL else 0,
    )


def _after_attempt(point: _Point, event: Event, failure: Failure | None) -> Meta:
    meta, view, to = point.view.meta, point.view, event.to_state
    assert to is not None
    unavailable_count, unavailable_since_ms = 0, 0
    if to is State.RETRYING and not (event.data or {}).get("counted", True):
        # An unavailable dependency uses up no retry (requirement Y8).
        unavailable_count = meta.unavailable_count + 1
        unavailable_since_ms = meta.unavailable_since_ms or point.claimed_at_ms
    worker = view.worker or event.worker
    attempt = Attempt(event.attempt or view.attempt, worker, point.claimed_at_ms, event.at_ms, to.value, failure)
    poisoned = failure is not None and failure.code == POISON_PILL
    return msgspec.structs.replace(
        meta,
        retry_count=event.retry_count,
        lost_leases=meta.lost_leases + poisoned,
        unavailable_count=unavailable_count,
        unavailable_since_ms=unavailable_since_ms,
        unknown_since_ms=0,
        history=append_attempt(meta.history, attempt),
        approval_request=_part(event.data, "approval_request", ApprovalRequest)
        if to is State.WAITING_APPROVAL
        else None,
    )


def _move(point: _Point, event: Event) -> JobInfo:
    """Apply an operator's move, a dead letter's move, or the move of a malformed foreign message."""
    data, view, to = event.data or {}, point.view, event.to_state
    assert to is not None
    meta, due_at_ms = view.meta, 0
    if event.from_state is State.WAITING_APPROVAL:
        meta = with_approval(meta, _part(data, "approval", Approval))
    if to is State.QUEUED:
        if event.from_state is State.SUSPENDED:
            meta = with_retries_reset(meta)
        due_at_ms = int(data.get("next_attempt_at_ms") or 0) or _later(meta.run_at_ms, event.at_ms)
    return msgspec.structs.replace(
        view,
        state=to,
        worker="",
        meta=_with_dead_letter(meta, data),
        failure=failure_of_event(event) or (None if to is State.QUEUED else view.failure),
        next_attempt_at_ms=due_at_ms,
        finished_at_ms=event.at_ms if to in FINAL else 0,
    )


def _expedite(point: _Point) -> _Point:
    meta = msgspec.structs.replace(point.view.meta, run_at_ms=0)
    return _Point(msgspec.structs.replace(point.view, meta=meta, next_attempt_at_ms=0), point.claimed_at_ms)


def _restore(point: _Point, event: Event) -> _Point:
    state = event.to_state
    assert state is not None
    due_at_ms = int((event.data or {}).get("next_attempt_at_ms") or 0)
    return _Point(msgspec.structs.replace(point.view, state=state, worker="", next_attempt_at_ms=due_at_ms))


def _rewind(points: Sequence[_Point], event: Event) -> _Point:
    """The latest point at which the job was in the fork's state, and if possible in its attempt."""
    matching = [point for point in points if point.view.state is event.to_state]
    if matching:
        return ([point for point in matching if point.view.attempt == event.attempt] or matching)[-1]
    assert event.to_state is not None
    return _Point(msgspec.structs.replace(points[-1].view, state=event.to_state, worker=""))


def _meta(data: dict[str, Any]) -> Meta:
    """The submitted `Meta`, with the fields that the creation event states separately."""
    given = data.get("meta")
    if isinstance(given, str):
        meta = decode_meta(given) if given else EMPTY_META
    else:
        meta = convert_meta(given) if given else EMPTY_META
    changes = {name: data[name] for name in ("priority", "context") if data.get(name) is not None}
    return msgspec.structs.replace(meta, **changes)


def _with_dead_letter(meta: Meta, data: dict[str, Any]) -> Meta:
    dlq_id = data.get("dlq_id")
    return msgspec.structs.replace(meta, dlq_id=dlq_id) if dlq_id else meta


def _part(data: dict[str, Any] | None, name: str, kind: type[_P]) -> _P | None:
    """A struct in an event's data; None if it is absent or cannot be decoded."""
    given = approval_data(data, name)
    try:
        return msgspec.convert(given, kind) if given else None
    except msgspec.ValidationError:
        return None


def _later(run_at_ms: int, now_ms: int) -> int:
    return run_at_ms if run_at_ms > now_ms else 0


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
