"""Instants, spans and states as people read them, and jobs as programs read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.text import Text

from holdfast.clock import to_datetime
from holdfast.core.job import Attempt, Failure, JobView, Priority
from holdfast.core.states import State

_STYLES: Final[dict[State, str]] = {
    State.QUEUED: "cyan",
    State.WAITING_APPROVAL: "magenta",
    State.RUNNING: "blue",
    State.RETRYING: "yellow",
    State.SUSPENDED: "magenta",
    State.SUCCEEDED: "green",
    State.DLQ_PENDING: "red",
    State.DLQ_RECORDED: "red",
    State.FAILED: "bold red",
    State.CANCELLED: "dim",
}

_SPANS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"))


def state_text(state: State) -> Text:
    """A state in its colour."""
    return Text(state.value, style=_STYLES[state])


def instant(at_ms: int) -> str:
    """UTC, to the millisecond; a dash for "never"."""
    if not at_ms:
        return "–"
    return to_datetime(at_ms).strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def span(duration_ms: int) -> str:
    """A duration with two digits that matter: `35 ms`, `1.2 s`, `3.5 min`, `2.0 d`."""
    for size_ms, unit in _SPANS:
        if abs(duration_ms) >= size_ms:
            return f"{duration_ms / size_ms:.1f} {unit}"
    return f"{duration_ms / 1000:.1f} s" if abs(duration_ms) >= 1000 else f"{duration_ms} ms"


def shorten(text: str, width: int = 60) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def error_text(failure: Failure) -> str:
    """`TASK_ERROR: ValueError: boom`."""
    return joined(failure.code, failure.type, failure.message)


def joined(*parts: str) -> str:
    """With colons between; an empty part leaves none."""
    return ": ".join(part for part in parts if part)


def number_of(count: int, one: str, many: str = "") -> str:
    """`1 worker`, `2 workers`; `many` where an s is not enough."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def priority_name(priority: int) -> str:
    """`high`, `normal`, `low`, or the number of a line that has no name."""
    try:
        return Priority(priority).name.lower()
    except ValueError:
        return str(priority)


def job_document(view: JobView) -> dict[str, Any]:
    """A job for `--json`; the keys are those of the ledger wherever it has them."""
    meta = view.meta
    return {
        "job_id": view.job_id,
        "task": view.task,
        "queue": view.queue,
        "tenant_id": view.tenant_id,
        "state": view.state.value,
        "priority": priority_name(meta.priority),
        "attempt": view.attempt,
        "retry_count": meta.retry_count,
        "lost_leases": meta.lost_leases,
        "idempotency_key": view.idempotency_key or view.job_id,
        "trace_id": view.trace_id,
        "worker": view.worker or None,
        # Redis keeps no arguments of a job that succeeded.
        "payload": as_json(view.payload) if view.payload else None,
        "context": meta.context,
        "result": None if view.result is None else as_json(view.result),
        "failure": failure_document(view.failure),
        "created_at": iso(view.created_at_ms),
        "run_at": iso(meta.run_at_ms),
        "next_attempt_at": iso(view.next_attempt_at_ms),
        "finished_at": iso(view.finished_at_ms),
        "dlq_id": meta.dlq_id or None,
        "history": [attempt_document(attempt) for attempt in meta.history],
    }


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    """One line of a job's history."""
    return {
        "attempt": attempt.number,
        "worker": attempt.worker,
        "started_at": iso(attempt.started_at_ms),
        "finished_at": iso(attempt.finished_at_ms),
        "duration_ms": attempt.finished_at_ms - attempt.started_at_ms,
        "outcome": attempt.outcome,
        "failure": failure_document(attempt.failure),
    }


def failure_document(failure: Failure | None) -> dict[str, str] | None:
    """Why an attempt failed."""
    if failure is None:
        return None
    return {"code": failure.code, "type": failure.type, "message": failure.message, "stack": failure.stack}


def as_json(encoded: bytes) -> Any:
    """JSON as it is; what is none (a foreign message may carry anything) as text."""
    try:
        msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return encoded.decode("utf-8", "replace")
    return msgspec.Raw(encoded)


def iso(at_ms: int) -> str | None:
    """ISO 8601 in UTC with milliseconds; None for "never"."""
    return to_datetime(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at_ms else None


def now_ms() -> int:
    """This machine's clock, for ages on the screen only."""
    return round(datetime.now(UTC).timestamp() * 1000)
