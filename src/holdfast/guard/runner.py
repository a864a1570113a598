"""Where guards are asked: at the desk before a job is handed in, and at the worker before one runs that nobody cleared.

At the desk: allowed jobs are marked as cleared, with the hash of what was seen; those that people have to decide about
are handed in on hold, with the question; a denied one is `Denied`, and in the operators' log. At the worker a job that
carries the mark of exactly its own task, tenant and payload is not asked about again.
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

#: How long a denied caller waits for the line in the operators' log.
_RECORD_S: Final = 5.0
#: Jobs that their own submitter wants approved.
_HELD: Final = ApprovalTerms(("its submitter wants it approved",), ("hold",), 1, 0)


class GuardRunner:
    """An app's guards in front of one desk or worker."""

    def __init__(
        self,
        guards: GuardRegistry,
        plans: Mapping[str, PayloadDecoder],
        clock: Clock,
        ledger: Ledger | None,
        *,
        can_ask: bool | None = None,
    ) -> None:
        """Without a ledger nobody can be asked; `can_ask` says otherwise, for tests that look at held jobs."""
        self._guards = guards
        self._plans = plans
        self._clock = clock
        self._ledger = ledger
        #: Whether people's answers have a place to be kept.
        self.can_ask = ledger is not None if can_ask is None else can_ask

    # At the desk -----------------------------------------------------------------------------------

    def applies_to(self, envelope: Envelope) -> bool:
        """Whether it has to be admitted; else it may be handed in as it is."""
        return bool(self._guards) or envelope.hold

    async def review(self, envelope: Envelope, source: Source = "submit") -> Envelope:
        """The envelope as it may be handed in. Raises `Denied`, `GuardFailed`, or `NoLedger` if people must decide."""
        ruling = await self._judge(envelope, source) if self._guards else None
        if isinstance(ruling, Denial):
            await self._deny(envelope, ruling)
            raise Denied(envelope.task, ruling.reasons, ruling.policies)
        if isinstance(ruling, ApprovalTerms):
            self._must_ask(ruling, envelope.task)
            return self._on_hold(envelope, ruling)
        if self._guards:
            meta = msgspec.structs.replace(envelope.meta, cleared=_hash(envelope))
            envelope = msgspec.structs.replace(envelope, meta=meta)
        # Without a ledger, what a submitter holds back is an operator's to move on.
        return self._on_hold(envelope, None) if envelope.hold and self.can_ask else envelope

    async def review_all(self, envelopes: Iterable[Envelope]) -> Iterable[Envelope]:
        """All of them, or the error of the first that may not be handed in: then none is."""
        if not self._guards:
            return (self._on_hold(each, None) if each.hold and self.can_ask else each for each in envelopes)
        return [await self.review(envelope) for envelope in envelopes]

    def _on_hold(self, envelope: Envelope, wanted: ApprovalTerms | None) -> Envelope:
        if envelope.hold:
            wanted = _too(wanted, _HELD)
        assert wanted is not None
        ask = new_approval_request(wanted, _hash(envelope), self._clock.now_ms(), envelope.meta.submitted_by)
        return msgspec.structs.replace(envelope, hold=True, meta=msgspec.structs.replace(envelope.meta, ask=ask))

    async def _deny(self, envelope: Envelope, ruling: Denial) -> None:
        reasons, policies = "; ".join(ruling.reasons), ", ".join(ruling.policies)
        _log.warning("denied: task %s of tenant %s: %s (%s)", envelope.task, envelope.tenant_id, reasons, policies)
        if self._ledger is not None:
            await _record(self._ledger, envelope, ruling)

    def _must_ask(self, wanted: ApprovalTerms, task: str) -> None:
        if not self.can_ask:
            raise NoLedger(f"an approval ({', '.join(wanted.policies)} wants one for task {task!r})")

    # At the worker ---------------------------------------------------------------------------------

    def is_approved(self, claim: Claim) -> bool:
        """Whether it may run without being asked about: it was, and is still the same; or nobody minds anything."""
        cleared = claim.meta.cleared
        if not cleared:
            return not self._guards
        return cleared == payload_hash(claim.task, claim.tenant_id, claim.payload)

    async def review_claim(self, claim: Claim, now_ms: Callable[[], int]) -> ApprovalRequest | Denied | None:
        """What stands between a claimed job and its run. Raises `GuardFailed`, `NoLedger`, or what a guard raised."""
        if not self._guards:
            reason = "its payload is not the one that was cleared, and this worker has no guard that could look at it"
            return Denied(claim.task, (reason,), ())
        ruling = await self._judge(claim, "claim")
        if ruling is None:
            return None
        if isinstance(ruling, Denial):
            return Denied(claim.task, ruling.reasons, ruling.policies)
        self._must_ask(ruling, claim.task)
        hashed = payload_hash(claim.task, claim.tenant_id, claim.payload)
        return new_approval_request(ruling, hashed, now_ms(), claim.meta.submitted_by)

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
        plan = self._plans.get(task)
        if plan is not None:
            return plan.decode(payload)
        arguments = decode_json(payload, f"the payload of task {task!r}")
        if not isinstance(arguments, dict):
            # Nobody here knows which is which: a rule about one of them would be blind.
            raise GuardFailed("arguments", f"task {task!r} is not known here, so its arguments must be sent by name")
        return arguments


def new_approval_request(wanted: ApprovalTerms, hashed: str, now_ms: int, requested_by: str) -> ApprovalRequest:
    """A guard's question about a job."""
    return ApprovalRequest(
        approval_id=new_job_ids(1)[0],
        payload_hash=hashed,
        reason="; ".join(wanted.reasons),
        policies=wanted.policies,
        quorum=wanted.quorum,
        deadline_at_ms=now_ms + wanted.deadline_ms if wanted.deadline_ms else 0,
        requested_by=requested_by,
    )


def _too(wanted: ApprovalTerms | None, other: ApprovalTerms) -> ApprovalTerms:
    if wanted is None:
        return other
    return replace(wanted, reasons=wanted.reasons + other.reasons, policies=wanted.policies + other.policies)


def _hash(envelope: Envelope) -> str:
    return payload_hash(envelope.task, envelope.tenant_id, envelope.payload)


async def _record(ledger: Ledger, envelope: Envelope, ruling: Denial) -> None:
    """Into the operators' log; a ledger that is away changes nothing about the denial."""
    from holdfast.core.principal import AuditEntry

    action = AuditEntry(
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
            await ledger.operators.record_audit([action])
    except (HoldfastError, TimeoutError) as exc:
        _log.error("a denied submission of task %r is not in the operators' log: %s", envelope.task, exc)
