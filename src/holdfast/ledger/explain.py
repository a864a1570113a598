"""A job's story in plain sentences: what happened, why it is where it is, what will happen next. Pure.

It reads events in order, as ledger or feed tell them, and, if there is one, what the engine says of the job right now.
Every state and every event has its sentence; an event that nobody here knows is told by its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.clock import to_datetime
from holdfast.core.job import Event, JobView
from holdfast.core.states import DUPLICATE_EVENT, FINAL, FORKED_EVENT, HEARTBEAT_EVENT, RESTORED_EVENT, State
from holdfast.errors import EffectInDoubt

_ORDINALS: Final = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the events."""

    job_id: str
    now_ms: int
    #: The engine's word; None: it does not know the job (any more), or nobody asked it.
    live: JobView | None = None
    #: How long a lease lasts: a dead worker's job is taken over within this.
    lease_ms: int = 30_000
    dlq_id: str | None = None
    letter_status: str | None = None
    #: Keys of effects of which nobody knows whether they happened.
    in_doubt: tuple[str, ...] = ()


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
    happened = list(_happened(events))
    moves = [event for event in events if event.to_state is not None]
    if not moves:
        return Explanation(happened, ["Its beginning is not in the ledger."], [])
    last = moves[-1]
    state = last.to_state
    assert state is not None
    why, then = _PRESENT[state](last, events, scene)
    return Explanation(happened, why, then + _apart(state, scene))


# What happened -------------------------------------------------------------------------------------


def _happened(events: Sequence[Event]) -> Iterator[str]:
    began_ms, beats = 0, 0
    for event in events:
        if event.type == HEARTBEAT_EVENT:
            # Told once, when it is known how many there were.
            beats += 1
            continue
        if beats:
            yield _beats(beats)
            beats = 0
        teller = _TELLERS.get(event.type)
        yield teller(event, event.at_ms - began_ms) if teller else _unknown(event)
        if event.to_state is State.RUNNING:
            began_ms = event.at_ms
    if beats:
        yield _beats(beats)


def _beats(count: int) -> str:
    return f"Its worker said {count} {'time' if count == 1 else 'times'} that it was alive."


def _created(event: Event, _: int) -> str:
    data = event.data or {}
    what = f" to run {data['task']}" if data.get("task") else ""
    later = int(data.get("run_at_ms") or 0)
    due = f", no earlier than {_clock(later)}" if later > event.at_ms else ""
    return f"It was submitted at {_clock(event.at_ms)}{what}{due}."


def _approval_requested(event: Event, took_ms: int) -> str:
    if event.from_state is None:
        return f"It was submitted at {_clock(event.at_ms)}, and a person has to approve it before it may run."
    if event.from_state is State.RUNNING:
        return f"After {_span(took_ms)} attempt {event.attempt} asked for a person's approval and gave its worker back."
    return f"It was held at {_clock(event.at_ms)}: a person has to approve it first{_reason(event)}."


def _approved(event: Event, _: int) -> str:
    return f"It was approved at {_clock(event.at_ms)}{_by(event)}{_reason(event)}."


def _claimed(event: Event, _: int) -> str:
    return f"Attempt {event.attempt} began at {_clock(event.at_ms)} on {event.worker or 'an unknown worker'}."


def _reclaimed(event: Event, took_ms: int) -> str:
    old = (event.data or {}).get("old_worker") or "its worker"
    return (
        f"{_span(took_ms)} later {old} had lost its lease (it died, or was cut off): "
        f"{event.worker or 'another worker'} took over with attempt {event.attempt}."
    )


def _released(event: Event, took_ms: int) -> str:
    data = event.data or {}
    due_ms = int(data.get("next_attempt_at_ms") or 0)
    if due_ms:
        return f"After {_span(took_ms)} it went to sleep until {_clock(due_ms)} and gave its worker back."
    return f"Its worker gave it back unfinished after {_span(took_ms)}; it went back in line."


def _succeeded(event: Event, took_ms: int) -> str:
    return f"Attempt {event.attempt} succeeded after {_span(took_ms)}."


def _retrying(event: Event, took_ms: int) -> str:
    due_ms = int((event.data or {}).get("next_attempt_at_ms") or 0)
    wait = f"; it was to run again at {_clock(due_ms)}" if due_ms else ""
    if not (event.data or {}).get("counted", True):
        return (
            f"Attempt {event.attempt} found a dependency down after {_span(took_ms)}{_error(event)}{wait}. "
            "That uses up no retry."
        )
    return f"Attempt {event.attempt} failed after {_span(took_ms)}{_error(event)}{wait}."


