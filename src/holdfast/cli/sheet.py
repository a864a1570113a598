"""A job as people read it: a row of a list, the facts of one job, and what lies beside its story."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from holdfast.cli.format import error_text, instant, joined, number_of, shorten, span, state_text
from holdfast.cli.output import emit_facts, emit_rows, on_terminal, visible
from holdfast.cli.story import Story
from holdfast.clock import to_datetime
from holdfast.core.job import JobView
from holdfast.core.states import FINAL, State

if TYPE_CHECKING:
    from holdfast.ledger.records import JobRow


def print_beside(story: Story) -> None:
    """Its dead letter, steps and effects, if it has any."""
    if story.letter is not None:
        letter = story.letter
        print()
        error = joined(letter.error_code, shorten(letter.error, 120))
        print(visible(f"dead letter {letter.dlq_id} ({letter.status}): {error}"))
    if story.steps:
        print()
        steps = [(str(step.position), step.name, shorten(step.result.text)) for step in story.steps]
        emit_rows(("step", "name", "result"), steps, empty="")
    if story.effects:
        print()
        effects = [(effect.key, effect.state, effect.function, effect.reason or "") for effect in story.effects]
        emit_rows(("effect", "state", "function", "note"), effects, empty="")


def ledger_row(job: JobRow, now_ms: int) -> tuple[str | Text, ...]:
    """A row of a list, from the ledger."""
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


def engine_row(view: JobView, now_ms: int) -> tuple[str | Text, ...]:
    """A row of a list, from the engine."""
    return (
        view.job_id,
        view.task,
        view.queue,
        state_text(view.state),
        str(view.attempt),
        span(max(0, now_ms - view.created_at_ms)),
        _remark(view, now_ms),
    )


def _remark(view: JobView, now_ms: int) -> str:
    if view.state is State.RUNNING:
        return f"on {view.worker}"
    if view.next_attempt_at_ms > now_ms:
        return f"due in {span(view.next_attempt_at_ms - now_ms)}"
    return shorten(joined(view.failure.type or view.failure.code, view.failure.message)) if view.failure else ""


def print_job(view: JobView) -> None:
    """What is known of one job, a line each."""
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


def _retries(view: JobView) -> str:
    lost = number_of(view.meta.lost_leases, "lost lease")
    return f"{number_of(view.meta.retry_count, 'retry', 'retries')}, {lost}"


def _text(encoded: bytes | None) -> str:
    return "" if encoded is None else shorten(encoded.decode("utf-8", "replace"), 400)
