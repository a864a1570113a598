"""What a guard receives and may decide (requirement A1), and a task's own approval requests (A3).

An approval is bound to a hash of everything that the approvers were shown, so that nothing else can run on it
(`payload_hash`, `request_hash`).

`approval_or_request` serves a task that requests approval during its run: it returns the approval, or ends the run
until there is one. The approval holds for the job as it is and for the details of the request; the same request with
other details is a new one and needs a new decision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from holdfast.core.codec import canonical_json, decode_json, encode_json
from holdfast.core.job import Approval, ApprovalRequest, Claim, new_job_ids
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
class RequireApproval:
    """It may run once people have said yes: `quorum` different ones, within `deadline`, else it is cancelled."""

    reason: str
    quorum: int = 1
    deadline: Duration | None = None

    def __post_init__(self) -> None:
        check_approval_terms(self.reason, self.quorum, self.deadline)


@dataclass(frozen=True, slots=True)
class Deny:
    """It may not run at all."""

    reason: str

    def __post_init__(self) -> None:
        _check_reason(self.reason)


Decision = Allow | RequireApproval | Deny


@dataclass(frozen=True, slots=True)
class Denial:
    """At least one guard says no."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApprovalTerms:
    """Nobody says no, and somebody wants people to decide."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]
    quorum: int
    #: 0: none.
    deadline_ms: int


#: What all guards together say; None: it may run.
Ruling = Denial | ApprovalTerms | None


def combine(decisions: Iterable[tuple[str, Decision]]) -> Ruling:
    """No beats ask beats yes. The largest quorum and the shortest deadline count, whoever wants them."""
    denials, asks = list[tuple[str, Deny]](), list[tuple[str, RequireApproval]]()
    for policy, decision in decisions:
        if isinstance(decision, Deny):
            denials.append((policy, decision))
        elif isinstance(decision, RequireApproval):
            asks.append((policy, decision))
    if denials:
        return Denial(tuple(denial.reason for _, denial in denials), tuple(policy for policy, _ in denials))
    if not asks:
        return None
    deadlines = [deadline_ms(ask.deadline) for _, ask in asks if ask.deadline is not None]
    return ApprovalTerms(
        reasons=tuple(ask.reason for _, ask in asks),
        policies=tuple(policy for policy, _ in asks),
        quorum=max(ask.quorum for _, ask in asks),
        deadline_ms=min(deadlines, default=0),
    )


def check_approval_terms(reason: object, quorum: object, deadline: Duration | None) -> None:
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


def payload_hash(task: str, tenant_id: str, payload: bytes) -> str:
    """Of a job: the same for the same task, tenant and payload, byte by byte, and for no others."""
    return _hash(task.encode(), tenant_id.encode(), payload)


def request_hash(task: str, tenant_id: str, payload: bytes, name: str, details: Any) -> str:
    """Of a task's own question: the job, and what was asked about it. `details` are plain JSON values."""
    return _hash(task.encode(), tenant_id.encode(), payload, name.encode(), canonical_json(details))


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # With its length: "ab" + "c" must not be "a" + "bc".
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


_NAME_LIMIT: Final = 200
#: Details travel with the job and are read by people.
_DETAILS_LIMIT: Final = 64 * 1024


class ApprovalInterrupt(BaseException):
    """Ends the attempt until people have answered. Not an `Exception`, so that a task's own handlers let it pass."""

    def __init__(self, ask: ApprovalRequest) -> None:
        super().__init__(f"waits for the approval {ask.name!r}")
        self.ask = ask


def approval_or_request(
    claim: Claim, name: object, details: Any, *, reason: str, quorum: int, deadline: Duration | None, now_ms: int
) -> Approval:
    """People's yes to exactly this; raises `Asked` if there is none. `InvalidOption` for what cannot be asked."""
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LIMIT or not name.isprintable():
        raise InvalidOption(f"an approval's name must be a text of 1 to {_NAME_LIMIT} characters, got {name!r}")
    check_approval_terms(reason, quorum, deadline)
    what = f"the details of approval {name!r}"
    plain = decode_json(encode_json(details, what, _DETAILS_LIMIT), what)
    shown = request_hash(claim.task, claim.tenant_id, claim.payload, name, plain)
    consent = (claim.meta.consents or {}).get(name)
    if consent is not None and consent.payload_hash == shown:
        return consent
    span_ms = deadline_ms(deadline)
    raise ApprovalInterrupt(
        ApprovalRequest(
            approval_id=new_job_ids(1)[0],
            payload_hash=shown,
            name=name,
            reason=reason,
            quorum=quorum,
            deadline_at_ms=now_ms + span_ms if span_ms else 0,
            requested_by=claim.meta.submitted_by,
            details=plain,
        )
    )


class PayloadDecoder(Protocol):
    """A task's payload decoder."""

    @property
    def decode(self) -> Callable[[bytes], dict[str, Any]]:
        """Raises `InvalidPayload` for arguments that the function does not accept."""
        ...
