"""Is this a story that the state table allows? A checker over feed events, linear in their number.

It knows nothing about engines: it reads what a feed said and holds it against `core.states`. What it checks,
for every job: the story begins at the beginning, each move starts where the last one ended and is legal, carries its
own name, attempts rise by one at each claim (an attempt that was given back unstarted may be numbered again),
retries are never forgotten, and nothing follows the one final event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.job import Event
from holdfast.core.states import FINAL, State, event_for, is_legal

#: An engine with one mistake makes it in every job.
SHOWN_FAULTS: Final = 10


@dataclass(slots=True)
class Story:
    """What one job's events have said so far."""

    job_id: str
    state: State | None = None
    attempt: int = 0
    retry_count: int = 0
    #: The last move gave the job back, so that its attempt may not have been used up.
    given_back: bool = False
    moves: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True, slots=True)
class History:
    """Every job's story, and everything that was wrong with them."""

    stories: dict[str, Story]
    faults: list[str]

    @property
    def open_jobs(self) -> list[str]:
        return [job_id for job_id, story in self.stories.items() if not story.ended]


def read_history(events: Iterable[Event]) -> History:
    """Follow each job through the events, in the order in which the feed gave them."""
    stories: dict[str, Story] = {}
    faults: list[str] = []
    for event in events:
        # Events beside the moves (a heartbeat, a second copy of a message) change no state.
        if event.to_state is not None:
            story = stories.setdefault(event.job_id, Story(event.job_id))
            faults += [f"{event.job_id}: {fault}; so far {story.moves}" for fault in _faults(story, event)]
            _follow(story, event)
    return History(stories, faults)


def check_history(events: Iterable[Event], *, ended: bool = False) -> History:
    """Raise `AssertionError` with every fault; with `ended`, a job that is still open is one too."""
    history = read_history(events)
    faults = history.faults
    if ended:
        faults = faults + [f"{job_id}: has no final event" for job_id in history.open_jobs]
    if faults:
        shown = "\n".join(faults[:SHOWN_FAULTS])
        raise AssertionError(f"the feed tells an illegal story, {len(faults)} faults:\n{shown}")
    return history


def _faults(story: Story, event: Event) -> list[str]:
    assert event.to_state is not None
    faults = []
    if story.ended:
        faults.append(f"{event.type} after it ended as {story.state}")
    if event.from_state != story.state:
        faults.append(f"{event.type} comes from {event.from_state}, but it was {story.state}")
    reclaimed = event.from_state is State.RUNNING and event.to_state is State.RUNNING
    if not reclaimed and not is_legal(event.from_state, event.to_state):
        faults.append(f"{event.from_state} → {event.to_state} is not in the table")
    if event.type != event_for(event.from_state, event.to_state):
        faults.append(f"{event.from_state} → {event.to_state} is called {event.type}")
    return faults + _count_faults(story, event)


def _count_faults(story: Story, event: Event) -> list[str]:
    faults = []
    used = {story.attempt, story.attempt - 1} if story.given_back else {story.attempt}
    expected = {number + 1 for number in used} if event.to_state is State.RUNNING else used
    if event.attempt not in expected:
        faults.append(f"{event.type} is attempt {event.attempt}, expected {sorted(expected)}")
    resumed = event.from_state is State.SUSPENDED and event.to_state is State.QUEUED
    if event.retry_count < story.retry_count and not resumed:
        faults.append(f"{event.type} forgets retries: {story.retry_count} → {event.retry_count}")
    if event.retry_count > story.retry_count + 1:
        faults.append(f"{event.type} skips retries: {story.retry_count} → {event.retry_count}")
    return faults


def _follow(story: Story, event: Event) -> None:
    released = event.from_state is State.RUNNING and event.to_state is State.QUEUED
    # A job that was given back and is moved again before it runs keeps the doubt about its last attempt.
    story.given_back = released or (story.given_back and event.to_state is not State.RUNNING)
    if not (story.given_back and not released):
        story.attempt = event.attempt
    story.state = event.to_state
    story.retry_count = event.retry_count
    story.moves.append(event.type)
