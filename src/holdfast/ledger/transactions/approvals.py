"""Approvals: votes, deadlines, and what the engine has still to be told (requirements A2, A3).

Whoever wants to change an approval locks its row first, so that of two votes one is the second.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Executable, Update, insert, select, tuple_, update

from holdfast.core.principal import AuditEntry
from holdfast.core.text import clean
from holdfast.errors import Conflict, Forbidden
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus, VoteRow
from holdfast.ledger.transactions.base import NOW, ClockRead, Row, SqlTransaction, chunks, insert_audit, lock_row
from holdfast.schema import approval_votes, approvals
from holdfast.schema.columns import tenants_of

_REQUESTED = ApprovalStatus.REQUESTED.value
#: Word for word what the indexes say.
_HAS_DEADLINE = (approvals.c.status == _REQUESTED, approvals.c.deadline.is_not(None))
_UNDELIVERED = (approvals.c.acked_at.is_(None), approvals.c.decided_at.is_not(None))


def vote(
    tenants: Sequence[str] | None, approval_id: str, *, person: str, approve: bool, reason: str
) -> SqlTransaction[ApprovalRow]:
    row = yield from lock_row(approvals, approvals.c.approval_id, "approval", approval_id, tenants)
    now = yield NOW
    if row["status"] != _REQUESTED:
        raise Conflict(f"approval {approval_id} is {row['status']} already; nobody can vote on it any more")
    if row["deadline"] is not None and row["deadline"] <= now:
        yield _decided(row, ApprovalStatus.EXPIRED, now)
        return Conflict(f"approval {approval_id} has expired; the job is cancelled, submit it again")
    if row["requested_by"] and row["requested_by"] == clean(person):
        raise Forbidden(f"{person} asked for approval {approval_id}; somebody else has to answer it")
    cast = (yield from _votes([row]))[0]
    if any(earlier.person == clean(person) for earlier in cast):
        raise Conflict(f"{person} has voted on approval {approval_id} already; somebody else has to")
    yield insert(approval_votes).values(
        tenant_id=row["tenant_id"],
        approval_id=row["approval_id"],
        person=person,
        approve=int(approve),
        reason=reason,
        at=now,
    )
    status = ApprovalStatus.REQUESTED
    if not approve:
        status = ApprovalStatus.REJECTED
    elif len(cast) + 1 >= row["quorum"]:
        # One no would have decided it: all earlier votes are yes.
        status = ApprovalStatus.APPROVED
    if status is not ApprovalStatus.REQUESTED:
        yield _decided(row, status, now, person, reason)
    yield insert_audit([_voted(row, person, approve, reason, status)], now)
    return (yield from _again(row))


def withdraw(tenant_id: str, approval_id: str, reason: str) -> SqlTransaction[None]:
    now = yield NOW
    yield _deciding(ApprovalStatus.WITHDRAWN, now, None, reason).where(
        approvals.c.tenant_id == tenant_id, approvals.c.approval_id == approval_id
    )
    return None


def is_overdue() -> SqlTransaction[bool]:
    """Whether there is anything to expire. Reads only."""
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
                # A row that somebody votes on is that one's to expire.
                .with_for_update(skip_locked=True)
            )
    for row in due:
        yield _decided(row, ApprovalStatus.EXPIRED, now)
    changed = {"status": ApprovalStatus.EXPIRED.value, "decided_at": now, "decision_reason": "nobody answered in time"}
    return (yield from _with_votes([{**row, **changed} for row in due]))


def undelivered(limit: int, after: ApprovalRow | None) -> SqlTransaction[list[ApprovalRow]]:
    place = tuple_(approvals.c.tenant_id, approvals.c.decided_at, approvals.c.approval_id)
    wanted = select(approvals).where(*_UNDELIVERED)
    if after is not None:
        wanted = wanted.where(place > tuple_(after.tenant_id, after.decided_at, after.approval_id))
    rows = yield wanted.order_by(*place.clauses).limit(limit)
    return (yield from _with_votes(rows))


def mark_delivered(told: Sequence[ApprovalRow]) -> SqlTransaction[None]:
    now = yield NOW
    for some in chunks(told):
        yield (
            update(approvals)
            .where(_named([(row.tenant_id, row.approval_id) for row in some]), *_UNDELIVERED)
            .values(acked_at=now)
        )
    return None


def mark_undelivered(queue: str, since_ms: int) -> SqlTransaction[int]:
    now = yield NOW
    again: list[Row] = yield (
        update(approvals)
        .where(
            approvals.c.queue == queue,
            approvals.c.acked_at > now - timedelta(milliseconds=since_ms),
            approvals.c.decided_at.is_not(None),
        )
        .values(acked_at=None)
        .returning(approvals.c.approval_id)
    )
    return len(again)


def _voted(row: Row, person: str, approve: bool, reason: str, status: ApprovalStatus) -> AuditEntry:
    return AuditEntry(
        type="operator.approve" if approve else "operator.reject",
        actor=person,
        tenant_id=row["tenant_id"],
        target="approval",
        target_id=row["approval_id"],
        queue=row["queue"],
        reason=reason,
        before={"status": row["status"]},
        after={"status": status.value, "job_id": row["job_id"], "payload_hash": row["payload_hash"]},
    )


def _deciding(status: ApprovalStatus, now: datetime, person: str | None, reason: str) -> Update:
    return (
        update(approvals)
        .where(approvals.c.status == _REQUESTED)
        .values(status=status.value, decided_by=person, decided_at=now, decision_reason=reason)
    )


def _decided(
    row: Row,
    status: ApprovalStatus,
    now: datetime,
    person: str | None = None,
    reason: str = "nobody answered in time",
) -> Executable:
    return _deciding(status, now, person, reason).where(
        approvals.c.tenant_id == row["tenant_id"], approvals.c.approval_id == row["approval_id"]
    )


def _again(row: Row) -> Generator[Executable | ClockRead, Any, ApprovalRow]:
    rows = yield select(approvals).where(_named([(row["tenant_id"], row["approval_id"])]))
    return (yield from _with_votes(rows))[0]


def _with_votes(rows: Sequence[Row]) -> Generator[Executable | ClockRead, Any, list[ApprovalRow]]:
    cast = yield from _votes(rows)
    return [to_approval(row, votes) for row, votes in zip(rows, cast, strict=True)]


def _votes(rows: Sequence[Row]) -> Generator[Executable | ClockRead, Any, list[tuple[VoteRow, ...]]]:
    """Of each, in the order in which they were cast."""
    cast: dict[tuple[str, str], list[VoteRow]] = {}
    names = [(row["tenant_id"], row["approval_id"]) for row in rows]
    for some in chunks(names):
        found = yield (
            select(approval_votes)
            .where(tuple_(approval_votes.c.tenant_id, approval_votes.c.approval_id).in_(some))
            .order_by(approval_votes.c.at, approval_votes.c.person)
        )
        for row in found:
            cast.setdefault((row["tenant_id"], row["approval_id"]), []).append(to_vote(row))
    return [tuple(cast.get(name, ())) for name in names]


def _named(names: Sequence[tuple[str, str]]) -> Any:
    return tuple_(approvals.c.tenant_id, approvals.c.approval_id).in_(names)


def to_vote(row: Row) -> VoteRow:
    return VoteRow(person=row["person"], approve=bool(row["approve"]), reason=row["reason"], at=row["at"])


def to_approval(row: Row, votes: tuple[VoteRow, ...] = ()) -> ApprovalRow:
    """As the tables have it."""
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
