"""A job's story as the engine remembers it: created, each attempt, what it waits for, its end.

Attempts that left no record of their own (their worker died, so nobody reported) are read from the gaps
in the numbering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.cli.format import instant, joined, shorten, span
from holdfast.core.job import HISTORY_FIRST, HISTORY_LATEST, Attempt, JobView
from holdfast.core.states import FINAL, State


@dataclass(frozen=True, slots=True)
class Moment:
    """One line. `at_ms` is 0 where nobody knows when it was."""

    at_ms: int
    what: str
    detail: str = ""


def timeline(view: JobView) -> list[Moment]:
    """The lines, in order."""
    moments = [Moment(view.created_at_ms, "created", _submission(view))]
    if view.meta.run_at_ms > view.created_at_ms:
        moments.append(Moment(view.meta.run_at_ms, "due", f"{span(view.meta.run_at_ms - view.created_at_ms)} later"))
    moments += _attempts(view)
    moments += _present(view)
    return moments


def rows(view: JobView) -> list[tuple[str, str, str, str]]:
    """The timeline for a table: when, how long after the submission, what, detail."""
    return [
        (
            instant(moment.at_ms),
            f"+{span(moment.at_ms - view.created_at_ms)}" if moment.at_ms else "",
            moment.what,
            moment.detail,
        )
        for moment in timeline(view)
    ]


def _submission(view: JobView) -> str:
    parts = [f"task {view.task}", f"queue {view.queue}"]
    if view.idempotency_key and view.idempotency_key != view.job_id:
        parts.append(f"key {view.idempotency_key}")
    return ", ".join(parts)


def _attempts(view: JobView) -> Iterator[Moment]:
    expected = 1
    for attempt in view.meta.history:
        yield from _gap(view, expected, attempt.number)
        yield _attempt(attempt)
        expected = attempt.number + 1
    running = view.state is State.RUNNING
    yield from _gap(view, expected, view.attempt if running else view.attempt + 1)


def _gap(view: JobView, first: int, end: int) -> Iterator[Moment]:
    """Attempts `first` up to, not including, `end` are not in the history: say why."""
    if first >= end:
        return
    which = f"attempt {first}" if end - first == 1 else f"attempts {first} to {end - 1}"
    if view.state in FINAL and not view.meta.history:
        # Redis keeps no history of a job that succeeded at the first go: its record is its result.
        return
    cut = len(view.meta.history) >= HISTORY_FIRST + HISTORY_LATEST
    yield Moment(0, which, "no longer kept" if cut else "lease lost: its worker died or was cut off")


def _attempt(attempt: Attempt) -> Moment:
    took = span(attempt.finished_at_ms - attempt.started_at_ms)
    detail = f"{attempt.outcome} after {took} on {attempt.worker}"
    if attempt.failure is not None:
        failure = attempt.failure
        detail = joined(detail, failure.type or failure.code, shorten(failure.message, 80))
    return Moment(attempt.started_at_ms, f"attempt {attempt.number}", detail)


def _present(view: JobView) -> Iterator[Moment]:
    if view.state in FINAL:
        detail = shorten(view.failure.message, 80) if view.failure is not None else ""
        yield Moment(view.finished_at_ms, view.state.value, detail)
    elif view.state is State.RUNNING:
        yield Moment(0, "running", f"attempt {view.attempt} on {view.worker or 'an unknown worker'}")
    elif view.next_attempt_at_ms:
        yield Moment(view.next_attempt_at_ms, "waiting until", view.state.value)
    else:
        yield Moment(0, view.state.value)
