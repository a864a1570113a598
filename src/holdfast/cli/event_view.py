"""Rows and JSON documents of a job's history in the ledger, and of dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli.output import as_json, instant, join_parts, shorten, span
from holdfast.core.codec import encode_json
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.ledger.queries.records import EffectRow, EventRow, JobDeadLetter, JobRow, JsonText, StateCounts, StepRow
from holdfast.operations.dead_letters import ABSENT, PayloadChange

if TYPE_CHECKING:
    from holdfast.ledger.queries.operator_filters import DeadLetterDetail, DeadLetterGroup, DeadLetterRow


_SIMPLE: Final = {
    "task.created": "created",
    "approval.requested": "waiting for approval",
    "approval.approved": "approved",
    "task.released": "released",
    "task.resumed": "resumed",
    "task.dlq": "dead letter written",
    "task.restored": "restored",
    "ledger.forked": "feed forked",
}


@dataclass(frozen=True, slots=True)
class JobHistoryView:
    """Everything that the ledger has about a job."""

    events: list[EventRow]
    dead_letter: JobDeadLetter | None
    steps: list[StepRow]
    effects: list[EffectRow]


def event_rows(events: Sequence[EventRow]) -> list[tuple[str, str, str, str]]:
    """Format events for a table: time, time since submission, event, detail.

    Consecutive heartbeats are one row.
    """
    rows: list[tuple[str, str, str, str]] = []
    beats: list[EventRow] = []
    for event in events:
        if event.type == HEARTBEAT_EVENT:
            beats.append(event)
            continue
        rows += _beats(beats, events)
        beats = []
        rows += [_event_row(event, events, what, detail) for what, detail in _describe(event)]
    return rows + _beats(beats, events)


def stacks(events: Sequence[EventRow]) -> Iterator[str]:
    """Return the recorded stack of every failed attempt."""
    for event in events:
        data = _data(event)
        if data.get("stack"):
            yield f"attempt {event.attempt}: {error(event)}\n{str(data['stack']).rstrip()}"


def error(event: EventRow) -> str:
    """Format the event's error, for example `ValueError: boom`; empty if it has none."""
    data = _data(event)
    return join_parts(str(data.get("type") or data.get("code") or ""), str(data.get("message") or ""))


def _event_row(event: EventRow, events: Sequence[EventRow], what: str, detail: str) -> tuple[str, str, str, str]:
    return instant(_ms(event.at)), f"+{span(_ms(event.at) - _ms(events[0].at))}", what, detail


def _beats(beats: list[EventRow], events: Sequence[EventRow]) -> list[tuple[str, str, str, str]]:
    if not beats:
        return []
    count = f"{len(beats)} heartbeats" if len(beats) > 1 else "1 heartbeat"
    return [_event_row(beats[-1], events, "alive", join_parts(count, beats[-1].worker or ""))]


def _describe(event: EventRow) -> Iterator[tuple[str, str]]:
    data, worker = _data(event), event.worker or ""
    match event.type:
        case "task.claimed":
            yield f"attempt {event.attempt}", f"began on {worker}"
        case "task.reclaimed":
            yield (
                f"attempt {event.attempt - 1}",
                f"lease lost: {data.get('old_worker') or 'its worker'} died or was cut off",
            )
            yield f"attempt {event.attempt}", f"began on {worker}"
        case "task.succeeded":
            yield event.to_state or "", f"attempt {event.attempt} on {worker}"
        case "task.retrying" | "task.dlq_pending" | "task.suspended":
            due = int(data.get("next_attempt_at_ms") or 0)
            wait = f"again at {instant(due)}" if due else ""
            failed = f"attempt {event.attempt}: {error(event)}" if error(event) else event.message or ""
            yield event.to_state or "", join_parts(shorten(failed, 120), wait)
        case "task.created":
            yield "created", _submission(event, data)
        case _:
            detail = join_parts(str(data.get("actor") or ""), str(data.get("reason") or event.message or ""))
            state = event.to_state.value if event.to_state is not None else event.type
            yield _SIMPLE.get(event.type, state), shorten(detail, 120)


