"""Rows and JSON documents of a job's history in the ledger, and of dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli.output import as_json, instant, joined, shorten, span
from holdfast.core.codec import encode_json
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.ledger.queries.records import EffectRow, EventRow, JobDeadLetter, JobRow, JsonText, StateCounts, StepRow
from holdfast.operations.dead_letters import ABSENT, PayloadChange

if TYPE_CHECKING:
    from holdfast.ledger.queries.operator_filters import DeadLetterDetail, DeadLetterGroup, DeadLetterRow


_SIMPLE: Final = {
    "task.created": "created",
    "approval.requested": "waits for approval",
    "approval.approved": "approved",
    "task.released": "given back",
    "task.resumed": "resumed",
    "task.dlq": "dead letter written",
    "task.restored": "put back",
    "ledger.forked": "engine forgot",
}


@dataclass(frozen=True, slots=True)
class JobHistoryView:
    """Everything that the ledger has about one job."""

    events: list[EventRow]
    dead_letter: JobDeadLetter | None
    steps: list[StepRow]
    effects: list[EffectRow]


def event_rows(events: Sequence[EventRow]) -> list[tuple[str, str, str, str]]:
    """When, how long after the submission, what, detail; heartbeats in a row are one line."""
    rows: list[tuple[str, str, str, str]] = []
    beats: list[EventRow] = []
    for event in events:
        if event.type == HEARTBEAT_EVENT:
            beats.append(event)
            continue
        rows += _beats(beats, events)
        beats = []
        rows += [_line(event, events, what, detail) for what, detail in _told(event)]
    return rows + _beats(beats, events)


def stacks(events: Sequence[EventRow]) -> Iterator[str]:
    """The stack of every attempt that left one."""
    for event in events:
        data = _data(event)
        if data.get("stack"):
            yield f"attempt {event.attempt}: {error(event)}\n{str(data['stack']).rstrip()}"


def error(event: EventRow) -> str:
    """`ValueError: boom`, if the event tells of one."""
    data = _data(event)
    return joined(str(data.get("type") or data.get("code") or ""), str(data.get("message") or ""))


def _line(event: EventRow, events: Sequence[EventRow], what: str, detail: str) -> tuple[str, str, str, str]:
    return instant(_ms(event.at)), f"+{span(_ms(event.at) - _ms(events[0].at))}", what, detail


def _beats(beats: list[EventRow], events: Sequence[EventRow]) -> list[tuple[str, str, str, str]]:
    if not beats:
        return []
    count = f"{len(beats)} heartbeats" if len(beats) > 1 else "1 heartbeat"
    return [_line(beats[-1], events, "alive", joined(count, beats[-1].worker or ""))]


def _told(event: EventRow) -> Iterator[tuple[str, str]]:
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
            yield event.to_state or "", joined(shorten(failed, 120), wait)
        case "task.created":
            yield "created", _submission(event, data)
        case _:
            detail = joined(str(data.get("actor") or ""), str(data.get("reason") or event.message or ""))
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
    """A line of a list, under the names that `jobs show` uses."""
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


def history_document(story: JobHistoryView) -> dict[str, Any]:
    """What the ledger adds to a job."""
    return {
        "events": [event_document(event) for event in story.events],
        "dead_letter": None if story.dead_letter is None else _letter_document(story.dead_letter),
        "steps": [
            {"position": step.position, "name": step.name, "result": _raw(step.result), "at": iso(step.at)}
            for step in story.steps
        ],
        "effects": [
            {"key": effect.key, "state": effect.state, "function": effect.function, "result": _raw(effect.value)}
            for effect in story.effects
        ],
    }


def counts_document(counts: StateCounts) -> dict[str, Any]:
    """Counts by state, and which are estimates."""
    return {
        "states": {state.value: counts.states[state] for state in State},
        "estimated": sorted(state.value for state in counts.estimated),
    }


def event_document(event: EventRow) -> dict[str, Any]:
    """A line of a job's story."""
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