def _suspended(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING and not _by(event):
        return f"Attempt {event.attempt} failed after {_span(took_ms)}{_error(event)}, and the job was suspended."
    return f"It was suspended at {_clock(event.at_ms)}{_by(event)}{_reason(event)}."


def _resumed(event: Event, _: int) -> str:
    return f"It was resumed at {_clock(event.at_ms)}{_by(event)}{_reason(event)}; its retries start again."


def _dlq_pending(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING:
        return f"Attempt {event.attempt} failed for good after {_span(took_ms)}{_error(event)}."
    return f"It was given up at {_clock(event.at_ms)}{_error(event)}."


def _dlq(event: Event, _: int) -> str:
    return f"Its dead letter was written at {_clock(event.at_ms)}."


def _failed(event: Event, _: int) -> str:
    return f"It ended as failed at {_clock(event.at_ms)}."


def _cancelled(event: Event, _: int) -> str:
    return f"It was cancelled at {_clock(event.at_ms)}{_by(event)}{_reason(event)}."


def _restored(event: Event, _: int) -> str:
    where = "back in line" if event.from_state is State.RUNNING else f"back as {_word(event.to_state)}"
    return f"The engine had lost it; at {_clock(event.at_ms)} it was put {where}, as the ledger knew it."


def _forked(event: Event, _: int) -> str:
    return (
        f"At {_clock(event.at_ms)} the engine turned out to have forgotten its latest steps (a wipe, or an older copy)"
        f": it went on from {_word(event.to_state)}, where the ledger had it {_word(event.from_state)}."
    )


def _duplicate(event: Event, _: int) -> str:
    return f"A second copy of it came in at {_clock(event.at_ms)} and was dropped."


def _unknown(event: Event) -> str:
    return f"{event.type} at {_clock(event.at_ms)}{_reason(event)}."


_TELLERS: Final[Mapping[str, Callable[[Event, int], str]]] = MappingProxyType(
    {
        "task.created": _created,
        "approval.requested": _approval_requested,
        "approval.approved": _approved,
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
    if due_ms > scene.now_ms:
        return [f"It waits for its time: it is due {_in(due_ms, scene)}."], ["Then the next free worker takes it."]
    waits = _span(max(0, scene.now_ms - last.at_ms))
    return (
        [f"It has waited in line for {waits}."],
        ["The next free worker of its queue takes it. If none does: is one running, or the queue paused?"],
    )


def _is_waiting_approval(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return (
        [f"A person has to decide: it has waited for approval since {_clock(last.at_ms)}."],
        ["Nothing happens by itself. Approved, it goes in line; rejected, it is cancelled."],
    )


def _is_running(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    alive_ms = max(event.at_ms for event in events if event.to_state is not None or event.type == HEARTBEAT_EVENT)
    worker = last.worker or "an unknown worker"
    seen = f", last heard of {_span(scene.now_ms - alive_ms)} ago" if alive_ms > last.at_ms else ""
    return (
        [f"Its worker {worker} has held it for {_span(max(0, scene.now_ms - last.at_ms))}{seen}."],
        [f"If the worker dies, another takes over within {_span(scene.lease_ms)}, as attempt {last.attempt + 1}."],
    )


def _is_retrying(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    due_ms = _due(last, scene)
    which = f"its {_ordinal(last.retry_count)} retry" if last.retry_count else "the outage to end"
    when = f", due {_in(due_ms, scene)}" if due_ms else ""
    return [f"It waits for {which}{when}."], [f"Then it runs again, as attempt {last.attempt + 1}."]


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
        [f"A person has to decide: it is suspended since {_clock(last.at_ms)}{_reason(last)}."],
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
    state = f" and is {_words(scene.letter_status or '')}" if decided else ""
    why = [f"It failed{_error(failure) or ' for good'}. Its dead letter{_letter_id(scene)} is written{state}."]
    then = "This job will not run again."
    return why, [then if decided else f"{then} A person can look at the dead letter and submit the work anew."]


def _is_cancelled(last: Event, events: Sequence[Event], scene: Scene) -> _Present:
    return [f"It was cancelled{_by(last)}{_reason(last)}."], ["It will not run again."]


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
        return [f"The engine still has it as {_word(live.state)}: it forgot the end. A second end is not recorded."]
    return [f"The engine is further on already: there it is {_word(live.state)}. The ledger follows in a moment."]


# Words -----------------------------------------------------------------------------------------------


def _due(last: Event, scene: Scene) -> int:
    if scene.live is not None and scene.live.state is last.to_state and scene.live.next_attempt_at_ms:
        return scene.live.next_attempt_at_ms
    data = last.data or {}
    return int(data.get("next_attempt_at_ms") or data.get("run_at_ms") or 0)


def _in(due_ms: int, scene: Scene) -> str:
    left_ms = due_ms - scene.now_ms
    return f"in {_span(left_ms)} ({_clock(due_ms)})" if left_ms > 0 else f"since {_clock(due_ms)}"


def _letter_id(scene: Scene) -> str:
    return f" {scene.dlq_id}" if scene.dlq_id else ""


def _error(event: Event) -> str:
    data = event.data or {}
    kind = data.get("type") or data.get("code") or ""
    message = " ".join(str(data.get("message") or event.message or "").split())
    # What to do stands at the end of the story; here half of a command would be left of it.
    message = message.partition(EffectInDoubt.ADVICE)[0]
    told = ": ".join(part for part in (str(kind), message) if part)
    return f": {told[:200]}" if told else ""


def _by(event: Event) -> str:
    actor = (event.data or {}).get("actor")
    return f" by {actor}" if actor else ""


def _reason(event: Event) -> str:
    said = str((event.data or {}).get("reason") or event.message).partition(EffectInDoubt.ADVICE)[0]
    return f" ({' '.join(said.split())[:200]})" if said else ""


def _word(state: State | None) -> str:
    return _words(state.value) if state is not None else "nothing"


def _words(name: str) -> str:
    return name.replace("dlq_", "dead letter ").replace("_", " ")


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"


def _clock(at_ms: int) -> str:
    return f"{to_datetime(at_ms):%Y-%m-%d %H:%M:%S} UTC"


def _span(duration_ms: int) -> str:
    if abs(duration_ms) < 10_000:
        return f"{duration_ms / 1000:g} s" if abs(duration_ms) >= 1_000 else f"{duration_ms} ms"
    whole = timedelta(seconds=round(duration_ms / 1000))
    days, seconds = whole.days, whole.seconds
    parts = ((days, "d"), (seconds // 3600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s"))
    told = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(told[:2])