def _submission(event: EventRow, data: dict[str, Any]) -> str:
    parts = [f"task {data['task']}"] if data.get("task") else []
    parts.append(f"queue {event.queue}")
    if data.get("idempotency_key") not in (None, "", event.job_id):
        parts.append(f"key {data['idempotency_key']}")
    if data.get("run_at_ms"):
        parts.append(f"due {instant(int(data['run_at_ms']))}")
    return ", ".join(parts)


# For programs ----------------------------------------------------------------------------------------


def row_document(job: JobRow) -> dict[str, Any]:
    """Build a list entry's document, with the keys that `jobs show` uses."""
    failure = {"code": job.error_code, "message": job.last_error} if job.error_code or job.last_error else None
    return {
        "job_id": job.job_id,
        "task": job.job_type,
        "queue": job.queue,
        "tenant_id": job.tenant_id,
        "state": job.state.value,
        "attempt": job.attempt,
        "retry_count": job.retry_count,
        "idempotency_key": job.idempotency_key or job.job_id,
        "trace_id": job.trace_id,
        "worker": job.worker if job.state is State.RUNNING else None,
        "failure": failure,
        "created_at": iso(job.created_at),
        "run_at": iso(job.run_at),
        "next_attempt_at": iso(job.next_retry_at),
        "finished_at": iso(job.finished_at),
        "dlq_id": job.dlq_id,
    }


def history_document(history: JobHistoryView) -> dict[str, Any]:
    """Build the part of a job's document that comes from the ledger."""
    return {
        "events": [event_document(event) for event in history.events],
        "dead_letter": None if history.dead_letter is None else _job_dead_letter_document(history.dead_letter),
        "steps": [
            {"position": step.position, "name": step.name, "result": _raw(step.result), "at": iso(step.at)}
            for step in history.steps
        ],
        "effects": [
            {"key": effect.key, "state": effect.state, "function": effect.function, "result": _raw(effect.value)}
            for effect in history.effects
        ],
    }


def counts_document(counts: StateCounts) -> dict[str, Any]:
    """Build a document of counts by state and of the states whose counts are estimates."""
    return {
        "states": {state.value: counts.states[state] for state in State},
        "estimated": sorted(state.value for state in counts.estimated),
    }


def event_document(event: EventRow) -> dict[str, Any]:
    """Build an event's document."""
    return {
        "seq": event.seq,
        "type": event.type,
        "from": event.from_state,
        "to": event.to_state,
        "attempt": event.attempt,
        "retry_count": event.retry_count,
        "worker": event.worker or None,
        "message": event.message or None,
        "data": _raw(event.data),
        "at": iso(event.at),
    }


def _job_dead_letter_document(dead_letter: JobDeadLetter) -> dict[str, Any]:
    return {
        "dlq_id": dead_letter.dlq_id,
        "status": dead_letter.status,
        "error_code": dead_letter.error_code,
        "error": dead_letter.error,
        "stack": dead_letter.stack,
        "failed_at": iso(dead_letter.failed_at),
        "replayed_as": dead_letter.replayed_as,
    }


def iso(at: datetime | None) -> str | None:
    """Format an instant in ISO 8601, in UTC with milliseconds."""
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _raw(value: JsonText | None) -> Any:
    return None if value is None else as_json(value.text.encode())


def _data(event: EventRow) -> dict[str, Any]:
    value = event.data.value if event.data is not None else None
    return value if isinstance(value, dict) else {}


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def dead_letter_row(dead_letter: DeadLetterRow, now_ms: int) -> tuple[str, ...]:
    """Format a row of a list."""
    return (
        dead_letter.dlq_id,
        dead_letter.job_type,
        dead_letter.queue,
        dead_letter.tenant_id,
        f"{_ago(dead_letter.failed_at, now_ms)} ago",
        dead_letter.status,
        join_parts(dead_letter.error_code, shorten(dead_letter.error)),
    )


