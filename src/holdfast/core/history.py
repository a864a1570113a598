"""Check events against the state table, in time linear in their number.

Independent of engines and ledgers: it compares the events of a feed or a ledger with `core.states`. Checks per job: the
history starts with a creation; each move starts in the state the last one ended in, is legal and has the right event
name; attempts rise by one at each claim (an attempt that was released before it started may be numbered again); retry
counts rise by at most one, and fall only when a suspended job is resumed; nothing follows the final event. Three moves
are not in the table and are allowed under their own event name only: a reclaim (`task.reclaimed`), a restored job
(`task.restored`), and a fork, where the engine continued from an earlier point than the ledger's (`ledger.forked`,
possibly in the same state). None of them leads out of a final state or into one.

`JobHistory` checks one job event by event, in constant memory; `read_history` checks many jobs at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.job import Event
from holdfast.core.states import EVENT_CHOICES, FINAL, FORKED_EVENT, RESTORED_EVENT, State, event_for, is_legal

#: A bug in an engine affects every job, so a few faults are enough.
SHOWN_FAULTS: Final = 10
#: A job may be retried for days during an outage, so only the latest moves are kept.
KEPT_MOVES: Final = 30


@dataclass(slots=True)
class JobHistory:
    """One job as its events so far describe it."""

    job_id: str
    state: State | None = None
    attempt: int = 0
    retry_count: int = 0
    #: Events read, including those that are not moves; in a ledger, the number of the last one.
    events: int = 0
    forks: int = 0
    restores: int = 0
    #: The last move released the job, so its attempt may not have been used up.
    released: bool = False
    #: The last move was a fork: the engine's counts are those of an earlier point.
    forked: bool = False
    moves: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_MOVES))

    @property
    def ended(self) -> bool:
        return self.state in FINAL

    def add(self, event: Event, seq: int | None = None) -> list[str]:
        """Apply the next event and return its faults. `seq`, if given, must be the next number."""
        faults = []
        if seq is not None:
            if seq != self.events + 1:
                faults.append(f"{event.type} has number {seq} after {self.events}")
            if event.to_state is None and self.state is None:
                faults.append(f"{event.type} comes before the creation")
            # Continue from this number, so that one gap is one fault.
            self.events = seq - 1
        self.events += 1
        # Events that are not moves (a heartbeat, a second copy of a message) change no state.
        if event.to_state is not None:
            faults += _faults(self, event, event.to_state)
        # Formatted only for faults: there are millions of histories, and most have none.
        described = [f"{fault}; so far {self._format_moves()}" for fault in faults]
        if event.to_state is not None:
            _apply(self, event)
        return described

    def _format_moves(self) -> str:
        moves = list(self.moves)
        return f"… {moves}" if len(moves) == KEPT_MOVES else str(moves)


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """The histories of all jobs, and their faults."""

    histories: dict[str, JobHistory]
    faults: list[str]

    @property
    def open_jobs(self) -> list[str]:
        return [job_id for job_id, history in self.histories.items() if not history.ended]


def read_history(events: Iterable[Event]) -> HistoryReport:
    """Check each job's events, in feed order."""
    histories: dict[str, JobHistory] = {}
    faults: list[str] = []
    for event in events:
        if event.to_state is None and event.job_id not in histories:
            continue
        history = histories.setdefault(event.job_id, JobHistory(event.job_id))
        faults += [f"{event.job_id}: {fault}" for fault in history.add(event)]
    return HistoryReport(histories, faults)


def check_history(events: Iterable[Event], *, ended: bool = False) -> HistoryReport:
    """Raise `AssertionError` that lists the first faults; with `ended`, an open job is a fault too."""
    report = read_history(events)
    faults = report.faults
    if ended:
        faults = faults + [f"{job_id}: has no final event" for job_id in report.open_jobs]
    if faults:
        shown = "\n".join(faults[:SHOWN_FAULTS])
        raise AssertionError(f"the events are not a legal history, {len(faults)} faults:\n{shown}")
    return report


def _faults(history: JobHistory, event: Event, to_state: State) -> list[str]:
    faults = []
    if history.ended:
        faults.append(f"{event.type} after it ended as {history.state}")
    if event.from_state != history.state:
        faults.append(f"{event.type} comes from {event.from_state}, but it was {history.state}")
    return faults + _move_faults(event, to_state) + _count_faults(history, event)


def _move_faults(event: Event, to_state: State) -> list[str]:
    move = f"{event.from_state} → {to_state}"
    if event.type == FORKED_EVENT:
        is_open = event.from_state is not None and not {event.from_state, to_state} & FINAL
        return [] if is_open else [f"{move} is not a fork"]
    if event.type == RESTORED_EVENT:
        return [] if _is_restore(event.from_state, to_state) else [f"{move} is not a restore"]
    faults = []
    reclaimed = event.from_state is State.RUNNING and to_state is State.RUNNING
    if not reclaimed and not is_legal(event.from_state, to_state):
        faults.append(f"{move} is not in the table")
    if event.type not in EVENT_CHOICES.get((event.from_state, to_state), (event_for(event.from_state, to_state),)):
        faults.append(f"{move} is called {event.type}")
    return faults


def _is_restore(from_state: State | None, to_state: State) -> bool:
    if from_state is State.RUNNING:
        # The engine lost its lease with the rest of its data.
        return to_state is State.QUEUED
    return from_state is to_state and to_state not in FINAL


def _count_faults(history: JobHistory, event: Event) -> list[str]:
    if history.forked or event.type == FORKED_EVENT:
        return []
    faults = []
    used = {history.attempt, history.attempt - 1} if history.released else {history.attempt}
    expected = {number + 1 for number in used} if event.to_state is State.RUNNING else used
    if event.attempt not in expected:
        faults.append(f"{event.type} is attempt {event.attempt}, expected {sorted(expected)}")
    resumed = event.from_state is State.SUSPENDED and event.to_state is State.QUEUED
    if event.retry_count < history.retry_count and not resumed:
        faults.append(f"{event.type} loses retries: {history.retry_count} → {event.retry_count}")
    if event.retry_count > history.retry_count + 1:
        faults.append(f"{event.type} skips retries: {history.retry_count} → {event.retry_count}")
    return faults


def _apply(history: JobHistory, event: Event) -> None:
    forked, restored = event.type == FORKED_EVENT, event.type == RESTORED_EVENT
    released = event.from_state is State.RUNNING and event.to_state is State.QUEUED and not forked and not restored
    # Until a released job runs again, it stays unknown whether its last attempt was used up. A fork states the engine's
    # attempt number.
    history.released = released or (history.released and event.to_state is not State.RUNNING and not forked)
    if not (history.released and not released):
        history.attempt = event.attempt
    history.forked = forked
    history.forks += forked
    history.restores += restored
    history.state = event.to_state
    history.retry_count = event.retry_count
    history.moves.append(event.type)
