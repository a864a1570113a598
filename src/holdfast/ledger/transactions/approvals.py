"""Transactions on approvals: votes, deadlines, and decisions the engine has not applied yet (A2, A3).

A vote locks the approval's row first, so that concurrent votes are serialised.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Executable, Update, insert, select, tuple_, update

from holdfast.core.principal import AuditEntry, fold_name
from holdfast.core.text import clean
from holdfast.errors import Conflict, Forbidden
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus, VoteRow
from holdfast.ledger.transactions.base import NOW, ClockRead, Row, SqlTransaction, chunks, insert_audit, lock_row
from holdfast.schema import approval_votes, approvals
from holdfast.schema.columns import tenants_of

_REQUESTED = ApprovalStatus.REQUESTED.value
_EXPIRED = "no decision before the deadline"
#: Word for word the predicates of the indexes.
_HAS_DEADLINE = (approvals.c.status == _REQUESTED, approvals.c.deadline.is_not(None))
_UNDELIVERED = (approvals.c.acked_at.is_(None), approvals.c.decided_at.is_not(None))


def vote(
    tenants: Sequence[str] | None, approval_id: str, *, actor: str, approve: bool, reason: str
) -> SqlTransaction[ApprovalRow]:
    row = yield from lock_row(approvals, approvals.c.approval_id, "approval", approval_id, tenants)
    now = yield NOW
    if row["status"] != _REQUESTED:
        raise Conflict(f"approval {approval_id} is already {row['status']}; voting is closed")
    if row["deadline"] is not None and row["deadline"] <= now:
        yield _decide_row(row, ApprovalStatus.EXPIRED, now)
        return Conflict(f"approval {approval_id} has expired and the job is cancelled; submit it again")
    if row["requested_by"] and fold_name(row["requested_by"]) == fold_name(clean(actor)):
        raise Forbidden(f"{actor} requested approval {approval_id}; another person has to vote")
    cast = (yield from _votes([row]))[0]
    if any(fold_name(earlier.voter) == fold_name(clean(actor)) for earlier in cast):
        raise Conflict(f"{actor} has already voted on approval {approval_id}; another person has to vote")
    yield insert(approval_votes).values(
        tenant_id=row["tenant_id"],
        approval_id=row["approval_id"],
        voter=actor,
        approve=int(approve),
        reason=reason,
        at=now,
    )
    status = ApprovalStatus.REQUESTED
    if not approve:
        status = ApprovalStatus.REJECTED
    elif len(cast) + 1 >= row["quorum"]:
        # A rejection would have decided it, so all earlier votes approve.
        status = ApprovalStatus.APPROVED
    if status is not ApprovalStatus.REQUESTED:
        yield _decide_row(row, status, now, actor, reason)
    yield insert_audit([_vote_entry(row, actor, approve, reason, status)], now)
    return (yield from _reread(row))


def withdraw(tenant_id: str, approval_id: str, reason: str) -> SqlTransaction[None]:
    now = yield NOW
    yield _deciding(ApprovalStatus.WITHDRAWN, now, None, reason).where(
        approvals.c.tenant_id == tenant_id, approvals.c.approval_id == approval_id
    )
    return None


def is_overdue() -> SqlTransaction[bool]:
    """Whether any approval is past its deadline. Reads only."""
    now = yield NOW
    for tenant in (yield tenants_of(approvals, *_HAS_DEADLINE)):
        mine = approvals.c.tenant_id == tenant["tenant_id"]
        if (yield select(approvals.c.approval_id).where(mine, *_HAS_DEADLINE, approvals.c.deadline <= now).limit(1)):
            return True
    return False


def expire(limit: int) -> SqlTransaction[list[ApprovalRow]]:
    now = yield NOW
    due: list[Row] = []
    for tenant in (yield tenants_of(approvals, *_HAS_DEADLINE)):
        if len(due) < limit:
            mine = approvals.c.tenant_id == tenant["tenant_id"]
            due += yield (
                select(approvals)
                .where(mine, *_HAS_DEADLINE, approvals.c.deadline <= now)
                .order_by(approvals.c.deadline)
                .limit(limit - len(due))
                # A locked row is being voted on; that transaction expires it.
                .with_for_update(skip_locked=True)
            )
    for row in due:
        yield _decide_row(row, ApprovalStatus.EXPIRED, now)
    changed = {
        "status": ApprovalStatus.EXPIRED.value,
        "decided_at": now,
        "decision_reason": _EXPIRED,
    }
    return (yield from _with_votes([{**row, **changed} for row in due]))


def find_undelivered(limit: int, after: ApprovalRow | None) -> SqlTransaction[list[ApprovalRow]]:
    position = tuple_(approvals.c.tenant_id, approvals.c.decided_at, approvals.c.approval_id)
    query = select(approvals).where(*_UNDELIVERED)
    if after is not None:
        query = query.where(position > tuple_(after.tenant_id, after.decided_at, after.approval_id))
    rows = yield query.order_by(*position.clauses).limit(limit)
    return (yield from _with_votes(rows))


def mark_delivered(rows: Sequence[ApprovalRow]) -> SqlTransaction[None]:
    now = yield NOW
    for chunk in chunks(rows):
        yield (
            update(approvals)
            .where(_has_id([(row.tenant_id, row.approval_id) for row in chunk]), *_UNDELIVERED)
            .values(acked_at=now)
        )
    return None


def mark_undelivered(queue: str, since_ms: int) -> SqlTransaction[int]:
    now = yield NOW
    undelivered_rows: list[Row] = yield (
        update(approvals)
        .where(
            approvals.c.queue == queue,
            approvals.c.acked_at > now - timedelta(milliseconds=since_ms),
            approvals.c.decided_at.is_not(None),
        )
        .values(acked_at=None)
        .returning(approvals.c.approval_id)
    )
    return len(undelivered_rows)


def _vote_entry(row: Row, actor: str, approve: bool, reason: str, status: ApprovalStatus) -> AuditEntry:
    return AuditEntry(
        type="operator.approve" if approve else "operator.reject",
        actor=actor,
        tenant_id=row["tenant_id"],
        target="approval",
        target_id=row["approval_id"],
        queue=row["queue"],
        reason=reason,
        before={"status": row["status"]},
        after={"status": status.value, "job_id": row["job_id"], "payload_hash": row["payload_hash"]},
    )


def _deciding(status: ApprovalStatus, now: datetime, actor: str | None, reason: str) -> Update:
    return (
        update(approvals)
        .where(approvals.c.status == _REQUESTED)
        .values(status=status.value, decided_by=actor, decided_at=now, decision_reason=reason)
    )


def _decide_row(
    row: Row,
    status: ApprovalStatus,
    now: datetime,
    actor: str | None = None,
    reason: str = _EXPIRED,
) -> Executable:
    return _deciding(status, now, actor, reason).where(
        approvals.c.tenant_id == row["tenant_id"], approvals.c.approval_id == row["approval_id"]
    )


def _reread(row: Row) -> Generator[Executable | ClockRead, Any, ApprovalRow]:
    rows = yield select(approvals).where(_has_id([(row["tenant_id"], row["approval_id"])]))
    return (yield from _with_votes(rows))[0]


def _with_votes(rows: Sequence[Row]) -> Generator[Executable | ClockRead, Any, list[ApprovalRow]]:
    cast = yield from _votes(rows)
    return [to_approval(row, votes) for row, votes in zip(rows, cast, strict=True)]


def _votes(rows: Sequence[Row]) -> Generator[Executable | ClockRead, Any, list[tuple[VoteRow, ...]]]:
    """Return the votes of each approval, in the order in which they were cast."""
    cast: dict[tuple[str, str], list[VoteRow]] = {}
    ids = [(row["tenant_id"], row["approval_id"]) for row in rows]
    for chunk in chunks(ids):
        found = yield (
            select(approval_votes)
            .where(tuple_(approval_votes.c.tenant_id, approval_votes.c.approval_id).in_(chunk))
            .order_by(approval_votes.c.at, approval_votes.c.voter)
        )
        for row in found:
            cast.setdefault((row["tenant_id"], row["approval_id"]), []).append(to_vote(row))
    return [tuple(cast.get(name, ())) for name in ids]


def _has_id(ids: Sequence[tuple[str, str]]) -> Any:
    return tuple_(approvals.c.tenant_id, approvals.c.approval_id).in_(ids)


def to_vote(row: Row) -> VoteRow:
    return VoteRow(voter=row["voter"], approve=bool(row["approve"]), reason=row["reason"], at=row["at"])


def to_approval(row: Row, votes: tuple[VoteRow, ...] = ()) -> ApprovalRow:
    """Convert a row and its votes."""
    details = row["details"]
    given = {name: row[name] for name in ApprovalRow.__struct_fields__ if name != "votes"}
    return ApprovalRow(
        **{
            **given,
            "status": ApprovalStatus(row["status"]),
            "policies": tuple(msgspec.json.decode(row["policies"])),
            "details": None if details is None else msgspec.json.decode(details),
        },
        votes=votes,
    )
