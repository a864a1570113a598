"""Approvals (requirements A2, A3): votes, and delivery of decisions to the waiting job.

A vote is one transaction in the ledger. A decision is then applied to the engine, and the row is marked once the ledger
has recorded the job's move. After a crash in between, upkeep delivers it; delivery can be repeated. An approval is for
what was shown: if the job has changed since, the approval is void, and the guard or the task requests a new one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from holdfast.core.job import Approval, JobInfo, JobKey
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import State
from holdfast.core.verdict import waits_for
from holdfast.engine.port import OperationsPort
from holdfast.errors import ApprovalVoid, Conflict, EngineUnavailable, TransitionInvalid, UnknownJob
from holdfast.guard.decisions import payload_hash, request_hash
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus
from holdfast.operations.access import require_verified

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.operator_filters import ApprovalFilter, ApprovalPage
    from holdfast.ledger.queries.records import EventRow, JobDetail


_log: Final = logging.getLogger("holdfast.guard")

#: Actor of the move when an approval expires.
_CLOCK: Final = "holdfast"
_VOID: Final = "the payload is not the one that was shown"


class ApprovalDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An approval with everything needed to decide about it."""

    approval: ApprovalRow
    #: None: it was pruned from the ledger.
    job: JobDetail | None
    events: list[EventRow]


