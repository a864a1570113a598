"""The part of `ledger.verify` that is about people: do approvals and dead letters say what their jobs' events say?

An open question belongs to a job that waits. A decided one that the engine was told of agrees with the event by which
its job went on; one that the job overtook (somebody cancelled it meanwhile) is no fault. A discarded letter has two
different people, a replayed one its new job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

from sqlalchemy import and_, or_, select

from holdfast.core.states import State
from holdfast.ledger.keys import JobKey
from holdfast.ledger.people import ApprovalStatus, LetterStatus
from holdfast.ledger.queries import Snapshot
from holdfast.ledger.schema import approvals, dlq_items, job_events, jobs

_WAITING: Final = State.WAITING_APPROVAL.value
_REQUESTED: Final = ApprovalStatus.REQUESTED.value
#: By these events people's decisions reach a job.
_DECISIONS: Final = {
    ApprovalStatus.APPROVED: {"approval.approved"},
    ApprovalStatus.REJECTED: {"approval.rejected"},
    ApprovalStatus.EXPIRED: {"approval.expired"},
    # Sent back to work without anybody's yes, to be asked for again.
    ApprovalStatus.WITHDRAWN: {"approval.withdrawn", "approval.approved"},
}
_ALL_DECISIONS: Final = frozenset().union(*_DECISIONS.values())

Add = Callable[[JobKey, str], None]


async def check_approvals(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    """Open ones whose jobs do not wait, and decided ones that their jobs know nothing of."""
    a = approvals.c
    of_job = and_(jobs.c.tenant_id == a.tenant_id, jobs.c.job_id == a.job_id, jobs.c.queue == a.queue)
    lost = (
        select(a.tenant_id, a.queue, a.job_id, a.approval_id, jobs.c.state)
        .select_from(approvals.outerjoin(jobs, of_job))
        .where(a.status == _REQUESTED, or_(jobs.c.state.is_(None), jobs.c.state != _WAITING))
    )
    async for row in snapshot.rows(lost if since is None else lost.where(a.requested_at >= since)):
        where = f"it is {row.state}" if row.state is not None else "it is not in the ledger"
        add(_key(row), f"approval {row.approval_id} is open, but {where}")
    await _check_delivered(snapshot, add, since)


async def _check_delivered(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    a, e = approvals.c, job_events.c
    of_job = and_(jobs.c.tenant_id == a.tenant_id, jobs.c.job_id == a.job_id, jobs.c.queue == a.queue)
    leaving = and_(
        *(e.tenant_id == a.tenant_id, e.job_id == a.job_id, e.queue == a.queue),
        *(e.from_state == _WAITING, e.at >= a.requested_at),
    )
    told = (
        select(a.tenant_id, a.queue, a.job_id, a.approval_id, a.status, e.type, jobs.c.state)
        .select_from(approvals.join(jobs, of_job).outerjoin(job_events, leaving))
        .where(a.status != _REQUESTED, a.acked_at.is_not(None))
        .order_by(a.tenant_id, a.approval_id, e.seq)
    )
    last: Any = None
    async for row in snapshot.rows(told if since is None else told.where(a.requested_at >= since)):
        # The first event after the question is the one that answers it.
        if last != (last := (row.tenant_id, row.approval_id)) and (fault := _disagreement(row)):
            add(_key(row), fault)


def _disagreement(row: Any) -> str | None:
    if row.type is None:
        return f"approval {row.approval_id} is {row.status} and delivered, but it still waits ({row.state})"
    if row.type in _ALL_DECISIONS and row.type not in _DECISIONS[ApprovalStatus(row.status)]:
        return f"approval {row.approval_id} is {row.status}, but its events say {row.type}"
    return None


async def check_letters(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    """Letters whose status is not what people did to them."""
    d = dlq_items.c
    touched = select(dlq_items).where(or_(d.status != LetterStatus.OPEN.value, d.replay_pending == 1))
    async for row in snapshot.rows(touched if since is None else touched.where(d.failed_at >= since)):
        for fault in _letter_faults(row):
            add(_key(row), f"dead letter {row.dlq_id} {fault}")


def _letter_faults(row: Any) -> Iterator[str]:
    status = LetterStatus(row.status)
    if row.replay_pending and status is not LetterStatus.REPLAYED:
        yield f"is to be replayed, but is {status}"
    match status:
        case LetterStatus.REPLAYED if not row.replayed_as or row.replay_count < 1:
            yield "is replayed, but has no new job"
        case LetterStatus.DISCARD_REQUESTED if not row.requested_by or row.confirmed_by:
            yield "is to be discarded, but not by one person"
        case LetterStatus.DISCARDED if not row.requested_by or not row.confirmed_by:
            yield "is discarded, but not by two people"
        case LetterStatus.DISCARDED if row.requested_by == row.confirmed_by:
            yield f"is discarded by {row.requested_by} alone"


def _key(row: Any) -> JobKey:
    return JobKey(row.tenant_id, row.queue, row.job_id)
