"""A job's story in plain sentences: what happened, why it is where it is, what will happen next. Pure.

It reads events in order, as ledger or feed tell them, and, if there is one, what the engine says of the job right now.
Every state and every event has its sentence; an event that nobody here knows is told by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.core.job import Event
from holdfast.core.states import DUPLICATE_EVENT, EXPEDITED_EVENT, FORKED_EVENT, HEARTBEAT_EVENT, RESTORED_EVENT, State
from holdfast.ledger.queries.explain_state import (
    _PRESENT,
    JobFacts,
    OperatorAction,
    _apart,
    actor_phrase,
    duration_phrase,
    error_of,
    join_names,
    reason_of,
    state_phrase,
    time_phrase,
)


class Explanation(msgspec.Struct, frozen=True):
    """Sentences, in the order in which they are to be read."""

    happened: list[str]
    why: list[str]
    then: list[str]

    @property
    def sentences(self) -> list[str]:
        return [*self.happened, *self.why, *self.then]


def explain(events: Sequence[Event], scene: JobFacts) -> Explanation:
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


def _happened(events: Sequence[Event], scene: JobFacts) -> Iterator[str]:
    began_ms, beats = 0, 0
    deeds = [deed for deed in scene.operator_actions if deed.type in _DEEDS]
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


def _deed(deed: OperatorAction) -> str:
    why = " ".join(deed.reason.split())[:200]
    return f"{deed.actor} {_DEEDS[deed.type]} at {time_phrase(deed.at_ms)}{f' ({why})' if why else ''}."


def _beats(count: int) -> str:
    return f"Its worker said {count} {'time' if count == 1 else 'times'} that it was alive."


def _with_submission(event: Event, scene: JobFacts) -> Event:
    return msgspec.structs.replace(event, data={"task": scene.task, **(event.data or {})})


def _created(event: Event, _: int) -> str:
    data = event.data or {}
    what = f" to run {data['task']}" if data.get("task") else ""
    later = int(data.get("run_at_ms") or 0)
    due = f", no earlier than {time_phrase(later)}" if later > event.at_ms else ""
    return f"It was submitted at {time_phrase(event.at_ms)}{what}{due}."


def _approval_requested(event: Event, took_ms: int) -> str:
    if event.from_state is None:
        return f"It was submitted at {time_phrase(event.at_ms)}, and a person has to approve it before it may run."
    if event.from_state is State.RUNNING:
        return (
            f"After {duration_phrase(took_ms)} attempt {event.attempt} "
            "asked for a person's approval and gave its worker back."
        )
    return f"It was held at {time_phrase(event.at_ms)}: a person has to approve it first{reason_of(event)}."


def _approved(event: Event, _: int) -> str:
    consent = (event.data or {}).get("consent")
    people = consent.get("by") if isinstance(consent, dict) else None
    who = f" by {join_names(people)}" if people else actor_phrase(event)
    return f"It was approved at {time_phrase(event.at_ms)}{who}{reason_of(event)}."


def _withdrawn(event: Event, _: int) -> str:
    return f"At {time_phrase(event.at_ms)} the question was withdrawn{reason_of(event)}; the job went back in line."


def _rejected(event: Event, _: int) -> str:
    return f"It was rejected at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}, and so cancelled."


def _expired(event: Event, _: int) -> str:
    return f"Nobody had approved it in time; at {time_phrase(event.at_ms)} it was cancelled."


def _expedited(event: Event, _: int) -> str:
    return f"It was made due at once at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _claimed(event: Event, _: int) -> str:
    return f"Attempt {event.attempt} began at {time_phrase(event.at_ms)} on {event.worker or 'an unknown worker'}."


def _reclaimed(event: Event, took_ms: int) -> str:
    old = (event.data or {}).get("old_worker") or "its worker"
    return (
        f"{duration_phrase(took_ms)} later {old} had lost its lease (it died, or was cut off): "
        f"{event.worker or 'another worker'} took over with attempt {event.attempt}."
    )


def _released(event: Event, took_ms: int) -> str:
    data = event.data or {}
    due_ms = int(data.get("next_attempt_at_ms") or 0)
    if due_ms:
        return (
            f"After {duration_phrase(took_ms)} it went to sleep until {time_phrase(due_ms)} and gave its worker back."
        )
    return f"Its worker gave it back unfinished after {duration_phrase(took_ms)}; it went back in line."


def _succeeded(event: Event, took_ms: int) -> str:
    return f"Attempt {event.attempt} succeeded after {duration_phrase(took_ms)}."


def _retrying(event: Event, took_ms: int) -> str:
    due_ms = int((event.data or {}).get("next_attempt_at_ms") or 0)
    wait = f"; it was to run again at {time_phrase(due_ms)}" if due_ms else ""
    if not (event.data or {}).get("counted", True):
        return (
            f"Attempt {event.attempt} found a dependency down after {duration_phrase(took_ms)}{error_of(event)}{wait}. "
            "That uses up no retry."
        )
    return f"Attempt {event.attempt} failed after {duration_phrase(took_ms)}{error_of(event)}{wait}."


def _suspended(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING and not actor_phrase(event):
        took = duration_phrase(took_ms)
        return f"Attempt {event.attempt} failed after {took}{error_of(event)}, and the job was suspended."
    return f"It was suspended at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _resumed(event: Event, _: int) -> str:
    return (
        f"It was resumed at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}; its retries start again."
    )


def _dlq_pending(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING:
        return f"Attempt {event.attempt} failed for good after {duration_phrase(took_ms)}{error_of(event)}."
    return f"It was given up at {time_phrase(event.at_ms)}{error_of(event)}."


def _dlq(event: Event, _: int) -> str:
    return f"Its dead letter was written at {time_phrase(event.at_ms)}."


def _failed(event: Event, _: int) -> str:
    return f"It ended as failed at {time_phrase(event.at_ms)}."


def _cancelled(event: Event, _: int) -> str:
    return f"It was cancelled at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _restored(event: Event, _: int) -> str:
    where = "back in line" if event.from_state is State.RUNNING else f"back as {state_phrase(event.to_state)}"
    return f"The engine had lost it; at {time_phrase(event.at_ms)} it was put {where}, as the ledger knew it."


def _forked(event: Event, _: int) -> str:
    if event.from_state is event.to_state:
        state = state_phrase(event.to_state)
        where = f"{state} as it was after attempt {event.attempt}, where the ledger had a later point"
    else:
        where = f"{state_phrase(event.to_state)}, where the ledger had it {state_phrase(event.from_state)}"
    return (
        f"At {time_phrase(event.at_ms)} the engine turned out to have forgotten its latest steps "
        f"(a wipe, or an older copy): it went on from {where}."
    )


def _duplicate(event: Event, _: int) -> str:
    return f"A second copy of it came in at {time_phrase(event.at_ms)} and was dropped."


def _unknown(event: Event) -> str:
    return f"{event.type} at {time_phrase(event.at_ms)}{reason_of(event)}."


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
