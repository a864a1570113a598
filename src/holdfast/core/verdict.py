"""From an outcome (what the user's code did) to a verdict (what happens to the job). Pure.

Both are closed unions, matched exhaustively. `judge` is the whole retry policy; `advance` applies a verdict to the
job's `Meta`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Any, Final, assert_never

import msgspec

from holdfast.core.job import Approval, ApprovalRequest, Attempt, Claim, Event, Failure, Meta, append_attempt
from holdfast.core.retry import Retry
from holdfast.core.states import State

#: Failure codes that holdfast itself assigns (`docs/reference/failure-codes.md`).
TASK_ERROR: Final = "TASK_ERROR"
TASK_TIMEOUT: Final = "TASK_TIMEOUT"
TASK_FATAL: Final = "TASK_FATAL"
DEPENDENCY_UNAVAILABLE: Final = "DEPENDENCY_UNAVAILABLE"
UNAVAILABLE_TOO_LONG: Final = "UNAVAILABLE_TOO_LONG"
POISON_PILL: Final = "POISON_PILL"
MESSAGE_MALFORMED: Final = "MESSAGE_MALFORMED"
MESSAGE_GONE: Final = "MESSAGE_GONE"
#: Of a job that was submitted in a transaction: its outbox event is dead, and the engine never had the job.
OUTBOX_DEAD: Final = "OUTBOX_DEAD"
EFFECT_NOT_AWAITED: Final = "EFFECT_NOT_AWAITED"
PROCESS_DIED: Final = "PROCESS_DIED"
CANCELLED: Final = "CANCELLED"
GUARD_DENIED: Final = "GUARD_DENIED"
APPROVAL_REJECTED: Final = "APPROVAL_REJECTED"
APPROVAL_EXPIRED: Final = "APPROVAL_EXPIRED"
DEAD_LETTERED_BY_OPERATOR: Final = "DEAD_LETTERED_BY_OPERATOR"
#: Why an approval request is withdrawn, if no other reason is given.
SUPERSEDED: Final = "the job continued without a decision"


class FailureKind(StrEnum):
    """The kind of a failure; decides whether the job is retried."""

    RETRYABLE = "retryable"
    FATAL = "fatal"
    #: A dependency is down: the job waits and uses up no retry (requirement Y8).
    UNAVAILABLE = "unavailable"
    #: The payload does not fit the task: always a dead letter (requirement Y7).
    INVALID = "invalid"
    #: Only an operator can decide how to continue: always suspended (requirements E2, E4).
    IN_DOUBT = "in_doubt"
    #: Denied by a guard: always a dead letter, never a retry (requirement A1).
    DENIED = "denied"


class OnExhausted(StrEnum):
    """What happens to a job that has used up its retries or failed permanently (requirement Y7)."""

    DEAD_LETTER = "dead_letter"
    SUSPEND = "suspend"


# Outcomes ------------------------------------------------------------------------------------------


class Returned(msgspec.Struct, frozen=True, gc=False):
    """The function returned; `result` is JSON."""

    result: bytes


class Raised(msgspec.Struct, frozen=True):
    """The function raised, timed out, or could not be called."""

    kind: FailureKind
    failure: Failure
    #: The exception, for logs; None if it was not raised in this process.
    error: BaseException | None = None


class Deferred(msgspec.Struct, frozen=True):
    """The attempt ended without a result or a failure: not started, or sleeping until later."""

    message: str
    delay_ms: int = 0
    #: Whether the user's code ran. An unstarted attempt is not used up (requirement S5).
    started: bool = False
    #: The worker does not know the task, or has another schema of it; another worker may run the job.
    unknown: bool = False


class ApprovalNeeded(msgspec.Struct, frozen=True):
    """The task, or a guard, requires approval."""

    message: str
    request: ApprovalRequest | None = None


Outcome = Returned | Raised | Deferred | ApprovalNeeded


# Verdicts ------------------------------------------------------------------------------------------


class Succeed(msgspec.Struct, frozen=True, gc=False):
    """running → succeeded."""

    result: bytes


class RetryLater(msgspec.Struct, frozen=True):
    """running → retrying, due `delay_ms` from the engine's now. `counts`: uses up a retry."""

    delay_ms: int
    failure: Failure
    counts: bool = True


class DeadLetter(msgspec.Struct, frozen=True):
    """running → dlq_pending, then dlq_recorded and failed once the dead letter is recorded."""

    failure: Failure


class Suspend(msgspec.Struct, frozen=True):
    """running → suspended, for an operator to resume or discard."""

    failure: Failure


