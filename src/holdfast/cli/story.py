"""A job's story as the ledger tells it: lines for a table, stacks, and documents for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from holdfast.cli.format import as_json, instant, joined, shorten, span
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.ledger.records import Counts, DeadLetterRow, EffectRow, EventRow, JobRow, Json, StepRow

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
class Story:
    """Everything that the ledger has about one job."""

    events: list[EventRow]
    letter: DeadLetterRow | None
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
        "created_at": moment(job.created_at),
        "run_at": moment(job.run_at),
        "next_attempt_at": moment(job.next_retry_at),
        "finished_at": moment(job.finished_at),
        "dlq_id": job.dlq_id,
    }


def story_document(story: Story) -> dict[str, Any]:
    """What the ledger adds to a job."""
    return {
        "events": [event_document(event) for event in story.events],
        "dead_letter": None if story.letter is None else _letter_document(story.letter),
        "steps": [
            {"position": step.position, "name": step.name, "result": _raw(step.result), "at": moment(step.at)}
            for step in story.steps
        ],
        "effects": [
            {"key": effect.key, "state": effect.state, "function": effect.function, "result": _raw(effect.value)}
            for effect in story.effects
        ],
    }


def counts_document(counts: Counts) -> dict[str, Any]:
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
        "at": moment(event.at),
    }


def _letter_document(letter: DeadLetterRow) -> dict[str, Any]:
    return {
        "dlq_id": letter.dlq_id,
        "status": letter.status,
        "error_code": letter.error_code,
        "error": letter.error,
        "stack": letter.stack,
        "failed_at": moment(letter.failed_at),
        "replayed_as": letter.replayed_as,
    }


def moment(at: datetime | None) -> str | None:
    """ISO 8601 in UTC with milliseconds."""
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _raw(value: Json | None) -> Any:
    return None if value is None else as_json(value.text.encode())


def _data(event: EventRow) -> dict[str, Any]:
    value = event.data.value if event.data is not None else None
    return value if isinstance(value, dict) else {}


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
