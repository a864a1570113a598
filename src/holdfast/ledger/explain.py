"""A job's story in plain sentences: what happened, why it is where it is, what will happen next. Pure.

It reads events in order, as ledger or feed tell them, and, if there is one, what the engine says of the job right now.
Every state and every event has its sentence; an event that nobody here knows is told by its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.core.job import Event, JobView
from holdfast.core.states import (
    DUPLICATE_EVENT,
    EXPEDITED_EVENT,
    FINAL,
    FORKED_EVENT,
    HEARTBEAT_EVENT,
    RESTORED_EVENT,
    State,
)
from holdfast.errors import EffectInDoubt
from holdfast.ledger.people import ApprovalRow, ApprovalStatus
from holdfast.ledger.wording import by, clock, error_of, listed, ordinal, reason_of, span, word, words


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """What a person did about a job, as the operators' log tells it."""

    type: str
    actor: str
    reason: str
    at_ms: int


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the events."""

    job_id: str
    now_ms: int
    #: What it was submitted to run: not every store repeats it in the first event.
    task: str = ""
    queue: str = ""
    #: Whether an operator has paused the queue; None: not known.
    paused: bool | None = None
    #: How many workers claim from the queue; None: not known.
    workers: int | None = None
    #: The engine's word; None: it does not know the job (any more), or nobody asked it.
    live: JobView | None = None
    #: How long a lease lasts: a dead worker's job is taken over within this.
    lease_ms: int = 30_000
    dlq_id: str | None = None
    letter_status: str | None = None
    #: The job that its dead letter was sent back to work as.
    replayed_as: str | None = None
    #: The job that this one is a replay of.
    replay_of: str | None = None
    #: Keys of effects of which nobody knows whether they happened.
    in_doubt: tuple[str, ...] = ()
    #: What people were asked about it, the oldest first.
    approvals: tuple[ApprovalRow, ...] = ()
    #: What people did about it; those that its own events tell are not told twice.
    deeds: tuple[Deed, ...] = ()


class Explanation(msgspec.Struct, frozen=True):
    """Sentences, in the order in which they are to be read."""

    happened: list[str]
    why: list[str]
    then: list[str]

    @property
    def sentences(self) -> list[str]:
        return [*self.happened, *self.why, *self.then]


def explain(events: Sequence[Event], scene: Scene) -> Explanation:
    """Tell one job's story."""
    happened = list(_happened(events, scene))
    moves = [event for event in events if event.to_state is not None]
    if not moves:
        return Explanation(happened, ["Its beginning is not in the ledger."], [])
    last = moves[-1]
    state = last.to_state
    assert state is not None
    why, then = _PRESENT[state](last, events, scene)
    return Explanation(happened, why, then + _apart(state, scene))


# What happened -------------------------------------------------------------------------------------


def _happened(events: Sequence[Event], scene: Scene) -> Iterator[str]:
    began_ms, beats = 0, 0
    deeds = [deed for deed in scene.deeds if deed.type in _DEEDS]
    if scene.replay_of:
        yield f"It is a replay of job {scene.replay_of}."
    for event in events:
        # A vote and the move that it causes may share a millisecond.
        while deeds and deeds[0].at_ms <= event.at_ms:
            yield _deed(deeds.pop(0))
        if event.type == HEARTBEAT_EVENT:
            # Told once, when it is known how many there were.
            beats += 1
            continue
        if beats:
            yield _beats(beats)
            beats = 0
        if event.type == "task.created":
            event = _with_submission(event, scene)
        teller = _TELLERS.get(event.type)
        yield teller(event, event.at_ms - began_ms) if teller else _unknown(event)
        if event.to_state is State.RUNNING:
            began_ms = event.at_ms
    if beats:
        yield _beats(beats)
    yield from map(_deed, deeds)


#: What an operator did that no event of the job tells.
_DEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "operator.approve": "said yes to it",
        "operator.reject": "said no to it",
        "operator.dlq_replay": "sent its dead letter back to work",
        "operator.dlq_discard_request": "asked to discard its dead letter",
        "operator.dlq_discard": "agreed to discard its dead letter",
        "operator.dlq_keep": "kept its dead letter, which was to be discarded",
    }
)


def _deed(deed: Deed) -> str:
    why = " ".join(deed.reason.split())[:200]
    return f"{deed.actor} {_DEEDS[deed.type]} at {clock(deed.at_ms)}{f' ({why})' if why else ''}."


def _beats(count: int) -> str:
    return f"Its worker said {count} {'time' if count == 1 else 'times'} that it was alive."