class ApprovalOperations:
    """Operations on approvals, for one engine and its ledger. One event loop."""

    def __init__(self, engine: OperationsPort, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger

    # Reads -----------------------------------------------------------------------------------------

    async def list(
        self, principal: Principal, filters: ApprovalFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> ApprovalPage:
        """Return a page of approvals of the principal's tenants, newest first."""
        principal.require(Permission.READ)
        from holdfast.ledger.queries.operator_filters import ApprovalFilter

        restricted = (filters or ApprovalFilter()).limited_to(principal.visible_tenants)
        return await self._ledger.queries.approvals(restricted, limit, cursor)

    async def show(self, principal: Principal, approval_id: str) -> ApprovalDetail:
        """Return one approval with its job and the job's history. Raises `NotFound`."""
        principal.require(Permission.READ)
        row = await self._ledger.queries.approval(principal.visible_tenants, approval_id)
        key = JobKey(row.tenant_id, row.queue, row.job_id)
        try:
            job = await self._ledger.queries.job(row.job_id, row.tenant_id, row.queue)
        except UnknownJob:
            job = None
        return ApprovalDetail(approval=row, job=job, events=await self._ledger.queries.events(key))

    # Votes -----------------------------------------------------------------------------------------

    async def vote(self, principal: Principal, approval_id: str, *, approve: bool, reason: str) -> ApprovalRow:
        """Vote and return the approval; if that decides it, the job is moved at once.

        Raises `Forbidden` if the role does not allow it, without a token, or for the principal that requested the
        approval; `NotFound`; `ApprovalVoid` if the job is no longer what was shown; `Conflict` if the approval is
        decided or expired, or the principal has already voted.
        """
        principal.require(Permission.APPROVE)
        require_verified(principal, "an approval")
        row = await self._ledger.queries.approval(principal.visible_tenants, approval_id)
        # A rejection is valid even if the job has changed.
        if approve and row.status is ApprovalStatus.REQUESTED:
            await self._check_unchanged(row)
        row = await self._ledger.operators.vote(
            principal.visible_tenants, approval_id, actor=principal.name, approve=approve, reason=reason
        )
        if row.status is not ApprovalStatus.REQUESTED:
            await self._deliver_or_log(row)
        return row

    async def _check_unchanged(self, row: ApprovalRow) -> None:
        (view,) = await self._engine.get(row.queue, [row.job_id])
        if view is None:
            raise Conflict(
                f"the engine does not have job {row.job_id}; if it was lost it will be restored, retry later"
            )
        if not waits_for(view.state, view.meta, row.approval_id):
            raise Conflict(f"job {row.job_id} is {view.state} and no longer waits for approval {row.approval_id}")
        if _current_hash(view) == row.payload_hash:
            return
        _log.warning("approval %s is void: job %s is not what was shown", row.approval_id, row.job_id)
        await self._ledger.operators.withdraw_approval(row.tenant_id, row.approval_id, _VOID)
        await self._deliver_or_log(await self._ledger.queries.approval([row.tenant_id], row.approval_id))
        raise ApprovalVoid(
            f"approval {row.approval_id} of job {row.job_id} is void: its payload was changed after it was shown; "
            "a new approval will be requested"
        )

    # Delivery to the engine ------------------------------------------------------------------------

    async def expire(self, limit: int) -> int:
        """Expire approvals past their deadline; return how many."""
        rows = await self._ledger.operators.expire_approvals(limit)
        for row in rows:
            _log.info("approval %s of job %s has expired", row.approval_id, row.job_id)
            await self._deliver_or_log(row)
        return len(rows)

    async def deliver_pending(self, limit: int) -> int:
        """Apply decisions to the engine that are not confirmed yet; return how many are confirmed.

        Raises at the end if the engine did not answer for some of them.
        """
        operators, delivered, last = self._ledger.operators, 0, None
        unreachable: dict[str, EngineUnavailable] = {}
        while True:
            rows = await operators.undelivered_approvals(limit, last)
            for row in rows:
                if row.queue in unreachable:
                    continue
                try:
                    delivered += await self._deliver(row)
                except EngineUnavailable as exc:
                    # Other queues may be on a part of the store that answers.
                    unreachable[row.queue] = exc
            if len(rows) < limit:
                break
            last = rows[-1]
        for failure in unreachable.values():
            raise failure
        return delivered

    async def _deliver_or_log(self, row: ApprovalRow) -> None:
        """Deliver the decision; if the engine is unreachable, upkeep delivers it later."""
        try:
            await self._deliver(row)
        except EngineUnavailable as exc:
            _log.warning(
                "approval %s is %s, delivery is retried when the engine answers: %s", row.approval_id, row.status, exc
            )

    async def _deliver(self, row: ApprovalRow) -> bool:
        """Move the job if it still waits for this approval; True once the ledger has recorded the move."""
        (view,) = await self._engine.get(row.queue, [row.job_id])
        if view is not None and waits_for(view.state, view.meta, row.approval_id):
            await self._move(row)
        if not await self._is_recorded(row):
            return False
        await self._ledger.operators.mark_delivered([row])
        return True

    async def _move(self, row: ApprovalRow) -> None:
        to, event, approval = State.CANCELLED, f"approval.{row.status}", None
        match row.status:
            case ApprovalStatus.APPROVED:
                to, approval = State.QUEUED, _approval(row)
            case ApprovalStatus.WITHDRAWN:
                to = State.QUEUED
            case ApprovalStatus.REJECTED | ApprovalStatus.EXPIRED:
                pass
            case ApprovalStatus.REQUESTED:
                return
            case _:
                assert_never(row.status)
        try:
            await self._engine.move(
                row.queue,
                row.job_id,
                to,
                actor=row.decided_by or _CLOCK,
                reason=row.decision_reason or "",
                expected=State.WAITING_APPROVAL,
                event=event,
                approval=approval,
                approval_id=row.approval_id,
            )
        except (UnknownJob, TransitionInvalid) as exc:
            # Another process delivered it first, or the job was cancelled.
            _log.debug("approval %s: %s", row.approval_id, exc)

    async def _is_recorded(self, row: ApprovalRow) -> bool:
        """Whether the ledger has recorded the move.

        Before that, a wipe of the engine would lose the decision.
        """
        if self._ledger.projection is None:
            return True
        try:
            job = await self._ledger.queries.job(row.job_id, row.tenant_id, row.queue)
        except UnknownJob:
            return True
        return job.state is not State.WAITING_APPROVAL


def _current_hash(view: JobInfo) -> str:
    """Return the hash of what an approver of this job would be shown now."""
    request = view.meta.approval_request
    if request is None or not request.name:
        return payload_hash(view.task, view.tenant_id, view.payload)
    return request_hash(view.task, view.tenant_id, view.payload, request.name, request.details)


def _approval(row: ApprovalRow) -> Approval:
    assert row.decided_at is not None
    return Approval(
        approval_id=row.approval_id,
        by=tuple(vote.voter for vote in row.votes if vote.approve),
        at_ms=round(row.decided_at.timestamp() * 1000),
        reason=row.decision_reason or "",
        payload_hash=row.payload_hash,
    )
