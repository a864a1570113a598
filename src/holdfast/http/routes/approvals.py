"""`/api/v1/approvals`, `/api/v1/operator-log`: approval requests, votes, audit log (A2, A3, H6)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.core.principal import Permission
from holdfast.errors import ApprovalVoid, Conflict, Forbidden, NotFound
from holdfast.http.operation import Call, Decorator, Reply, ResponseSpec, operation
from holdfast.http.wire import Exactly, JobEventResponse, Name, PageQuery, RequestBase, event_of_row, plain
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus
from holdfast.ledger.queries.operator_filters import ApprovalFilter, AuditFilter, AuditRow

_TAG: Final = "approvals"
_PATH: Final = "/api/v1/approvals"
_ONE: Final = f"{_PATH}/{{approval_id}}"
_FIRST: Final = {"approval_id": "$response.body#/approvals/0/approval_id"}


class VoteResponse(msgspec.Struct, frozen=True, kw_only=True):
    voter: str
    approve: bool
    reason: str
    at: datetime


class ApprovalResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An approval request and its decision."""

    approval_id: str
    job_id: str
    task: str
    queue: str
    tenant_id: str
    status: ApprovalStatus
    #: Name that the task gave its request; empty if a guard made the request.
    name: str
    #: Hash of what the approvers are shown; an approval holds for nothing else.
    payload_hash: str
    policies: list[str]
    reason: str
    details: Any
    #: Number of different approvers required.
    quorum: int
    requested_by: str
    requested_at: datetime
    deadline: datetime | None
    decided_by: str | None
    decided_at: datetime | None
    decision_reason: str | None
    votes: list[VoteResponse]


class ApprovalDetailResponse(ApprovalResponse, frozen=True, kw_only=True):
    """An approval request with the job's arguments and events."""

    payload: Any
    events: list[JobEventResponse]


class ApprovalListResponse(msgspec.Struct, frozen=True, kw_only=True):
    approvals: list[ApprovalResponse]
    cursor: str | None


class ApprovalQuery(PageQuery, frozen=True, kw_only=True):
    """Filter for approval requests."""

    status: tuple[ApprovalStatus, ...] = ()
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    job_id: Exactly | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class VoteRequest(RequestBase, frozen=True, kw_only=True):
    """Reason for a vote."""

    reason: Annotated[str, Meta(max_length=2_000)] = ""


class AuditEntryResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One audit entry: who did what, when and why, with the values before and after."""

    id: str
    type: str
    actor: str
    tenant_id: str
    target: str
    target_id: str
    queue: str
    reason: str
    before: Any
    after: Any
    at: datetime


class AuditLogResponse(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[AuditEntryResponse]
    cursor: str | None


class AuditQuery(PageQuery, frozen=True, kw_only=True):
    """Filter for audit entries."""

    type: tuple[Name, ...] = ()
    actor: Exactly | None = None
    target: Name | None = None
    target_id: Exactly | None = None
    queue: tuple[Name, ...] = ()
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


@operation(
    "GET",
    _PATH,
    "listApprovals",
    tag=_TAG,
    query=ApprovalQuery,
    responses={
        200: ResponseSpec(
            "A page, newest first.",
            ApprovalListResponse,
            links={
                "approval": ("getApproval", _FIRST),
                "approve": ("approve", _FIRST),
                "reject": ("reject", _FIRST),
                "next": ("listApprovals", {"cursor": "$response.body#/cursor"}),
            },
        )
    },
)
async def list_approvals(call: Call) -> Reply:
    """List approval requests, newest first."""
    query: ApprovalQuery = call.query
    approval_filter = ApprovalFilter(
        statuses=frozenset(query.status),
        job_type=query.task,
        queues=frozenset(query.queue),
        job_id=query.job_id,
        since=query.since,
        until=query.until,
    )
    page = await call.service.operations.approvals.list(call.principal, approval_filter, query.limit, query.cursor)
    return Reply(
        ApprovalListResponse(approvals=[ApprovalResponse(**_fields(row)) for row in page.approvals], cursor=page.cursor)
    )


@operation(
    "GET",
    _ONE,
    "getApproval",
    tag=_TAG,
    responses={
        200: ResponseSpec("The request, the job's arguments and events, and the votes.", ApprovalDetailResponse)
    },
    errors=(NotFound,),
)
async def show(call: Call) -> Reply:
    """Get an approval request with everything needed to decide."""
    detail = await call.service.operations.approvals.show(call.principal, call.path["approval_id"])
    payload = None if detail.job is None else plain(detail.job.payload.text.encode())
    events = [event_of_row(row) for row in detail.events]
    return Reply(ApprovalDetailResponse(**_fields(detail.approval), payload=payload, events=events))


def _vote_operation(verb: str) -> Decorator:
    return operation(
        "POST",
        f"{_ONE}/{verb}",
        verb,
        tag=_TAG,
        permission=Permission.APPROVE,
        body=VoteRequest,
        body_example={"reason": "checked the invoice"},
        responses={200: ResponseSpec("The approval request after this vote.", ApprovalResponse)},
        errors=(NotFound, Conflict, ApprovalVoid, Forbidden),
    )


@_vote_operation("approve")
async def approve(call: Call) -> Reply:
    """Approve a request.

    The requester cannot approve it. The job continues as soon as the quorum is reached.
    """
    return await _vote(call, approve=True)


@_vote_operation("reject")
async def reject(call: Call) -> Reply:
    """Reject a request.

    The job is cancelled.
    """
    return await _vote(call, approve=False)


@operation(
    "GET",
    "/api/v1/operator-log",
    "listOperatorLog",
    tag=_TAG,
    query=AuditQuery,
    responses={
        200: ResponseSpec(
            "A page, newest first.",
            AuditLogResponse,
            links={"next": ("listOperatorLog", {"cursor": "$response.body#/cursor"})},
        )
    },
)
async def operator_log(call: Call) -> Reply:
    """List audit entries: actions of operators, and alerts.

    Each entry has the actor, time, reason, and the values before and after. Entries about a whole queue, with the
    limits and weights of every tenant, need a token of all tenants.
    """
    query: AuditQuery = call.query
    audit_filter = AuditFilter(
        types=frozenset(query.type),
        actor=query.actor,
        target=query.target,
        target_id=query.target_id,
        queues=frozenset(query.queue),
        since=query.since,
        until=query.until,
    )
    page = await call.service.operations.audit.list(call.principal, audit_filter, query.limit, query.cursor)
    return Reply(AuditLogResponse(entries=[_audit_entry(row) for row in page.entries], cursor=page.cursor))


async def _vote(call: Call, *, approve: bool) -> Reply:
    row = await call.service.operations.approvals.vote(
        call.principal, call.path["approval_id"], approve=approve, reason=call.body.reason
    )
    return Reply(ApprovalResponse(**_fields(row)))


def _fields(row: ApprovalRow) -> dict[str, Any]:
    votes = [VoteResponse(voter=vote.voter, approve=vote.approve, reason=vote.reason, at=vote.at) for vote in row.votes]
    return {
        "approval_id": row.approval_id,
        "job_id": row.job_id,
        "task": row.job_type,
        "queue": row.queue,
        "tenant_id": row.tenant_id,
        "status": row.status,
        "name": row.name,
        "payload_hash": row.payload_hash,
        "policies": list(row.policies),
        "reason": row.reason,
        "details": row.details,
        "quorum": row.quorum,
        "requested_by": row.requested_by,
        "requested_at": row.requested_at,
        "deadline": row.deadline,
        "decided_by": row.decided_by,
        "decided_at": row.decided_at,
        "decision_reason": row.decision_reason,
        "votes": votes,
    }


def _audit_entry(row: AuditRow) -> AuditEntryResponse:
    return AuditEntryResponse(
        id=row.id,
        type=row.type,
        actor=row.actor,
        tenant_id=row.tenant_id,
        target=row.target,
        target_id=row.target_id,
        queue=row.queue,
        reason=row.reason,
        before=None if row.before is None else plain(row.before.text.encode()),
        after=None if row.after is None else plain(row.after.text.encode()),
        at=row.at,
    )