class Hold(msgspec.Struct, frozen=True):
    """running → waiting_approval."""

    message: str
    request: ApprovalRequest | None = None


class Release(msgspec.Struct, frozen=True):
    """running → queued: the claim is released unfinished."""

    message: str
    delay_ms: int = 0
    started: bool = False
    #: As in `Deferred`; the first such release is the start of the grace time.
    unknown: bool = False

    @property
    def data(self) -> dict[str, Any]:
        """Data of the event."""
        unknown = {"unknown": True} if self.unknown else {}
        return {"message": self.message, "started": self.started, **unknown}


Verdict = Succeed | RetryLater | DeadLetter | Suspend | Hold | Release

#: The state that each verdict leads to, for engines and metrics.
TARGETS: Final[dict[type, State]] = {
    Succeed: State.SUCCEEDED,
    RetryLater: State.RETRYING,
    DeadLetter: State.DLQ_PENDING,
    Suspend: State.SUSPENDED,
    Hold: State.WAITING_APPROVAL,
    Release: State.QUEUED,
}


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """A verdict on a claim, ready for the engine.

    `finished_at_ms` is the worker's estimate of the engine's time.
    """

    claim: Claim
    verdict: Verdict
    finished_at_ms: int


class SettleResult(StrEnum):
    """The engine's answer to a settlement."""

    APPLIED = "applied"
    #: A second copy of a settlement that had already been applied.
    ALREADY = "already"
    #: The lease belongs to another attempt, or the job has ended; nothing was changed.
    STALE = "stale"


def judge(
    claim: Claim,
    outcome: Outcome,
    retry: Retry,
    on_exhausted: OnExhausted,
    random: Random,
    now_ms: Callable[[], int],
) -> Verdict:
    """The verdict for an outcome. The job's own policy takes precedence over the task's."""
    match outcome:
        case Returned(result=result):
            return Succeed(result)
        case Deferred(message=message, delay_ms=delay_ms, started=started, unknown=unknown):
            return Release(message, delay_ms, started, unknown)
        case ApprovalNeeded(message=message, request=request):
            return Hold(message, request)
        case Raised(kind=kind, failure=failure):
            return _judge_failure(claim, kind, failure, retry, on_exhausted, random, now_ms)
        case _:
            assert_never(outcome)


def _judge_failure(
    claim: Claim,
    kind: FailureKind,
    failure: Failure,
    retry: Retry,
    on_exhausted: OnExhausted,
    random: Random,
    now_ms: Callable[[], int],
) -> Verdict:
    meta = claim.meta
    policy = meta.retry or retry
    max_retries = policy.max_retries if meta.max_retries is None else meta.max_retries
    match kind:
        case FailureKind.INVALID | FailureKind.DENIED:
            return DeadLetter(failure)
        case FailureKind.IN_DOUBT:
            return Suspend(failure)
        case FailureKind.FATAL:
            pass
        case FailureKind.UNAVAILABLE:
            deadline_ms = policy.unavailable_deadline_ms
            waited_ms = now_ms() - meta.unavailable_since_ms if meta.unavailable_since_ms else 0
            if deadline_ms is None or waited_ms < deadline_ms:
                return RetryLater(policy.delay_ms(meta.unavailable_count + 1, random), failure, counts=False)
            failure = msgspec.structs.replace(failure, code=UNAVAILABLE_TOO_LONG)
        case FailureKind.RETRYABLE:
            if meta.retry_count < max_retries:
                return RetryLater(policy.delay_ms(meta.retry_count + 1, random), failure)
        case _:
            assert_never(kind)
    return Suspend(failure) if on_exhausted is OnExhausted.SUSPEND else DeadLetter(failure)


#: Bounds of the delay after which a job is offered again that a worker does not know.
UNKNOWN_MIN_MS: Final = 1_000
UNKNOWN_MAX_MS: Final = 30_000
#: How the message of such a release begins.
RELEASED_FOR_OTHERS: Final = "released for another worker: "


