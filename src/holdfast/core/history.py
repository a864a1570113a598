"""Is this a story that the state table allows? A checker over events, linear in their number.

It knows nothing about engines or ledgers: it reads what a feed or a ledger said and holds it against `core.states`.
What it checks, for every job: the story begins at the beginning, each move starts where the last one ended and is
legal, carries its own name, attempts rise by one at each claim (an attempt that was given back unstarted may be
numbered again), retries are never forgotten, and nothing follows the one final event. Two moves are not in the table
and are allowed under their own name only: a job that was put back (`task.restored`), and the place where the engine's
story went on from an earlier point than the ledger's (`ledger.forked`, be it in the same state); neither leads out of a
final state or into one.

`Story` holds one job and is fed event by event, in constant memory; `read_history` follows many jobs at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.job import Event
from holdfast.core.states import EVENT_CHOICES, FINAL, FORKED_EVENT, RESTORED_EVENT, State, event_for, is_legal

#: An engine with one mistake makes it in every job.
SHOWN_FAULTS: Final = 10
#: A job can wait out an outage for days: a story remembers its latest moves only.
REMEMBERED_MOVES: Final = 30


@dataclass(slots=True)
class JobHistory:
    """What one job's events have said so far."""

    job_id: str
    state: State | None = None
    attempt: int = 0
    retry_count: int = 0
    #: How many events were read, those beside the moves too: in a ledger, the number of the last one.
    events: int = 0
    forks: int = 0
    restores: int = 0
    #: The last move gave the job back, so that its attempt may not have been used up.
    released: bool = False
    #: The last move was a fork: the engine's counts are those of an earlier point.
    forked: bool = False
    moves: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_MOVES))

    @property
    def ended(self) -> bool:
        return self.state in FINAL

    def add(self, event: Event, seq: int | None = None) -> list[str]:
        """Follow the next event and say what is wrong with it. With a number, it must be the next one."""
        faults = []
        if seq is not None:
            if seq != self.events + 1:
                faults.append(f"{event.type} has number {seq} after {self.events}")
            if event.to_state is None and self.state is None:
                faults.append(f"{event.type} comes before the creation")
            # From here on, so that one hole is one fault.
            self.events = seq - 1
        self.events += 1
        # Events beside the moves (a heartbeat, a second copy of a message) change no state.
        if event.to_state is not None:
            faults += _faults(self, event, event.to_state)
        # Told only when asked for: most stories are sound, and there are millions.
        told = [f"{fault}; so far {self._told()}" for fault in faults]
        if event.to_state is not None:
            _follow(self, event)
        return told

    def _told(self) -> str:
        told = list(self.moves)
        return f"… {told}" if len(told) == REMEMBERED_MOVES else str(told)


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """Every job's story, and everything that was wrong with them."""

    histories: dict[str, JobHistory]
    faults: list[str]

    @property
    def open_jobs(self) -> list[str]:
        return [job_id for job_id, story in self.histories.items() if not story.ended]


def read_history(events: Iterable[Event]) -> HistoryReport:
    """Follow each job through the events, in the order in which the feed gave them."""
    stories: dict[str, JobHistory] = {}
    faults: list[str] = []
    for event in events:
        if event.to_state is None and event.job_id not in stories:
            continue
        story = stories.setdefault(event.job_id, JobHistory(event.job_id))
        faults += [f"{event.job_id}: {fault}" for fault in story.add(event)]
    return HistoryReport(stories, faults)


def check_history(events: Iterable[Event], *, ended: bool = False) -> HistoryReport:
    """Raise `AssertionError` with every fault; with `ended`, a job that is still open is one too."""
    history = read_history(events)
    faults = history.faults
    if ended:
        faults = faults + [f"{job_id}: has no final event" for job_id in history.open_jobs]
    if faults:
        shown = "\n".join(faults[:SHOWN_FAULTS])
        raise AssertionError(f"the events tell an illegal story, {len(faults)} faults:\n{shown}")
    return history


def _faults(story: JobHistory, event: Event, to_state: State) -> list[str]:
    faults = []
    if story.ended:
        faults.append(f"{event.type} after it ended as {story.state}")
    if event.from_state != story.state:
        faults.append(f"{event.type} comes from {event.from_state}, but it was {story.state}")
    return faults + _move_faults(event, to_state) + _count_faults(story, event)


def _move_faults(event: Event, to_state: State) -> list[str]:
    move = f"{event.from_state} → {to_state}"
    if event.type == FORKED_EVENT:
        is_open = event.from_state is not None and not {event.from_state, to_state} & FINAL
        return [] if is_open else [f"{move} is no fork"]
    if event.type == RESTORED_EVENT:
        return [] if _is_restore(event.from_state, to_state) else [f"{move} restores nothing"]
    faults = []
    reclaimed = event.from_state is State.RUNNING and to_state is State.RUNNING
    if not reclaimed and not is_legal(event.from_state, to_state):
        faults.append(f"{move} is not in the table")
    if event.type not in EVENT_CHOICES.get((event.from_state, to_state), (event_for(event.from_state, to_state),)):
        faults.append(f"{move} is called {event.type}")
    return faults


def _is_restore(from_state: State | None, to_state: State) -> bool:
    if from_state is State.RUNNING:
        # Its lease is gone with the engine's memory.
        return to_state is State.QUEUED
    return from_state is to_state and to_state not in FINAL


def _count_faults(story: JobHistory, event: Event) -> list[str]:
    if story.forked or event.type == FORKED_EVENT:
        return []
    faults = []
    used = {story.attempt, story.attempt - 1} if story.released else {story.attempt}
    expected = {number + 1 for number in used} if event.to_state is State.RUNNING else used
    if event.attempt not in expected:
        faults.append(f"{event.type} is attempt {event.attempt}, expected {sorted(expected)}")
    resumed = event.from_state is State.SUSPENDED and event.to_state is State.QUEUED
    if event.retry_count < story.retry_count and not resumed:
        faults.append(f"{event.type} forgets retries: {story.retry_count} → {event.retry_count}")
    if event.retry_count > story.retry_count + 1:
        faults.append(f"{event.type} skips retries: {story.retry_count} → {event.retry_count}")
    return faults


def _follow(story: JobHistory, event: Event) -> None:
    forked, restored = event.type == FORKED_EVENT, event.type == RESTORED_EVENT
    released = event.from_state is State.RUNNING and event.to_state is State.QUEUED and not forked and not restored
    # A job that was given back and is moved again before it runs keeps the doubt about its last attempt; a fork says
    # outright in which attempt the engine is.
    story.released = released or (story.released and event.to_state is not State.RUNNING and not forked)
    if not (story.released and not released):
        story.attempt = event.attempt
    story.forked = forked
    story.forks += forked
    story.restores += restored
    story.state = event.to_state
    story.retry_count = event.retry_count
    story.moves.append(event.type)
