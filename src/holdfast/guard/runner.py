"""Run guards: before a job is submitted, and before a worker runs a job that was not reviewed.

At submission an allowed job is marked as cleared, with the hash of what was reviewed. A job that requires approval is
submitted on hold, with the approval request. A denied job raises `Denied` and leaves an audit entry. At the worker, a
job whose mark matches its task, tenant and payload is not reviewed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.clock import Clock
from holdfast.core.codec import decode_json
from holdfast.core.job import ApprovalRequest, Claim, Envelope, new_job_ids
from holdfast.errors import Denied, GuardFailed, HoldfastError, NoLedger
from holdfast.guard.decisions import ApprovalTerms, Denial, GuardRequest, PayloadDecoder, Ruling, Source, payload_hash
from holdfast.guard.registry import GuardRegistry

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger


_log: Final = logging.getLogger("holdfast.guard")

#: How long a denied caller waits for the audit entry.
_RECORD_S: Final = 5.0
#: Terms for jobs that their submitter holds for approval.
_HOLD_TERMS: Final = ApprovalTerms(("the submitter requires approval",), ("hold",), 1, 0)


class GuardRunner:
    """Runs an app's guards for one submitter or worker."""

    def __init__(
        self,
        guards: GuardRegistry,
        specs: Mapping[str, PayloadDecoder],
        clock: Clock,
        ledger: Ledger | None,
        *,
        can_request_approval: bool | None = None,
    ) -> None:
        """Approval requests need a ledger; `can_request_approval` overrides that, for tests of held jobs."""
        self._guards = guards
        self._specs = specs
        self._clock = clock
        self._ledger = ledger
        #: Whether approval requests and votes can be stored.
        self.can_request_approval = ledger is not None if can_request_approval is None else can_request_approval

    # At submission ---------------------------------------------------------------------------------

    def applies_to(self, envelope: Envelope) -> bool:
        """Whether the envelope must be reviewed; otherwise it may be submitted unchanged."""
        return bool(self._guards.registered) or envelope.hold

    async def review(self, envelope: Envelope, source: Source = "submit") -> Envelope:
        """Review an envelope; returns the one to submit.

        Raises `Denied`, `GuardFailed`, or `NoLedger` if approval is required.
        """
        ruling = await self._judge(envelope, source) if self._guards.registered else None
        if isinstance(ruling, Denial):
            await self._deny(envelope, ruling)
            raise Denied(envelope.task, ruling.reasons, ruling.policies)
        if isinstance(ruling, ApprovalTerms):
            self._require_approvals(ruling, envelope.task)
            return self._hold(envelope, ruling)
        if self._guards.registered:
            meta = msgspec.structs.replace(envelope.meta, approved_hash=_hash(envelope))
            envelope = msgspec.structs.replace(envelope, meta=meta)
        # Without a ledger there is no approval request: an operator resumes a job that its submitter holds.
        return self._hold(envelope, None) if envelope.hold and self.can_request_approval else envelope

    async def review_all(self, envelopes: Iterable[Envelope]) -> Iterable[Envelope]:
        """Review all envelopes. Raises the error of the first that may not be submitted; then none is."""
        if not self._guards.registered:
            return (self._hold(each, None) if each.hold and self.can_request_approval else each for each in envelopes)
        return [await self.review(envelope) for envelope in envelopes]

    def _hold(self, envelope: Envelope, terms: ApprovalTerms | None) -> Envelope:
        if envelope.hold:
            terms = _add_terms(terms, _HOLD_TERMS)
        assert terms is not None
        request = new_approval_request(terms, _hash(envelope), self._clock.now_ms(), envelope.meta.submitted_by)
        return msgspec.structs.replace(
            envelope, hold=True, meta=msgspec.structs.replace(envelope.meta, approval_request=request)
        )

    async def _deny(self, envelope: Envelope, ruling: Denial) -> None:
        reasons, policies = "; ".join(ruling.reasons), ", ".join(ruling.policies)
        _log.warning("denied task %s of tenant %s: %s (%s)", envelope.task, envelope.tenant_id, reasons, policies)
        if self._ledger is not None:
            await _record(self._ledger, envelope, ruling)

    def _require_approvals(self, terms: ApprovalTerms, task: str) -> None:
        if not self.can_request_approval:
            raise NoLedger(f"an approval (required by {', '.join(terms.policies)} for task {task!r})")

    # At the worker ---------------------------------------------------------------------------------

    def is_approved(self, claim: Claim) -> bool:
        """Whether a claim may run without review: it was cleared and is unchanged, or there are no guards."""
        cleared = claim.meta.approved_hash
        if not cleared:
            return not self._guards.registered
        return cleared == payload_hash(claim.task, claim.tenant_id, claim.payload)

    async def review_claim(self, claim: Claim, now_ms: Callable[[], int]) -> ApprovalRequest | Denied | None:
        """Review a claimed job; None if it may run. Raises `GuardFailed`, `NoLedger`, or what a guard raised."""
        if not self._guards.registered:
            reason = "its payload is not the one that was cleared, and this worker has no guards to review it"
            return Denied(claim.task, (reason,), ())
        ruling = await self._judge(claim, "claim")
        if ruling is None:
            return None
        if isinstance(ruling, Denial):
            return Denied(claim.task, ruling.reasons, ruling.policies)
        self._require_approvals(ruling, claim.task)
        job_hash = payload_hash(claim.task, claim.tenant_id, claim.payload)
        return new_approval_request(ruling, job_hash, now_ms(), claim.meta.submitted_by)

    async def _judge(self, job: Envelope | Claim, source: Source) -> Ruling:
        return await self._guards.judge(
            GuardRequest(
                task=job.task,
                tenant_id=job.tenant_id,
                queue=job.queue,
                arguments=self._arguments(job.task, job.payload),
                payload=job.payload,
                context=job.meta.context or {},
                source=source,
                submitted_by=job.meta.submitted_by,
                idempotency_key=job.idempotency_key,
            )
        )

    def _arguments(self, task: str, payload: bytes) -> dict[str, Any]:
        spec = self._specs.get(task)
        if spec is not None:
            return spec.decode(payload)
        arguments = decode_json(payload, f"the payload of task {task!r}")
        if not isinstance(arguments, dict):
            # Without the task's signature, positional arguments have no names that a guard could check.
            raise GuardFailed(
                "arguments", f"task {task!r} is not registered here, so its arguments must be passed by name"
            )
        return arguments