def _with_submission(event: Event, scene: Scene) -> Event:
    return msgspec.structs.replace(event, data={"task": scene.task, **(event.data or {})})


def _created(event: Event, _: int) -> str:
    data = event.data or {}
    what = f" to run {data['task']}" if data.get("task") else ""
    later = int(data.get("run_at_ms") or 0)
    due = f", no earlier than {clock(later)}" if later > event.at_ms else ""
    return f"It was submitted at {clock(event.at_ms)}{what}{due}."


def _approval_requested(event: Event, took_ms: int) -> str:
    if event.from_state is None:
        return f"It was submitted at {clock(event.at_ms)}, and a person has to approve it before it may run."
    if event.from_state is State.RUNNING:
        return f"After {span(took_ms)} attempt {event.attempt} asked for a person's approval and gave its worker back."
    return f"It was held at {clock(event.at_ms)}: a person has to approve it first{reason_of(event)}."


def _approved(event: Event, _: int) -> str:
    consent = (event.data or {}).get("consent")
    people = consent.get("by") if isinstance(consent, dict) else None
    who = f" by {listed(people)}" if people else by(event)
    return f"It was approved at {clock(event.at_ms)}{who}{reason_of(event)}."


def _withdrawn(event: Event, _: int) -> str:
    return f"At {clock(event.at_ms)} the question was withdrawn{reason_of(event)}; the job went back in line."


def _rejected(event: Event, _: int) -> str:
    return f"It was rejected at {clock(event.at_ms)}{by(event)}{reason_of(event)}, and so cancelled."


def _expired(event: Event, _: int) -> str:
    return f"Nobody had approved it in time; at {clock(event.at_ms)} it was cancelled."


def _expedited(event: Event, _: int) -> str:
    return f"It was made due at once at {clock(event.at_ms)}{by(event)}{reason_of(event)}."


def _claimed(event: Event, _: int) -> str:
    return f"Attempt {event.attempt} began at {clock(event.at_ms)} on {event.worker or 'an unknown worker'}."


def _reclaimed(event: Event, took_ms: int) -> str:
    old = (event.data or {}).get("old_worker") or "its worker"
    return (
        f"{span(took_ms)} later {old} had lost its lease (it died, or was cut off): "
        f"{event.worker or 'another worker'} took over with attempt {event.attempt}."
    )


def _released(event: Event, took_ms: int) -> str:
    data = event.data or {}
    due_ms = int(data.get("next_attempt_at_ms") or 0)
    if due_ms:
        return f"After {span(took_ms)} it went to sleep until {clock(due_ms)} and gave its worker back."
    return f"Its worker gave it back unfinished after {span(took_ms)}; it went back in line."


def _succeeded(event: Event, took_ms: int) -> str:
    return f"Attempt {event.attempt} succeeded after {span(took_ms)}."


def _retrying(event: Event, took_ms: int) -> str:
    due_ms = int((event.data or {}).get("next_attempt_at_ms") or 0)
    wait = f"; it was to run again at {clock(due_ms)}" if due_ms else ""
    if not (event.data or {}).get("counted", True):
        return (
            f"Attempt {event.attempt} found a dependency down after {span(took_ms)}{error_of(event)}{wait}. "
            "That uses up no retry."
        )
    return f"Attempt {event.attempt} failed after {span(took_ms)}{error_of(event)}{wait}."


