"""The state machine: one table of legal moves (requirements S1, S2).

Lua scripts, SQL checks, docs and diagram are generated from `MOVES`; no transition is written down a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from holdfast.errors import InvalidOption, TransitionInvalid


class State(StrEnum):
    """A job's state. `running` means: leased by one worker incarnation."""

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

#: Every legal move; `None` is a job that does not exist yet. All other moves are illegal.
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

#: States in which a job is stored with its whole envelope, apart from the ready jobs.
PARKED: Final = frozenset({_S.SUSPENDED, _S.WAITING_APPROVAL, _S.DLQ_PENDING})

#: States to which an operator can move a job, if the table allows it. The others are left to engine and workers.
OPERATOR_TARGETS: Final = frozenset(State) - {_S.RUNNING, _S.RETRYING, _S.SUCCEEDED}

#: The event that each move adds to the feed, by its target (requirement L2) …
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

#: … and the moves whose event depends on both states.
EVENTS_BY_MOVE: Final[Mapping[tuple[State | None, State], str]] = MappingProxyType(
    {
        (_S.RUNNING, _S.QUEUED): "task.released",
        (_S.SUSPENDED, _S.QUEUED): "task.resumed",
        (_S.WAITING_APPROVAL, _S.QUEUED): "approval.approved",
        (_S.RUNNING, _S.RUNNING): "task.reclaimed",
    }
)

#: Moves with several possible events; the first is the default.
EVENT_CHOICES: Final[Mapping[tuple[State | None, State], tuple[str, ...]]] = MappingProxyType(
    {
        #: Withdrawn: the payload is not the one that was shown, so the guard reviews the job again.
        (_S.WAITING_APPROVAL, _S.QUEUED): ("approval.approved", "approval.withdrawn"),
        (_S.WAITING_APPROVAL, _S.CANCELLED): ("task.cancelled", "approval.rejected", "approval.expired"),
    }
)

#: An operator made a waiting job due now; not a move.
EXPEDITED_EVENT: Final = "task.expedited"

#: Prefix of the audit log's events: what operators did by API or command line. They are not part of a job's history.
OPERATOR_PREFIX: Final = "operator."

#: A long run still holds its lease; not a move. At most one per heartbeat interval.
HEARTBEAT_EVENT: Final = "task.heartbeat"

#: The reconciler restored a job that the engine had lost. The job keeps its state, except that a running one is queued
#: again, because its lease is lost with the engine's data.
RESTORED_EVENT: Final = "task.restored"

#: Written by the projector only: the engine continued from an earlier point than the ledger's (a fail-over to a stale
#: replica, a truncated AOF). Leads from the ledger's state to the engine's; never out of a final state.
FORKED_EVENT: Final = "ledger.forked"

#: An adopted message was a second copy of a known job, or a submission returned the first job under its idempotency key
#: although it is another request; not a move.
DUPLICATE_EVENT: Final = "task.duplicate"
#: In the event's data if task or arguments differ from those of the first job.
ARGUMENTS_DIFFER: Final = "arguments_differ"
COPY_DROPPED: Final = "another message for a known job was dropped"
REQUEST_DROPPED: Final = "another request with this idempotency key was dropped; its task or arguments differ"

#: All events that a job's history can contain.
ALL_EVENTS: Final = frozenset(
    {
        *EVENTS.values(),
        *EVENTS_BY_MOVE.values(),
        *(event for choices in EVENT_CHOICES.values() for event in choices),
        *(EXPEDITED_EVENT, HEARTBEAT_EVENT, RESTORED_EVENT, FORKED_EVENT, DUPLICATE_EVENT),
    }
)


def is_legal(from_state: State | None, to_state: State) -> bool:
    return to_state in MOVES[from_state]


def check_move(job_id: str, from_state: State | None, to_state: State) -> None:
    """Raise `TransitionInvalid` unless the move is legal."""
    if not is_legal(from_state, to_state):
        raise TransitionInvalid(job_id, from_state, to_state)


def event_for(from_state: State | None, to_state: State) -> str:
    """The default event of a move."""
    return EVENTS_BY_MOVE.get((from_state, to_state)) or EVENTS[to_state]


def resolve_event(from_state: State | None, to_state: State, event: str) -> str:
    """Return `event`, or the move's default event if `event` is empty.

    Raises `InvalidOption` if the move cannot have it.
    """
    default = event_for(from_state, to_state)
    if not event or event == default:
        return default
    if event not in EVENT_CHOICES.get((from_state, to_state), ()):
        raise InvalidOption(f"the move {from_state} → {to_state} cannot have the event {event!r}")
    return event


def mermaid_diagram() -> str:
    """The state diagram for the docs."""
    lines = ["stateDiagram-v2"]
    for state, targets in MOVES.items():
        lines += [f"    {state or '[*]'} --> {target}" for target in sorted(targets)]
    lines += [f"    {state} --> [*]" for state in sorted(FINAL)]
    return "\n".join(lines)
