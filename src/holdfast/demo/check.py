"""Compare every job's record and its events in the feed with the expected outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table
from rich.text import Text

from holdfast import State
from holdfast.core.job import Event, JobInfo
from holdfast.engine.port import InspectionPort

FINAL_EVENTS: Final = ("task.succeeded", "task.failed", "task.cancelled")
#: The first event of a job: queued, or waiting for approval.
CREATIONS: Final = ("task.created", "approval.requested")
#: The first event of a run.
BEGINNINGS: Final = ("task.claimed", "task.reclaimed")


@dataclass(frozen=True)
class Expected:
    """One job and its expected outcome."""

    group: str
    job_id: str
    queue: str
    state: State
    attempts: int = 1
    retries: int = 0
    #: Earliest start of the first run.
    not_before_ms: int = 0


@dataclass
class Result:
    """Expected and observed outcomes of one group of jobs."""

    group: str
    expected: str
    observed: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def check(engine: InspectionPort, queues: Sequence[str], expected: Sequence[Expected]) -> list[Result]:
    """Compare all jobs; one result per group, in the order of the groups."""
    events = await read_events(engine, queues)
    results: dict[str, Result] = {}
    for job in expected:
        (view,) = await engine.get(job.queue, [job.job_id])
        words = _words(job.state, job.attempts, job.retries, 1)
        result = results.setdefault(job.group, Result(job.group, words))
        observed, problems = compare(job, view, events[job.job_id])
        result.observed[observed] = result.observed.get(observed, 0) + 1
        result.problems += [f"{job.group}, job {job.job_id}: {problem}" for problem in problems]
    return list(results.values())


async def read_events(engine: InspectionPort, queues: Sequence[str]) -> dict[str, list[Event]]:
    """Read the whole feed and group its events by job."""
    events: dict[str, list[Event]] = defaultdict(list)
    for queue in queues:
        entries = await engine.read_feed(queue, "", 100)
        while entries:
            for event in (event for entry in entries for event in entry.events):
                events[event.job_id].append(event)
            # A read starts with the last entry of the previous read.
            entries = (await engine.read_feed(queue, entries[-1].position, 100))[1:]
    return events


def compare(job: Expected, view: JobInfo | None, events: list[Event]) -> tuple[str, list[str]]:
    """Return the observed outcome as text, and the differences from the expected one."""
    if view is None:
        return "missing", ["the engine does not have it"]
    finals = _count(events, FINAL_EVENTS)
    observed = _words(view.state, view.attempt, view.meta.retry_count, finals)
    expected = _words(job.state, job.attempts, job.retries, 1)
    problems = [] if observed == expected else [f"expected {expected}, observed {observed}"]
    begun = [event for event in events if event.type in BEGINNINGS]
    if len(begun) != job.attempts:
        problems.append(f"expected {job.attempts} runs in the feed, observed {len(begun)}")
    if _count(events, CREATIONS) != 1:
        problems.append("was not created exactly once")
    if begun and begun[0].at_ms < job.not_before_ms:
        problems.append(f"ran {job.not_before_ms - begun[0].at_ms} ms too early")
    return observed, problems


def summary(results: Sequence[Result]) -> Table:
    """Build a table of expected and observed outcomes."""
    table = Table(title="expected and observed outcomes, with exactly one final event per job", title_justify="left")
    for column in ("group", "jobs", "expected of each", "observed", ""):
        table.add_column(column)
    for result in results:
        observed = ", ".join(
            f"{number} × {'as expected' if words == result.expected else words}"
            for words, number in result.observed.items()
        )
        verdict = Text("WRONG", "red") if result.problems else Text("ok", "green")
        table.add_row(result.group, str(sum(result.observed.values())), result.expected, observed, verdict)
    return table


def _words(state: State, attempts: int, retries: int, finals: int) -> str:
    ends = "" if finals == 1 else f", {finals} final events"
    return f"{state}, {_plural(attempts, 'run')}, {_plural(retries, 'retry')}{ends}"


def _plural(number: int, word: str) -> str:
    return (
        f"{number} {word}" if number == 1 else f"{number} {word.removesuffix('y')}{'ies' if word[-1] == 'y' else 's'}"
    )


def _count(events: Iterable[Event], types: Sequence[str]) -> int:
    return sum(1 for event in events if event.type in types)