def _suspended(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING and not by(event):
        return f"Attempt {event.attempt} failed after {span(took_ms)}{error_of(event)}, and the job was suspended."
    return f"It was suspended at {clock(event.at_ms)}{by(event)}{reason_of(event)}."


def _resumed(event: Event, _: int) -> str:
    return f"It was resumed at {clock(event.at_ms)}{by(event)}{reason_of(event)}; its retries start again."


def _dlq_pending(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING:
        return f"Attempt {event.attempt} failed for good after {span(took_ms)}{error_of(event)}."
    return f"It was given up at {clock(event.at_ms)}{error_of(event)}."


def _dlq(event: Event, _: int) -> str:
    return f"Its dead letter was written at {clock(event.at_ms)}."


def _failed(event: Event, _: int) -> str:
    return f"It ended as failed at {clock(event.at_ms)}."


def _cancelled(event: Event, _: int) -> str:
    return f"It was cancelled at {clock(event.at_ms)}{by(event)}{reason_of(event)}."


def _restored(event: Event, _: int) -> str:
    where = "back in line" if event.from_state is State.RUNNING else f"back as {word(event.to_state)}"
    return f"The engine had lost it; at {clock(event.at_ms)} it was put {where}, as the ledger knew it."


def _forked(event: Event, _: int) -> str:
    if event.from_state is event.to_state:
        where = f"{word(event.to_state)} as it was after attempt {event.attempt}, where the ledger had a later point"
    else:
        where = f"{word(event.to_state)}, where the ledger had it {word(event.from_state)}"
    return (
        f"At {clock(event.at_ms)} the engine turned out to have forgotten its latest steps (a wipe, or an older copy)"
        f": it went on from {where}."
    )


def _duplicate(event: Event, _: int) -> str:
    return f"A second copy of it came in at {clock(event.at_ms)} and was dropped."


def _unknown(event: Event) -> str:
    return f"{event.type} at {clock(event.at_ms)}{reason_of(event)}."


_TELLERS: Final[Mapping[str, Callable[[Event, int], str]]] = MappingProxyType(
    {
        "task.created": _created,
        "approval.requested": _approval_requested,
        "approval.approved": _approved,
        "approval.withdrawn": _withdrawn,
        "approval.rejected": _rejected,
        "approval.expired": _expired,
        EXPEDITED_EVENT: _expedited,
        "task.claimed": _claimed,
        "task.reclaimed": _reclaimed,
        "task.released": _released,
        "task.succeeded": _succeeded,
        "task.retrying": _retrying,
        "task.suspended": _suspended,
        "task.resumed": _resumed,
        "task.dlq_pending": _dlq_pending,
        "task.dlq": _dlq,
        "task.failed": _failed,
        "task.cancelled": _cancelled,
        RESTORED_EVENT: _restored,
        FORKED_EVENT: _forked,
        DUPLICATE_EVENT: _duplicate,
    }
)

#: Every event that has a sentence of its own.
KNOWN_EVENTS: Final = frozenset({*_TELLERS, HEARTBEAT_EVENT})


# Why it is where it is, and what comes next --------------------------------------------------------------

_Present = tuple[list[str], list[str]]


def _is_queued(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    due_ms = _due(last, scene)
    obstacle, remedy = _obstacle(scene)
    if due_ms > scene.now_ms:
        why = [f"It waits for its time: it is due {_in(due_ms, scene)}.", *obstacle]
        return why, remedy or ["Then the next free worker takes it."]
    waits = span(max(0, scene.now_ms - last.at_ms))
    return [f"It has waited in line for {waits}.", *obstacle], remedy or ["The next free worker of its queue takes it."]


def _obstacle(scene: Scene) -> _Present:
    """Why no worker takes a job of the queue, and what to do about it."""
    queue = shlex.quote(scene.queue)
    if scene.paused:
        return ["Its queue is paused."], [f"No worker takes it before `holdfast queues resume {queue}`."]
    if scene.workers == 0:
        return ["No worker serves its queue."], [f"It runs once one does: `holdfast worker APP --queue {queue}`."]
    return [], []


def _is_waiting_approval(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    why = f"A person has to decide: it has waited for approval since {clock(last.at_ms)}."
    then = "Nothing happens by itself. Approved, it goes in line; rejected, it is cancelled."
    asked = next((row for row in reversed(scene.approvals) if row.status is ApprovalStatus.REQUESTED), None)
    if asked is None:
        return [why], [then]
    if asked.deadline is not None:
        then = f"Unanswered, it is cancelled at {asked.deadline:%Y-%m-%d %H:%M:%S} UTC."
    return [why, *_question(asked)], [f"`holdfast approvals show {asked.approval_id}` tells what would run. {then}"]


def _question(asked: ApprovalRow) -> Iterator[str]:
    rules = f" by {listed(asked.policies)}" if asked.policies else ""
    reason = " ".join(asked.reason.split())[:200]
    if rules or reason:
        yield f"It is asked for{rules}{f': {reason}' if reason else ''}."
    yes = [vote.person for vote in asked.votes if vote.approve]
    if asked.quorum > 1:
        given = f"{listed(yes)} did" if yes else "nobody did yet"
        yield f"It takes {asked.quorum} different people to approve it; {given}."


def _is_running(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    alive_ms = max(event.at_ms for event in events if event.to_state is not None or event.type == HEARTBEAT_EVENT)
    worker = last.worker or "an unknown worker"
    seen = f", last heard of {span(scene.now_ms - alive_ms)} ago" if alive_ms > last.at_ms else ""
    return (
        [f"Its worker {worker} has held it for {span(max(0, scene.now_ms - last.at_ms))}{seen}."],
        [f"If the worker dies, another takes over within {span(scene.lease_ms)}, as attempt {last.attempt + 1}."],
    )


def _is_retrying(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    due_ms = _due(last, scene)
    which = f"its {ordinal(last.retry_count)} retry" if last.retry_count else "the outage to end"
    when = f", due {_in(due_ms, scene)}" if due_ms else ""
    obstacle, remedy = _obstacle(scene)
    return [f"It waits for {which}{when}.", *obstacle], [f"Then it runs again, as attempt {last.attempt + 1}.", *remedy]


def _is_suspended(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    resume = f"`holdfast jobs resume {scene.job_id}`"
    if scene.in_doubt:
        keys = ", ".join(scene.in_doubt)
        resolve = f"holdfast effects resolve {shlex.quote(scene.in_doubt[0])}"
        return (
            [f"A person has to decide: nobody knows whether this effect happened: {keys}."],
            [f"Look, then `{resolve}` with --done or --not-done, which sends the job back to work."],
        )
    if (last.data or {}).get("code") == EffectInDoubt.code:
        return (
            ["An effect was in doubt, and no longer is: its end has been recorded, or its key is free again."],
            [f"Nothing happens by itself. {resume} sends it back to work."],
        )
    return (
        [f"A person has to decide: it is suspended since {clock(last.at_ms)}{reason_of(last)}."],
        [f"Nothing happens by itself. {resume} sends it back to work with fresh retries; else cancel it."],
    )


def _is_succeeded(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return ["It is done."], ["Nothing more will happen to it."]


def _is_dlq_pending(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return (
        ["It was given up, and its dead letter is not written yet."],
        [
            "A worker's upkeep writes it as soon as the ledger answers; then the job ends as failed.",
            "If this lasts: does a worker or `holdfast upkeep` run, and is the ledger up?",
        ],
    )


def _is_dlq_recorded(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return [f"Its dead letter{_letter_id(scene)} is written."], ["It ends as failed in a moment."]


def _is_failed(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    failure = next((event for event in reversed(events) if event.type == "task.dlq_pending"), last)
    decided = scene.letter_status not in (None, "open")
    state = f" and is {words(scene.letter_status or '')}" if decided else ""
    why = [f"It failed{error_of(failure) or ' for good'}. Its dead letter{_letter_id(scene)} is written{state}."]
    then = "This job will not run again."
    if scene.replayed_as:
        return why, [f"{then} Its work goes on as job {scene.replayed_as}."]
    if decided:
        return why, [then]
    return why, [f"{then} A person can look at the dead letter and replay it (`holdfast dlq show{_letter_id(scene)}`)."]


def _is_cancelled(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return [f"It was cancelled{by(last)}{reason_of(last)}."], ["It will not run again."]


_PRESENT: Final[Mapping[State, Callable[[Event, Sequence[Event], Scene], _Present]]] = MappingProxyType(
    {
        State.QUEUED: _is_queued,
        State.WAITING_APPROVAL: _is_waiting_approval,
        State.RUNNING: _is_running,
        State.RETRYING: _is_retrying,
        State.SUSPENDED: _is_suspended,
        State.SUCCEEDED: _is_succeeded,
        State.DLQ_PENDING: _is_dlq_pending,
        State.DLQ_RECORDED: _is_dlq_recorded,
        State.FAILED: _is_failed,
        State.CANCELLED: _is_cancelled,
    }
)


def _apart(state: State, scene: Scene) -> list[str]:
    """Where engine and ledger do not say the same."""
    live = scene.live
    if live is None or live.state is state:
        return []
    if state in FINAL:
        return [f"The engine still has it as {word(live.state)}: it forgot the end. A second end is not recorded."]
    return [f"The engine is further on already: there it is {word(live.state)}. The ledger follows in a moment."]


# Words -----------------------------------------------------------------------------------------------


def _due(last: Event, scene: Scene) -> int:
    if scene.live is not None and scene.live.state is last.to_state and scene.live.next_attempt_at_ms:
        return scene.live.next_attempt_at_ms
    data = last.data or {}
    return int(data.get("next_attempt_at_ms") or data.get("run_at_ms") or 0)


def _in(due_ms: int, scene: Scene) -> str:
    left_ms = due_ms - scene.now_ms
    return f"in {span(left_ms)} ({clock(due_ms)})" if left_ms > 0 else f"since {clock(due_ms)}"


def _letter_id(scene: Scene) -> str:
    return f" {scene.dlq_id}" if scene.dlq_id else ""
