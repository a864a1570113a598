"""Approvals (requirements A2, A3): people's answers, and how they reach the job that waits for them.

A vote is one transaction in the ledger. Once it decides, the engine is told, and the row is marked when the ledger has
seen the job go on; whoever dies in between leaves it to upkeep, and telling it twice changes nothing. A yes is for what
was shown: if the job is not that any more, the approval is void, and the guard, or the task, asks anew.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from holdfast.core.job import Approval, JobInfo, JobKey
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import State
from holdfast.core.verdict import waits_for
from holdfast.engine.port import Engine
from holdfast.errors import ApprovalVoid, Conflict, EngineUnavailable, TransitionInvalid, UnknownJob
from holdfast.guard.decisions import payload_hash, request_hash
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus
from holdfast.operations.access import require_verified, visible_tenants

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.operator_filters import ApprovalFilter, ApprovalPage
    from holdfast.ledger.queries.records import EventRow, JobDetail


_log: Final = logging.getLogger("holdfast.guard")

#: Who moves a job for which nobody decided in time.
_CLOCK: Final = "holdfast"
_VOID: Final = "the payload is not the one that was shown"


class ApprovalDetail(msgspec.Struct, frozen=True, kw_only=True):
    """An approval with all that is needed to decide about it."""

    approval: ApprovalRow
    #: None: the ledger has dropped it.
    job: JobDetail | None
    events: list[EventRow]


class ApprovalOperations:
    """For one engine and its ledger. One event loop."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger

    # To look at ------------------------------------------------------------------------------------

    async def list(
        self, person: Principal, wanted: ApprovalFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> ApprovalPage:
        """A page of those of the person's tenants, newest first."""
        person.require(Permission.READ)
        from holdfast.ledger.queries.operator_filters import ApprovalFilter

        seen = (wanted or ApprovalFilter()).limited_to(visible_tenants(person))
        return await self._ledger.queries.approvals(seen, limit, cursor)

    async def show(self, person: Principal, approval_id: str) -> ApprovalDetail:
        """One with its job and the job's whole story. Raises `Unknown`."""
        person.require(Permission.READ)
        row = await self._ledger.queries.approval(visible_tenants(person), approval_id)
        key = JobKey(row.tenant_id, row.queue, row.job_id)
        try:
            job = await self._ledger.queries.job(row.job_id, row.tenant_id, row.queue)
        except UnknownJob:
            job = None
        return ApprovalDetail(approval=row, job=job, events=await self._ledger.queries.events(key))

    # To answer -------------------------------------------------------------------------------------

    async def vote(self, person: Principal, approval_id: str, *, approve: bool, reason: str) -> ApprovalRow:
        """The approval after this person's vote; the job is moved on at once if that decides it.

        Raises `Forbidden` for a role that may not, for somebody without a token (two people must be two) and for
        whoever asked for it, `Unknown`, `ApprovalVoid` if the job is no longer what was shown, and `Conflict` if it is
        decided, or has expired, or this person has voted already.
        """
        person.require(Permission.APPROVE)
        require_verified(person, "an approval")
        row = await self._ledger.queries.approval(visible_tenants(person), approval_id)
        # A no is for whatever the job may be by now.
        if approve and row.status is ApprovalStatus.REQUESTED:
            await self._check_shown(row)
        row = await self._ledger.operators.vote(
            visible_tenants(person), approval_id, person=person.name, approve=approve, reason=reason
        )
        if row.status is not ApprovalStatus.REQUESTED:
            await self._tell(row)
        return row

    async def _check_shown(self, row: ApprovalRow) -> None:
        (view,) = await self._engine.get(row.queue, [row.job_id])
        if view is None:
            raise Conflict(f"the engine has no job {row.job_id} at the moment; if it was lost it will be restored")
        if not waits_for(view.state, view.meta, row.approval_id):
            raise Conflict(
                f"job {row.job_id} is {view.state} and does not wait for approval {row.approval_id} any more"
            )
        if _shown(view) == row.payload_hash:
            return
        _log.warning("approval %s is void: job %s is not what was shown", row.approval_id, row.job_id)
        await self._ledger.operators.withdraw_approval(row.tenant_id, row.approval_id, _VOID)
        await self._tell(await self._ledger.queries.approval([row.tenant_id], row.approval_id))
        raise ApprovalVoid(
            f"job {row.job_id} is not what approval {row.approval_id} has shown: its payload was changed; "
            "it will be asked for again"
        )

    # To carry into the engine ----------------------------------------------------------------------

    async def expire(self, limit: int) -> int:
        """End those that nobody has answered in time; how many."""
        rows = await self._ledger.operators.expire_approvals(limit)
        for row in rows:
            _log.info("approval %s of job %s has expired", row.approval_id, row.job_id)
            await self._tell(row)
        return len(rows)

    async def deliver_pending(self, limit: int) -> int:
        """Tell the engine what has been decided and not been seen to arrive; how many have arrived.

        Raises in the end if the engine did not answer for some of them.
        """
        people, arrived, last = self._ledger.operators, 0, None
        away: dict[str, EngineUnavailable] = {}
        while True:
            rows = await people.undelivered_approvals(limit, last)
            for row in rows:
                if row.queue in away:
                    continue
                try:
                    arrived += await self._deliver(row)
                except EngineUnavailable as exc:
                    # Other queues may be on a part of the store that answers.
                    away[row.queue] = exc
            if len(rows) < limit:
                break
            last = rows[-1]
        for failure in away.values():
            raise failure
        return arrived

    async def _tell(self, row: ApprovalRow) -> None:
        """It is decided, and that stands: an engine that is away is told later."""
        try:
            await self._deliver(row)
        except EngineUnavailable as exc:
            _log.warning("approval %s is %s; the engine is told when it answers: %s", row.approval_id, row.status, exc)

    async def _deliver(self, row: ApprovalRow) -> bool:
        """Move the job on, if it still waits for this; True once that is remembered, and nothing is left to do."""
        (view,) = await self._engine.get(row.queue, [row.job_id])
        if view is not None and waits_for(view.state, view.meta, row.approval_id):
            await self._move(row)
        if not await self._is_remembered(row):
            return False
        await self._ledger.operators.mark_delivered([row])
        return True

    async def _move(self, row: ApprovalRow) -> None:
        to, event, consent = State.CANCELLED, f"approval.{row.status}", None
        match row.status:
            case ApprovalStatus.APPROVED:
                to, consent = State.QUEUED, _consent(row)
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
                consent=consent,
                approval_id=row.approval_id,
            )
        except (UnknownJob, TransitionInvalid) as exc:
            # Somebody else was faster: told it, too, or cancelled the job.
            _log.debug("approval %s: %s", row.approval_id, exc)

    async def _is_remembered(self, row: ApprovalRow) -> bool:
        """Whether the ledger has seen the job go on. Before that an engine that is wiped would forget the answer."""
        if self._ledger.projection is None:
            return True
        try:
            job = await self._ledger.queries.job(row.job_id, row.tenant_id, row.queue)
        except UnknownJob:
            return True
        return job.state is not State.WAITING_APPROVAL


def _shown(view: JobInfo) -> str:
    """The hash of what an approver of this job would have to be shown now."""
    ask = view.meta.ask
    if ask is None or not ask.name:
        return payload_hash(view.task, view.tenant_id, view.payload)
    return request_hash(view.task, view.tenant_id, view.payload, ask.name, ask.details)


def _consent(row: ApprovalRow) -> Approval:
    assert row.decided_at is not None
    return Approval(
        approval_id=row.approval_id,
        by=tuple(vote.person for vote in row.votes if vote.approve),
        at_ms=round(row.decided_at.timestamp() * 1000),
        reason=row.decision_reason or "",
        payload_hash=row.payload_hash,
    )