def group_row(group: DeadLetterGroup, now_ms: int) -> tuple[str, ...]:
    """Format a row of `dlq groups`."""
    return (
        group.fingerprint,
        group.job_type,
        str(group.count),
        f"{_ago(group.first, now_ms)} ago",
        f"{_ago(group.last, now_ms)} ago",
        join_parts(group.error_code, shorten(group.error)),
    )


def dead_letter_facts(dead_letter: DeadLetterRow) -> Iterator[tuple[str, str]]:
    """Yield name and value of each non-empty field."""
    facts = {
        "dead letter": dead_letter.dlq_id,
        "status": dead_letter.status,
        "job": dead_letter.job_id,
        "task": dead_letter.job_type,
        "queue": dead_letter.queue,
        "tenant": dead_letter.tenant_id,
        "trace": dead_letter.trace_id,
        "failed": iso(dead_letter.failed_at),
        "error": join_parts(dead_letter.error_code, dead_letter.error),
        "fingerprint": dead_letter.fingerprint,
        "retries": str(dead_letter.retry_count),
        "payload": shorten(dead_letter.payload.text, 2_000),
        "requested by": dead_letter.requested_by,
        "confirmed by": dead_letter.confirmed_by,
        "reason": dead_letter.reason,
        "replays": str(dead_letter.replay_count) if dead_letter.replay_count else "",
        "replayed as": dead_letter.replayed_as,
    }
    return ((name, value) for name, value in facts.items() if value)


def change_lines(changes: Sequence[PayloadChange]) -> Iterator[str]:
    """Format the changes of a payload, one line per value: - before, + after."""
    if not changes:
        yield "the payload is unchanged"
    for change in changes:
        for sign, value in (("-", change.before), ("+", change.after)):
            if value is not ABSENT:
                yield f"{sign} {change.path or '/'}: {shorten(encode_json(value, 'a value').decode(), 400)}"


def dead_letter_document(dead_letter: DeadLetterRow) -> dict[str, Any]:
    """Build a dead letter's document for `--json`."""
    return {
        "dlq_id": dead_letter.dlq_id,
        "status": dead_letter.status,
        "job_id": dead_letter.job_id,
        "task": dead_letter.job_type,
        "queue": dead_letter.queue,
        "tenant_id": dead_letter.tenant_id,
        "trace_id": dead_letter.trace_id,
        "error_code": dead_letter.error_code,
        "error": dead_letter.error,
        "fingerprint": dead_letter.fingerprint,
        "retry_count": dead_letter.retry_count,
        "failed_at": iso(dead_letter.failed_at),
        "requested_by": dead_letter.requested_by,
        "confirmed_by": dead_letter.confirmed_by,
        "reason": dead_letter.reason,
        "replay_count": dead_letter.replay_count,
        "replayed_as": dead_letter.replayed_as,
    }


def dead_letter_detail_document(dead_letter: DeadLetterDetail) -> dict[str, Any]:
    """Build a dead letter's document with payload, stack, history and events."""
    return dead_letter_document(dead_letter) | {
        "payload": as_json(dead_letter.payload.text.encode()),
        "stack": dead_letter.stack,
        "history": as_json(dead_letter.history.text.encode()),
        "events": [event_document(event) for event in dead_letter.events],
    }


def group_document(group: DeadLetterGroup) -> dict[str, Any]:
    """Build the document of a group of dead letters for `--json`."""
    return {
        "fingerprint": group.fingerprint,
        "task": group.job_type,
        "error_code": group.error_code,
        "error": group.error,
        "count": group.count,
        "first": iso(group.first),
        "last": iso(group.last),
    }


def _ago(at: datetime, now_ms: int) -> str:
    return span(max(0, now_ms - round(at.timestamp() * 1000)))