def defer_unknown(claim: Claim, refusal: Raised, grace_ms: int) -> Deferred | Raised:
    """The outcome of a job that this worker cannot run, but another worker may.

    It is deferred by a quarter of the time that it has waited already, 1 s to 30 s: it is offered about 16 times in the
    first minute, so that it soon meets a worker that knows it. After the grace time, counted from the first worker that
    did not know it, the outcome is `refusal`.
    """
    waited_ms = max(0, claim.claimed_at_ms - claim.meta.unknown_since_ms) if claim.meta.unknown_since_ms else 0
    if waited_ms >= grace_ms:
        return refusal
    delay_ms = min(max(waited_ms // 4, UNKNOWN_MIN_MS), UNKNOWN_MAX_MS, grace_ms - waited_ms)
    return Deferred(RELEASED_FOR_OTHERS + refusal.failure.message, delay_ms, unknown=True)


def advance(claim: Claim, verdict: Verdict, finished_at_ms: int) -> Meta:
    """The job's `Meta` after this verdict: counters and history (requirement Y6)."""
    meta = claim.meta
    # A new message starts at one delivery, so leases lost on this one are added here.
    lost = meta.lost_leases + claim.lease.deliveries - 1
    if isinstance(verdict, Release) and not verdict.started:
        since_ms = meta.unknown_since_ms or (claim.claimed_at_ms if verdict.unknown else 0)
        return msgspec.structs.replace(meta, lost_leases=lost, unknown_since_ms=since_ms)
    failure = verdict.failure if isinstance(verdict, RetryLater | DeadLetter | Suspend) else None
    attempt = Attempt(
        claim.attempt,
        claim.lease.worker,
        claim.claimed_at_ms,
        finished_at_ms,
        TARGETS[type(verdict)].value,
        failure,
    )
    retry_count, unavailable_count, unavailable_since_ms = meta.retry_count, 0, 0
    if isinstance(verdict, RetryLater):
        if verdict.counts:
            retry_count += 1
        else:
            unavailable_count = meta.unavailable_count + 1
            unavailable_since_ms = meta.unavailable_since_ms or claim.claimed_at_ms
    return msgspec.structs.replace(
        meta,
        lost_leases=lost,
        retry_count=retry_count,
        unavailable_count=unavailable_count,
        unavailable_since_ms=unavailable_since_ms,
        unknown_since_ms=0,
        history=append_attempt(meta.history, attempt),
        approval_request=verdict.request if isinstance(verdict, Hold) else None,
    )


def poison_pill(lost_alone: int) -> Failure:
    """The failure of a job that has ended this many workers in which no other job ran (requirement Q7)."""
    return Failure(POISON_PILL, f"{lost_alone} workers ended while they ran only this job; it may be what ends them")


def waits_for(state: State, meta: Meta, approval_id: str) -> bool:
    """Whether a job in this state waits for that approval; always true if the id is empty."""
    if not approval_id:
        return True
    request = meta.approval_request
    return state is State.WAITING_APPROVAL and request is not None and request.approval_id == approval_id


def with_approval(meta: Meta, approval: Approval | None) -> Meta:
    """The `Meta` of a job that leaves `waiting_approval`, approved or (None) with its request withdrawn."""
    request = meta.approval_request
    # An approval of another request (an older one, delivered twice) does not count: this one is requested again.
    if request is None or approval is None or approval.approval_id != request.approval_id:
        return msgspec.structs.replace(meta, approval_request=None)
    if not request.name:
        return msgspec.structs.replace(meta, approval_request=None, approved_hash=request.payload_hash)
    approvals = {**(meta.approvals or {}), request.name: approval}
    return msgspec.structs.replace(meta, approval_request=None, approvals=approvals)


def with_retries_reset(meta: Meta) -> Meta:
    """The `Meta` of a suspended job that is resumed: counters reset, history kept (requirement D6)."""
    return msgspec.structs.replace(
        meta, retry_count=0, lost_leases=0, unavailable_count=0, unavailable_since_ms=0, unknown_since_ms=0
    )


#: Failure codes of jobs that were cancelled in `waiting_approval`, by event.
_APPROVAL_CODES: Final = {"approval.rejected": APPROVAL_REJECTED, "approval.expired": APPROVAL_EXPIRED}


def failure_of_event(event: Event) -> Failure | None:
    """The failure that an event states, or the operator's reason for cancelling the job."""
    data = event.data or {}
    if data.get("code"):
        return Failure(*(str(data.get(name) or "") for name in ("code", "message", "type", "stack")))
    if event.to_state is not State.CANCELLED:
        return None
    # Events of earlier releases on Redis do not state the failure.
    actor, reason = str(data.get("actor") or "unknown"), str(data.get("reason") or "")
    return operator_failure(State.CANCELLED, actor, reason, event.type)


def operator_failure(to: State, actor: str, reason: str, event: str = "") -> Failure:
    """The failure of a job that an operator ended; `event` is the move's event, if it can have several."""
    code = _APPROVAL_CODES.get(event, CANCELLED) if to is State.CANCELLED else DEAD_LETTERED_BY_OPERATOR
    return Failure(code, f"{reason or 'no reason given'} (by {actor})")
