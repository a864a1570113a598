"""What a guard is asked, and what it may answer (requirement A1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.core.retry import Duration, duration_ms
from holdfast.errors import InvalidOption

#: As many people as anybody could want; the engine's limit, too.
MAX_QUORUM: Final = 100
REASON_LIMIT: Final = 2_000

Source = Literal["submit", "claim", "trigger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRequest:
    """A job that wants to run, as its guards see it."""

    task: str
    tenant_id: str
    queue: str
    #: By name, as the task's function will get them, defaults included; plain JSON if the task is not known here.
    arguments: dict[str, Any]
    #: As it is on the wire.
    payload: bytes
    #: What the submitter sent along beside the arguments.
    context: dict[str, Any]
    #: `submit`: it is not accepted yet. `claim`: it is there, and nobody has cleared it: a foreign message, say.
    source: Source
    #: Who submitted it over HTTP, by the name of their token; else empty.
    submitted_by: str
    #: Empty if it has none.
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Allow:
    """It may run. The same as None: whatever nobody minds is allowed."""


@dataclass(frozen=True, slots=True)
class AskPeople:
    """It may run once people have said yes: `quorum` different ones, within `deadline`, else it is cancelled."""

    reason: str
    quorum: int = 1
    deadline: Duration | None = None

    def __post_init__(self) -> None:
        check_question(self.reason, self.quorum, self.deadline)


@dataclass(frozen=True, slots=True)
class Deny:
    """It may not run at all."""

    reason: str

    def __post_init__(self) -> None:
        _check_reason(self.reason)


Decision = Allow | AskPeople | Deny


@dataclass(frozen=True, slots=True)
class Refused:
    """At least one guard says no."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Nobody says no, and somebody wants people to decide."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]
    quorum: int
    #: 0: none.
    deadline_ms: int


#: What all guards together say; None: it may run.
Ruling = Refused | Wanted | None


def combine(decisions: Iterable[tuple[str, Decision]]) -> Ruling:
    """No beats ask beats yes. The largest quorum and the shortest deadline count, whoever wants them."""
    denials, asks = list[tuple[str, Deny]](), list[tuple[str, AskPeople]]()
    for policy, decision in decisions:
        if isinstance(decision, Deny):
            denials.append((policy, decision))
        elif isinstance(decision, AskPeople):
            asks.append((policy, decision))
    if denials:
        return Refused(tuple(denial.reason for _, denial in denials), tuple(policy for policy, _ in denials))
    if not asks:
        return None
    deadlines = [deadline_ms(ask.deadline) for _, ask in asks if ask.deadline is not None]
    return Wanted(
        reasons=tuple(ask.reason for _, ask in asks),
        policies=tuple(policy for policy, _ in asks),
        quorum=max(ask.quorum for _, ask in asks),
        deadline_ms=min(deadlines, default=0),
    )


def check_question(reason: object, quorum: object, deadline: Duration | None) -> None:
    """Raise `InvalidOption` for what nobody could be asked."""
    _check_reason(reason)
    if type(quorum) is not int or not 1 <= quorum <= MAX_QUORUM:
        raise InvalidOption(f"quorum must be a whole number from 1 to {MAX_QUORUM}, got {quorum!r}")
    deadline_ms(deadline)


def deadline_ms(deadline: Duration | None) -> int:
    """In milliseconds from now; 0: none."""
    if deadline is None:
        return 0
    span_ms = duration_ms(deadline, "deadline")
    if span_ms == 0:
        raise InvalidOption("deadline must be more than 0; leave it out to wait for ever")
    return span_ms


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str) or len(reason) > REASON_LIMIT:
        raise InvalidOption(f"a reason must be a text of at most {REASON_LIMIT} characters, got {reason!r}")
