"""Rows and details of jobs, and a job's timeline from the engine's data.

The timeline lists the creation, each attempt, what the job waits for, and its end. Attempts without a record (the
worker crashed before it reported) are inferred from gaps in the attempt numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from holdfast.cli.event_view import JobHistoryView
from holdfast.cli.output import (
    emit_facts,
    emit_line,
    emit_rows,
    error_text,
    instant,
    join_parts,
    number_of,
    on_terminal,
    shorten,
    span,
    state_text,
)
from holdfast.clock import to_datetime
from holdfast.core.job import HISTORY_FIRST, HISTORY_LATEST, Attempt, JobInfo
from holdfast.core.states import FINAL, State

if TYPE_CHECKING:
    from holdfast.ledger.queries.records import JobRow


def print_ledger_only(history: JobHistoryView) -> None:
    """Print the job's dead letter, steps and effects, if any."""
    if history.dead_letter is not None:
        dead_letter = history.dead_letter
        emit_line()
        error = join_parts(dead_letter.error_code, shorten(dead_letter.error, 120))
        emit_line(f"dead letter {dead_letter.dlq_id} ({dead_letter.status}): {error}")
    if history.steps:
        emit_line()
        steps = [(str(step.position), step.name, shorten(step.result.text)) for step in history.steps]
        emit_rows(("step", "name", "result"), steps, empty="")
    if history.effects:
        emit_line()
        effects = [(effect.key, effect.state, effect.function, effect.reason or "") for effect in history.effects]
        emit_rows(("effect", "state", "function", "note"), effects, empty="")


def ledger_row(job: JobRow, now_ms: int) -> tuple[str | Text, ...]:
    """Format a row of a list, from the ledger."""
    age_ms = now_ms - round(job.created_at.timestamp() * 1000)
    return (
        job.job_id,
        job.job_type,
        job.queue,
        state_text(job.state),
        str(job.attempt),
        span(max(0, age_ms)),
        _ledger_remark(job, now_ms),
    )


def _ledger_remark(job: JobRow, now_ms: int) -> str:
    if job.state is State.RUNNING:
        return f"on {job.worker}"
    due = job.next_retry_at or (job.run_at if job.state is State.QUEUED else None)
    if due is not None and job.state not in FINAL and due > to_datetime(now_ms):
        return f"due in {span(round(due.timestamp() * 1000) - now_ms)}"
    return shorten(job.last_error or job.error_message or "")


def engine_row(view: JobInfo, now_ms: int) -> tuple[str | Text, ...]:
    """Format a row of a list, from the engine."""
    return (
        view.job_id,
        view.task,
        view.queue,
        state_text(view.state),
        str(view.attempt),
        span(max(0, now_ms - view.created_at_ms)),
        _remark(view, now_ms),
    )


def _remark(view: JobInfo, now_ms: int) -> str:
    if view.state is State.RUNNING:
        return f"on {view.worker}"
    if view.next_attempt_at_ms > now_ms:
        return f"due in {span(view.next_attempt_at_ms - now_ms)}"
    return shorten(join_parts(view.failure.type or view.failure.code, view.failure.message)) if view.failure else ""


def print_job(view: JobInfo) -> None:
    """Print one job, one line per field."""
    facts = {
        "job": view.job_id,
        "task": view.task,
        "queue": view.queue,
        "tenant": view.tenant_id,
        "state": state_text(view.state) if on_terminal() else view.state.value,
        "attempt": f"{view.attempt} ({_retries(view)})",
        "created": instant(view.created_at_ms),
        "trace": view.trace_id,
        "arguments": _text(view.payload),
        "result": _text(view.result),
        "error": error_text(view.failure) if view.failure else "",
    }
    emit_facts(facts.items())


def _retries(view: JobInfo) -> str:
    lost = number_of(view.meta.lost_leases, "lost lease")
    return f"{number_of(view.meta.retry_count, 'retry', 'retries')}, {lost}"


def _text(encoded: bytes | None) -> str:
    return "" if encoded is None else shorten(encoded.decode("utf-8", "replace"), 400)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of a timeline. `at_ms` is 0 if the time is unknown."""

    at_ms: int
    what: str
    detail: str = ""


def timeline(view: JobInfo) -> list[TimelineEntry]:
    """Build a job's timeline, oldest entry first."""
    entries = [TimelineEntry(view.created_at_ms, "created", _submission(view))]
    if view.meta.run_at_ms > view.created_at_ms:
        entries.append(
            TimelineEntry(view.meta.run_at_ms, "due", f"{span(view.meta.run_at_ms - view.created_at_ms)} later")
        )
    entries += _attempts(view)
    entries += _present(view)
    return entries


def timeline_rows(view: JobInfo) -> list[tuple[str, str, str, str]]:
    """Format the timeline for a table: time, time since submission, event, detail."""
    return [
        (
            instant(entry.at_ms),
            f"+{span(entry.at_ms - view.created_at_ms)}" if entry.at_ms else "",
            entry.what,
            entry.detail,
        )
        for entry in timeline(view)
    ]


def _submission(view: JobInfo) -> str:
    parts = [f"task {view.task}", f"queue {view.queue}"]
    if view.idempotency_key and view.idempotency_key != view.job_id:
        parts.append(f"key {view.idempotency_key}")
    return ", ".join(parts)


def _attempts(view: JobInfo) -> Iterator[TimelineEntry]:
    expected = 1
    for attempt in view.meta.history:
        yield from _gap(view, expected, attempt.number)
        yield _attempt(attempt)
        expected = attempt.number + 1
    running = view.state is State.RUNNING
    yield from _gap(view, expected, view.attempt if running else view.attempt + 1)


def _gap(view: JobInfo, first: int, end: int) -> Iterator[TimelineEntry]:
    """Explain why the attempts from `first` up to, not including, `end` are not in the history."""
    if first >= end:
        return
    which = f"attempt {first}" if end - first == 1 else f"attempts {first} to {end - 1}"
    if view.state in FINAL and not view.meta.history:
        # Redis keeps no history of a job that succeeded at its first attempt: its record is its result.
        return
    truncated = len(view.meta.history) >= HISTORY_FIRST + HISTORY_LATEST
    yield TimelineEntry(0, which, "no longer kept" if truncated else "lease lost: its worker died or was cut off")


def _attempt(attempt: Attempt) -> TimelineEntry:
    duration = span(attempt.finished_at_ms - attempt.started_at_ms)
    detail = f"{attempt.outcome} after {duration} on {attempt.worker}"
    if attempt.failure is not None:
        failure = attempt.failure
        detail = join_parts(detail, failure.type or failure.code, shorten(failure.message, 80))
    return TimelineEntry(attempt.started_at_ms, f"attempt {attempt.number}", detail)


def _present(view: JobInfo) -> Iterator[TimelineEntry]:
    if view.state in FINAL:
        detail = shorten(view.failure.message, 80) if view.failure is not None else ""
        yield TimelineEntry(view.finished_at_ms, view.state.value, detail)
    elif view.state is State.RUNNING:
        yield TimelineEntry(0, "running", f"attempt {view.attempt} on {view.worker or 'an unknown worker'}")
    elif view.next_attempt_at_ms:
        yield TimelineEntry(view.next_attempt_at_ms, "waiting until", view.state.value)
    else:
        yield TimelineEntry(0, view.state.value)