def new_approval_request(terms: ApprovalTerms, job_hash: str, now_ms: int, requested_by: str) -> ApprovalRequest:
    """Create a guard's approval request for a job."""
    return ApprovalRequest(
        approval_id=new_job_ids(1)[0],
        payload_hash=job_hash,
        reason="; ".join(terms.reasons),
        policies=terms.policies,
        quorum=terms.quorum,
        deadline_at_ms=now_ms + terms.deadline_ms if terms.deadline_ms else 0,
        requested_by=requested_by,
    )


def _add_terms(terms: ApprovalTerms | None, other: ApprovalTerms) -> ApprovalTerms:
    if terms is None:
        return other
    return replace(terms, reasons=terms.reasons + other.reasons, policies=terms.policies + other.policies)


def _hash(envelope: Envelope) -> str:
    return payload_hash(envelope.task, envelope.tenant_id, envelope.payload)


async def _record(ledger: Ledger, envelope: Envelope, ruling: Denial) -> None:
    """Write an audit entry; an unreachable ledger does not change the denial."""
    from holdfast.core.principal import AuditEntry

    entry = AuditEntry(
        type="guard.denied",
        actor=envelope.meta.submitted_by,
        tenant_id=envelope.tenant_id,
        target="task",
        target_id=envelope.task,
        queue=envelope.queue,
        reason="; ".join(ruling.reasons),
        after={"policies": list(ruling.policies), "payload_hash": _hash(envelope)},
    )
    try:
        async with asyncio.timeout(_RECORD_S):
            await ledger.operators.record_audit([entry])
    except (HoldfastError, TimeoutError) as exc:
        _log.error("denied submission of task %r not recorded in the audit log: %s", envelope.task, exc)
