"""The request and the decisions of a guard (requirement A1), and approval requests of tasks (A3).

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

from holdfast.core.codec import canonical_json, to_plain_json
from holdfast.core.job import Approval, ApprovalRequest, Claim, new_job_ids
from holdfast.core.retry import Duration, duration_ms
from holdfast.errors import InvalidOption

#: Largest quorum; also the engine's limit.
MAX_QUORUM: Final = 100
REASON_LIMIT: Final = 2_000

Source = Literal["submit", "claim", "trigger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRequest:
    """A job under review, as its guards see it."""

    task: str
    tenant_id: str
    queue: str
    #: By name, as the task's function gets them, with defaults; plain JSON if the task is not registered here.
    arguments: dict[str, Any]
    #: The encoded arguments, as transmitted.
    payload: bytes
    #: Free JSON of the submitter.
    context: dict[str, Any]
    #: `submit`: not accepted yet. `claim`: accepted but not reviewed, for example a foreign message.
    source: Source
    #: Name of the token of a submission over HTTP; otherwise empty.
    submitted_by: str
    #: Empty if there is none.
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Allow:
    """The job may run. A guard that returns None allows it as well."""


@dataclass(frozen=True, slots=True)
class RequireApproval:
    """The job may run after `quorum` different approvers have approved it.

    If they have not within `deadline`, the job is cancelled.
    """

    reason: str
    quorum: int = 1
    deadline: Duration | None = None

    def __post_init__(self) -> None:
        check_approval_terms(self.reason, self.quorum, self.deadline)


@dataclass(frozen=True, slots=True)
class Deny:
    """The job may not run."""

    reason: str

    def __post_init__(self) -> None:
        _check_reason(self.reason)


Decision = Allow | RequireApproval | Deny


@dataclass(frozen=True, slots=True)
class Denial:
    """At least one guard denies the job."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApprovalTerms:
    """No guard denies the job, and at least one requires approval."""

    reasons: tuple[str, ...]
    policies: tuple[str, ...]
    quorum: int
    #: 0 means no deadline.
    deadline_ms: int


#: Combined decision of all guards; None: the job may run.
Ruling = Denial | ApprovalTerms | None


def combine(decisions: Iterable[tuple[str, Decision]]) -> Ruling:
    """Combine decisions: deny wins over require approval, which wins over allow.

    The largest quorum and the shortest deadline of all guards apply.
    """
    denials, requirements = list[tuple[str, Deny]](), list[tuple[str, RequireApproval]]()
    for policy, decision in decisions:
        if isinstance(decision, Deny):
            denials.append((policy, decision))
        elif isinstance(decision, RequireApproval):
            requirements.append((policy, decision))
    if denials:
        return Denial(tuple(denial.reason for _, denial in denials), tuple(policy for policy, _ in denials))
    if not requirements:
        return None
    deadlines = [deadline_ms(required.deadline) for _, required in requirements if required.deadline is not None]
    return ApprovalTerms(
        reasons=tuple(required.reason for _, required in requirements),
        policies=tuple(policy for policy, _ in requirements),
        quorum=max(required.quorum for _, required in requirements),
        deadline_ms=min(deadlines, default=0),
    )


def check_approval_terms(reason: object, quorum: object, deadline: Duration | None) -> None:
    """Raise `InvalidOption` unless the terms are valid."""
    _check_reason(reason)
    if type(quorum) is not int or not 1 <= quorum <= MAX_QUORUM:
        raise InvalidOption(f"quorum must be a whole number from 1 to {MAX_QUORUM}, got {quorum!r}")
    deadline_ms(deadline)


def deadline_ms(deadline: Duration | None) -> int:
    """Convert a deadline to milliseconds; 0 means none. Raises `InvalidOption`."""
    if deadline is None:
        return 0
    span_ms = duration_ms(deadline, "deadline")
    if span_ms == 0:
        raise InvalidOption("deadline must be greater than 0; omit it to wait without limit")
    return span_ms


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str) or len(reason) > REASON_LIMIT:
        raise InvalidOption(f"a reason must be a string of at most {REASON_LIMIT} characters, got {reason!r}")


def payload_hash(task: str, tenant_id: str, payload: bytes) -> str:
    """Hash of a job's task, tenant and payload bytes."""
    return _hash(task.encode(), tenant_id.encode(), payload)


def request_hash(task: str, tenant_id: str, payload: bytes, name: str, details: Any) -> str:
    """Hash of a task's approval request: the job, the name and the details, which are plain JSON values."""
    return _hash(task.encode(), tenant_id.encode(), payload, name.encode(), canonical_json(details))


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # Length-prefixed, so that "ab" + "c" differs from "a" + "bc".
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


_NAME_LIMIT: Final = 200
#: Details are stored with the job, and approvers read them.
_DETAILS_LIMIT: Final = 64 * 1024


class ApprovalInterrupt(BaseException):
    """Ends the attempt until the request is decided.

    Not an `Exception`, so that a task's handlers do not catch it.
    """

    def __init__(self, request: ApprovalRequest) -> None:
        super().__init__(f"waiting for approval {request.name!r}")
        self.request = request


def approval_or_request(
    claim: Claim, name: object, details: Any, *, reason: str, quorum: int, deadline: Duration | None, now_ms: int
) -> Approval:
    """Return the approval of exactly this request.

    Raises `ApprovalInterrupt` if there is none, and `InvalidOption` for invalid terms.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LIMIT or not name.isprintable():
        raise InvalidOption(f"an approval's name must be a string of 1 to {_NAME_LIMIT} characters, got {name!r}")
    check_approval_terms(reason, quorum, deadline)
    plain = to_plain_json(details, f"the details of approval {name!r}", _DETAILS_LIMIT)
    shown_hash = request_hash(claim.task, claim.tenant_id, claim.payload, name, plain)
    approval = (claim.meta.approvals or {}).get(name)
    if approval is not None and approval.payload_hash == shown_hash:
        return approval
    span_ms = deadline_ms(deadline)
    raise ApprovalInterrupt(
        ApprovalRequest(
            approval_id=new_job_ids(1)[0],
            payload_hash=shown_hash,
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
