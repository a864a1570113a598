"""Explain a job in plain sentences: what happened, why it is in its state, what happens next. Pure.

Reads events in order, from ledger or feed, and the engine's current view of the job if there is one. Every state and
every event type has its sentence; an unknown event is given by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.core.job import Event, approval_data
from holdfast.core.states import (
    ARGUMENTS_DIFFER,
    DUPLICATE_EVENT,
    EXPEDITED_EVENT,
    FORKED_EVENT,
    HEARTBEAT_EVENT,
    RESTORED_EVENT,
    State,
)
from holdfast.core.verdict import RELEASED_FOR_OTHERS
from holdfast.ledger.queries.explain_state import (
    _STATE_SENTENCES,
    JobFacts,
    OperatorAction,
    _disagreement,
    actor_phrase,
    duration_phrase,
    error_of,
    join_names,
    reason_of,
    state_phrase,
    time_phrase,
)


class Explanation(msgspec.Struct, frozen=True):
    """Sentences in reading order."""

    history: list[str]
    reason: list[str]
    next_steps: list[str]

    @property
    def sentences(self) -> list[str]:
        return [*self.history, *self.reason, *self.next_steps]


def explain(events: Sequence[Event], facts: JobFacts) -> Explanation:
    """Explain one job."""
    happened = list(_describe_events(events, facts))
    moves = [event for event in events if event.to_state is not None]
    if not moves:
        return Explanation(happened, ["Its creation is not in the ledger."], [])
    last = moves[-1]
    state = last.to_state
    assert state is not None
    reason, then = _STATE_SENTENCES[state](last, events, facts)
    return Explanation(happened, reason, then + _disagreement(state, facts))


# What happened -------------------------------------------------------------------------------------


def _describe_events(events: Sequence[Event], facts: JobFacts) -> Iterator[str]:
    started_ms, heartbeats = 0, 0
    actions = [action for action in facts.operator_actions if action.type in _OPERATOR_PHRASES]
    if facts.replay_of:
        yield f"It is a replay of job {facts.replay_of}."
    for event in events:
        # A vote and the move that it causes may be in the same millisecond.
        while actions and actions[0].at_ms <= event.at_ms:
            yield _operator_sentence(actions.pop(0))
        if event.type == HEARTBEAT_EVENT:
            # One sentence for all of them, once their number is known.
            heartbeats += 1
            continue
        if heartbeats:
            yield _heartbeat_sentence(heartbeats)
            heartbeats = 0
        if event.from_state is None and event.to_state is not None:
            event = _with_submission(event, facts)
        sentence = _SENTENCES.get(event.type)
        yield sentence(event, event.at_ms - started_ms) if sentence else _unknown(event)
        if event.to_state is State.RUNNING:
            started_ms = event.at_ms
    if heartbeats:
        yield _heartbeat_sentence(heartbeats)
    yield from map(_operator_sentence, actions)


#: Operator actions that no event of the job records.
_OPERATOR_PHRASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "operator.approve": "voted to approve it",
        "operator.reject": "voted to reject it",
        "operator.dlq_replay": "replayed its dead letter",
        "operator.dlq_discard_request": "requested the discard of its dead letter",
        "operator.dlq_discard": "confirmed the discard of its dead letter",
        "operator.dlq_keep": "withdrew the discard of its dead letter",
    }
)


def _operator_sentence(action: OperatorAction) -> str:
    reason = " ".join(action.reason.split())[:200]
    suffix = f" ({reason})" if reason else ""
    return f"{action.actor} {_OPERATOR_PHRASES[action.type]} at {time_phrase(action.at_ms)}{suffix}."


def _heartbeat_sentence(count: int) -> str:
    return f"Its worker sent {count} {'heartbeat' if count == 1 else 'heartbeats'}."


def _with_submission(event: Event, facts: JobFacts) -> Event:
    return msgspec.structs.replace(event, data={"task": facts.task, **(event.data or {}), "arguments": facts.arguments})


def _describe_created(event: Event, _: int) -> str:
    run_at_ms = int((event.data or {}).get("run_at_ms") or 0)
    due = f", no earlier than {time_phrase(run_at_ms)}" if run_at_ms > event.at_ms else ""
    return f"It was submitted at {time_phrase(event.at_ms)}{_call_phrase(event)}{due}."


def _call_phrase(event: Event) -> str:
    """What was submitted."""
    data = event.data or {}
    arguments = f" with {data['arguments']}" if data.get("arguments") else ""
    return f" to run {data['task']}{arguments}" if data.get("task") else ""


def _approval_requested(event: Event, took_ms: int) -> str:
    if event.from_state is None:
        at = time_phrase(event.at_ms)
        return f"It was submitted at {at}{_call_phrase(event)} and needs approval before it can run."
    if event.from_state is State.RUNNING:
        return f"After {duration_phrase(took_ms)} attempt {event.attempt} requested approval and released its worker."
    return f"It was held for approval at {time_phrase(event.at_ms)}{reason_of(event)}."


def _describe_approved(event: Event, _: int) -> str:
    approval = approval_data(event.data, "approval")
    approvers = approval.get("by") if isinstance(approval, dict) else None
    who = f" by {join_names(approvers)}" if approvers else actor_phrase(event)
    return f"It was approved at {time_phrase(event.at_ms)}{who}{reason_of(event)}."


def _withdrawn(event: Event, _: int) -> str:
    return f"The approval request was withdrawn at {time_phrase(event.at_ms)}{reason_of(event)}; it was queued again."


def _describe_rejected(event: Event, _: int) -> str:
    return f"It was rejected at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)} and cancelled."


def _describe_expired(event: Event, _: int) -> str:
    return f"It was not approved in time and was cancelled at {time_phrase(event.at_ms)}."


def _describe_expedited(event: Event, _: int) -> str:
    return f"It was expedited at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _describe_claimed(event: Event, _: int) -> str:
    return f"Attempt {event.attempt} began at {time_phrase(event.at_ms)} on {event.worker or 'an unknown worker'}."


def _describe_reclaimed(event: Event, took_ms: int) -> str:
    old = (event.data or {}).get("old_worker") or "its worker"
    return (
        f"{duration_phrase(took_ms)} later the lease of {old} had expired (crash or lost connection): "
        f"{event.worker or 'another worker'} reclaimed it as attempt {event.attempt}."
    )


def _describe_released(event: Event, took_ms: int) -> str:
    data = event.data or {}
    due_ms = int(data.get("next_attempt_at_ms") or 0)
    if data.get("unknown"):
        return (
            f"The worker cannot run it and released it unstarted ({event.message.removeprefix(RELEASED_FOR_OTHERS)}); "
            f"it is offered again at {time_phrase(due_ms)}."
        )
    if due_ms:
        return (
            f"After {duration_phrase(took_ms)} it was put to sleep until {time_phrase(due_ms)} and released its worker."
        )
    return f"Its worker released it unfinished after {duration_phrase(took_ms)}; it was queued again."


def _describe_succeeded(event: Event, took_ms: int) -> str:
    return f"Attempt {event.attempt} succeeded after {duration_phrase(took_ms)}."


def _retrying(event: Event, took_ms: int) -> str:
    due_ms = int((event.data or {}).get("next_attempt_at_ms") or 0)
    wait = f"; it was to run again at {time_phrase(due_ms)}" if due_ms else ""
    if not (event.data or {}).get("counted", True):
        return (
            f"Attempt {event.attempt} found a dependency down after {duration_phrase(took_ms)}{error_of(event)}{wait}. "
            "This does not use up a retry."
        )
    return f"Attempt {event.attempt} failed after {duration_phrase(took_ms)}{error_of(event)}{wait}."


def _describe_suspended(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING and not actor_phrase(event):
        duration = duration_phrase(took_ms)
        return f"Attempt {event.attempt} failed after {duration}{error_of(event)}, and the job was suspended."
    return f"It was suspended at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _describe_resumed(event: Event, _: int) -> str:
    return (
        f"It was resumed at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}; its retries start again."
    )


def _dlq_pending(event: Event, took_ms: int) -> str:
    if event.from_state is State.RUNNING:
        return f"Attempt {event.attempt} failed for good after {duration_phrase(took_ms)}{error_of(event)}."
    return f"It was dead-lettered at {time_phrase(event.at_ms)}{error_of(event)}."


def _dlq(event: Event, _: int) -> str:
    return f"Its dead letter was written at {time_phrase(event.at_ms)}."


def _describe_failed(event: Event, _: int) -> str:
    return f"It ended as failed at {time_phrase(event.at_ms)}."


def _describe_cancelled(event: Event, _: int) -> str:
    return f"It was cancelled at {time_phrase(event.at_ms)}{actor_phrase(event)}{reason_of(event)}."


def _describe_restored(event: Event, _: int) -> str:
    how = "queued again" if event.from_state is State.RUNNING else f"restored as {state_phrase(event.to_state)}"
    return f"The engine had lost it; at {time_phrase(event.at_ms)} it was {how}, as recorded in the ledger."


def _describe_forked(event: Event, _: int) -> str:
    if event.from_state is event.to_state:
        state = state_phrase(event.to_state)
        where = f"{state} as it was after attempt {event.attempt}, where the ledger had a later point"
    else:
        where = f"{state_phrase(event.to_state)}, where the ledger had it {state_phrase(event.from_state)}"
    return (
        f"At {time_phrase(event.at_ms)} the engine turned out to have lost its latest events "
        f"(a wipe, or an older copy): it continued from {where}."
    )


def _duplicate(event: Event, _: int) -> str:
    if (event.data or {}).get(ARGUMENTS_DIFFER):
        return (
            f"Another request with its idempotency key arrived at {time_phrase(event.at_ms)} and was dropped; its task "
            "or arguments differ."
        )
    return f"A second copy of it arrived at {time_phrase(event.at_ms)} and was dropped."


def _unknown(event: Event) -> str:
    return f"{event.type} at {time_phrase(event.at_ms)}{reason_of(event)}."


_SENTENCES: Final[Mapping[str, Callable[[Event, int], str]]] = MappingProxyType(
    {
        "task.created": _describe_created,
        "approval.requested": _approval_requested,
        "approval.approved": _describe_approved,
        "approval.withdrawn": _withdrawn,
        "approval.rejected": _describe_rejected,
        "approval.expired": _describe_expired,
        EXPEDITED_EVENT: _describe_expedited,
        "task.claimed": _describe_claimed,
        "task.reclaimed": _describe_reclaimed,
        "task.released": _describe_released,
        "task.succeeded": _describe_succeeded,
        "task.retrying": _retrying,
        "task.suspended": _describe_suspended,
        "task.resumed": _describe_resumed,
        "task.dlq_pending": _dlq_pending,
        "task.dlq": _dlq,
        "task.failed": _describe_failed,
        "task.cancelled": _describe_cancelled,
        RESTORED_EVENT: _describe_restored,
        FORKED_EVENT: _describe_forked,
        DUPLICATE_EVENT: _duplicate,
    }
)

#: Every event type that has its own sentence.
KNOWN_EVENTS: Final = frozenset({*_SENTENCES, HEARTBEAT_EVENT})
