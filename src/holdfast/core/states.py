"""The state machine: one table, the only truth (requirements S1, S2).

Lua scripts, SQL checks, docs and diagram are generated from `MOVES`; nothing types a transition again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from holdfast.errors import InvalidOption, TransitionInvalid


class State(StrEnum):
    """Where a job is. `running` means: leased by one worker incarnation."""

    QUEUED = "queued"
    WAITING_APPROVAL = "waiting_approval"
    RUNNING = "running"
    RETRYING = "retrying"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    DLQ_PENDING = "dlq_pending"
    DLQ_RECORDED = "dlq_recorded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = State

#: Every legal move; `None` is "not there yet". What is not here is illegal.
MOVES: Final[Mapping[State | None, frozenset[State]]] = MappingProxyType(
    {
        None: frozenset({_S.QUEUED, _S.WAITING_APPROVAL}),
        _S.QUEUED: frozenset({_S.RUNNING, _S.WAITING_APPROVAL, _S.DLQ_PENDING, _S.SUSPENDED, _S.CANCELLED}),
        _S.WAITING_APPROVAL: frozenset({_S.QUEUED, _S.CANCELLED}),
        _S.RUNNING: frozenset(
            {
                _S.SUCCEEDED,
                _S.RETRYING,
                _S.DLQ_PENDING,
                _S.SUSPENDED,
                _S.WAITING_APPROVAL,
                _S.QUEUED,
                _S.CANCELLED,
            }
        ),
        _S.RETRYING: frozenset({_S.RUNNING, _S.DLQ_PENDING, _S.SUSPENDED, _S.CANCELLED}),
        _S.SUSPENDED: frozenset({_S.QUEUED, _S.CANCELLED}),
        _S.DLQ_PENDING: frozenset({_S.DLQ_RECORDED}),
        _S.DLQ_RECORDED: frozenset({_S.FAILED}),
        _S.SUCCEEDED: frozenset(),
        _S.FAILED: frozenset(),
        _S.CANCELLED: frozenset(),
    }
)

#: States that never change again.
FINAL: Final = frozenset(state for state, targets in MOVES.items() if state is not None and not targets)

#: States in which a job is kept aside with its whole envelope, not in the line.
PARKED: Final = frozenset({_S.SUSPENDED, _S.WAITING_APPROVAL, _S.DLQ_PENDING})

#: Where a person can send a job, if the table agrees. Only engine and workers can run, retry or succeed.
OPERATOR_TARGETS: Final = frozenset(State) - {_S.RUNNING, _S.RETRYING, _S.SUCCEEDED}

#: The event each move leaves in the feed, by its target (requirement L2) …
EVENTS: Final[Mapping[State, str]] = MappingProxyType(
    {
        _S.QUEUED: "task.created",
        _S.WAITING_APPROVAL: "approval.requested",
        _S.RUNNING: "task.claimed",
        _S.RETRYING: "task.retrying",
        _S.SUSPENDED: "task.suspended",
        _S.SUCCEEDED: "task.succeeded",
        _S.DLQ_PENDING: "task.dlq_pending",
        _S.DLQ_RECORDED: "task.dlq",
        _S.FAILED: "task.failed",
        _S.CANCELLED: "task.cancelled",
    }
)

#: … and the moves whose target alone does not tell what happened.
EVENTS_BY_MOVE: Final[Mapping[tuple[State | None, State], str]] = MappingProxyType(
    {
        (_S.RUNNING, _S.QUEUED): "task.released",
        (_S.SUSPENDED, _S.QUEUED): "task.resumed",
        (_S.WAITING_APPROVAL, _S.QUEUED): "approval.approved",
        (_S.RUNNING, _S.RUNNING): "task.reclaimed",
    }
)

#: Moves that several things can bring about: the first is the one that is meant unless the mover says otherwise.
EVENT_CHOICES: Final[Mapping[tuple[State | None, State], tuple[str, ...]]] = MappingProxyType(
    {
        #: Withdrawn: the payload is not the one that was shown; the guard sees the job again.
        (_S.WAITING_APPROVAL, _S.QUEUED): ("approval.approved", "approval.withdrawn"),
        (_S.WAITING_APPROVAL, _S.CANCELLED): ("task.cancelled", "approval.rejected", "approval.expired"),
    }
)

#: A person made a waiting job due at once; beside its moves.
EXPEDITED_EVENT: Final = "task.expedited"

#: What a person did through the API or a tool begins with this; such events are the operators' log, not a job's story.
OPERATOR_PREFIX: Final = "operator."

#: A long job is alive; beside its moves, at most one per heartbeat interval.
HEARTBEAT_EVENT: Final = "task.heartbeat"

#: The reconciler put back a job that the engine had lost. It keeps its state; a running one, whose lease is gone
#: with the engine's memory, goes back in line.
RESTORED_EVENT: Final = "task.restored"

#: Written by the projector alone: the engine's story went on from an earlier point than the ledger's (a fail-over to a
#: stale replica, a cut AOF). From the ledger's state to the one that the engine is in; never out of a final state.
FORKED_EVENT: Final = "ledger.forked"

#: Adopted messages that turn out to be a second copy of a known job leave this beside the job's moves.
DUPLICATE_EVENT: Final = "task.duplicate"

#: All that can be in a job's story.
ALL_EVENTS: Final = frozenset(
    {
        *EVENTS.values(),
        *EVENTS_BY_MOVE.values(),
        *(event for choices in EVENT_CHOICES.values() for event in choices),
        *(EXPEDITED_EVENT, HEARTBEAT_EVENT, RESTORED_EVENT, FORKED_EVENT, DUPLICATE_EVENT),
    }
)


def is_legal(from_state: State | None, to_state: State) -> bool:
    """Whether the table knows this move."""
    return to_state in MOVES[from_state]


def check_move(job_id: str, from_state: State | None, to_state: State) -> None:
    """Raise `TransitionInvalid` unless the table knows this move."""
    if not is_legal(from_state, to_state):
        raise TransitionInvalid(job_id, from_state, to_state)


def event_for(from_state: State | None, to_state: State) -> str:
    """The name of the event that this move leaves."""
    return EVENTS_BY_MOVE.get((from_state, to_state)) or EVENTS[to_state]


def resolve_event(from_state: State | None, to_state: State, wanted: str) -> str:
    """The event of a move whose maker says what it means; `InvalidOption` if it can not mean that."""
    usual = event_for(from_state, to_state)
    if not wanted or wanted == usual:
        return usual
    if wanted not in EVENT_CHOICES.get((from_state, to_state), ()):
        raise InvalidOption(f"a move {from_state} → {to_state} is no {wanted!r}")
    return wanted


def mermaid_diagram() -> str:
    """The state diagram for the docs."""
    lines = ["stateDiagram-v2"]
    for state, targets in MOVES.items():
        lines += [f"    {state or '[*]'} --> {target}" for target in sorted(targets)]
    lines += [f"    {state} --> [*]" for state in sorted(FINAL)]
    return "\n".join(lines)