def _letter_document(letter: JobDeadLetter) -> dict[str, Any]:
    return {
        "dlq_id": letter.dlq_id,
        "status": letter.status,
        "error_code": letter.error_code,
        "error": letter.error,
        "stack": letter.stack,
        "failed_at": iso(letter.failed_at),
        "replayed_as": letter.replayed_as,
    }


def iso(at: datetime | None) -> str | None:
    """ISO 8601 in UTC with milliseconds."""
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _raw(value: JsonText | None) -> Any:
    return None if value is None else as_json(value.text.encode())


def _data(event: EventRow) -> dict[str, Any]:
    value = event.data.value if event.data is not None else None
    return value if isinstance(value, dict) else {}


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def dead_letter_row(letter: DeadLetterRow, now_ms: int) -> tuple[str, ...]:
    """A row of a list."""
    return (
        letter.dlq_id,
        letter.job_type,
        letter.queue,
        letter.tenant_id,
        f"{_ago(letter.failed_at, now_ms)} ago",
        letter.status,
        joined(letter.error_code, shorten(letter.error)),
    )


def group_row(group: DeadLetterGroup, now_ms: int) -> tuple[str, ...]:
    """A kind of error."""
    return (
        group.fingerprint,
        group.job_type,
        str(group.count),
        f"{_ago(group.first, now_ms)} ago",
        f"{_ago(group.last, now_ms)} ago",
        joined(group.error_code, shorten(group.error)),
    )


def dead_letter_facts(letter: DeadLetterRow) -> Iterator[tuple[str, str]]:
    """What is known of one, a line each."""
    facts = {
        "letter": letter.dlq_id,
        "status": letter.status,
        "job": letter.job_id,
        "task": letter.job_type,
        "queue": letter.queue,
        "tenant": letter.tenant_id,
        "trace": letter.trace_id,
        "failed": iso(letter.failed_at),
        "error": joined(letter.error_code, letter.error),
        "fingerprint": letter.fingerprint,
        "retries": str(letter.retry_count),
        "payload": shorten(letter.payload.text, 2_000),
        "asked by": letter.requested_by,
        "confirmed by": letter.confirmed_by,
        "reason": letter.reason,
        "replays": str(letter.replay_count) if letter.replay_count else "",
        "replayed as": letter.replayed_as,
    }
    return ((name, value) for name, value in facts.items() if value)


def changes_text(changes: Sequence[PayloadChange]) -> str:
    """What an edit changes, a line for each place: - what was, + what will be."""
    if not changes:
        return "the payload is as it was"
    lines = []
    for change in changes:
        for sign, value in (("-", change.before), ("+", change.after)):
            if value is not ABSENT:
                lines.append(f"{sign} {change.path or '/'}: {shorten(encode_json(value, 'a value').decode(), 400)}")
    return "\n".join(lines)


def dead_letter_document(letter: DeadLetterRow) -> dict[str, Any]:
    """A letter for programs."""
    return {
        "dlq_id": letter.dlq_id,
        "status": letter.status,
        "job_id": letter.job_id,
        "task": letter.job_type,
        "queue": letter.queue,
        "tenant_id": letter.tenant_id,
        "trace_id": letter.trace_id,
        "error_code": letter.error_code,
        "error": letter.error,
        "fingerprint": letter.fingerprint,
        "retry_count": letter.retry_count,
        "failed_at": iso(letter.failed_at),
        "requested_by": letter.requested_by,
        "confirmed_by": letter.confirmed_by,
        "reason": letter.reason,
        "replay_count": letter.replay_count,
        "replayed_as": letter.replayed_as,
    }


def dead_letter_detail_document(letter: DeadLetterDetail) -> dict[str, Any]:
    """A letter with all that is known of it."""
    return dead_letter_document(letter) | {
        "payload": as_json(letter.payload.text.encode()),
        "stack": letter.stack,
        "history": as_json(letter.history.text.encode()),
        "events": [event_document(event) for event in letter.events],
    }


def group_document(group: DeadLetterGroup) -> dict[str, Any]:
    """A kind of error for programs."""
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
