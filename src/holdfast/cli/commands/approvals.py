"""`holdfast approvals`: list, show, approve and reject approval requests.

`HOLDFAST_TOKEN` identifies the voter; no option can override it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.event_view import event_document, event_rows, iso
from holdfast.cli.output import as_json as raw_json
from holdfast.cli.output import emit_facts, emit_json, emit_line, emit_rows, note, shorten, span
from holdfast.cli.prefixes import queries_of, with_whole_id
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.codec import encode_json
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus

if TYPE_CHECKING:
    from holdfast.operations.approvals import ApprovalDetail


approvals = typer.Typer(help="List, show, approve and reject approval requests.", no_args_is_help=True)

_COLUMNS: Final = ("approval", "task", "tenant", "status", "votes", "requested", "deadline", "request")

ApprovalId = Annotated[
    str, typer.Argument(metavar="APPROVAL", help="Id of the approval request, from `holdfast approvals list`.")
]
Statuses = Annotated[
    list[ApprovalStatus] | None,
    typer.Option("--status", "-s", help="Only in this status; repeatable. Default: requested.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Reason, recorded with the vote.")]


@command(
    approvals,
    "list",
    examples=(
        "holdfast approvals list",
        "holdfast approvals list --status rejected --status expired --limit 20",
        "holdfast approvals list --all --json | jq '.[].approval_id'",
    ),
)
async def list_approvals(
    at: EngineTarget,
    status: Statuses = None,
    everything: Annotated[bool, typer.Option("--all", help="In every status.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR", help="Continue after a previous page; stderr prints the cursor.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List approval requests, newest first. If more rows follow, stderr prints the cursor."""
    async with open_operations(at) as (operations, principal):
        from holdfast.ledger.queries.operator_filters import ApprovalFilter

        statuses = frozenset() if everything else frozenset(status or [ApprovalStatus.REQUESTED])
        page = await operations.approvals.list(principal, ApprovalFilter(statuses=statuses), limit, cursor)
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json([_document(row) for row in page.approvals])
    else:
        emit_rows(_COLUMNS, [_row(row, now_ms) for row in page.approvals], empty="no approval requests")
    if page.cursor is not None:
        note(f"more rows may follow: --cursor {page.cursor}")


@command(
    approvals,
    "show",
    examples=(
        "holdfast approvals show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast approvals show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .payload",
    ),
)
async def show(at: EngineTarget, approval_id: ApprovalId, as_json: AsJson = False) -> None:
    """Show one approval request: payload, details from the task, requester, reason, votes, and the job's history."""
    async with open_operations(at) as (operations, principal):
        requests = operations.approvals
        detail = await with_whole_id(
            queries_of(operations),
            "approval",
            principal,
            approval_id,
            lambda full_id: requests.show(principal, full_id),
        )
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json(_detail_document(detail))
        return
    emit_facts(_facts(detail, now_ms), 12)
    if detail.approval.votes:
        emit_line()
        votes = [(_word(vote.approve), vote.voter, iso(vote.at) or "", vote.reason) for vote in detail.approval.votes]
        emit_rows(("vote", "voter", "when", "reason"), votes, empty="")
    emit_line()
    emit_rows(
        ("when", "after", "what", "detail"),
        event_rows(detail.events),
        empty="the ledger no longer has the job's history",
    )


@command(
    approvals,
    "approve",
    examples=(
        "holdfast approvals approve 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast approvals approve 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'checked with the customer'",
    ),
)
async def approve(at: EngineTarget, approval_id: ApprovalId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Approve a request. The job is queued as soon as the quorum is reached."""
    await _vote(at, approval_id, approve=True, reason=reason, as_json=as_json)


@command(
    approvals,
    "reject",
    examples=("holdfast approvals reject 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'wrong account'",),
)
async def reject(at: EngineTarget, approval_id: ApprovalId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Reject a request. The job is cancelled immediately."""
    await _vote(at, approval_id, approve=False, reason=reason, as_json=as_json)


async def _vote(at: EngineTarget, approval_id: str, *, approve: bool, reason: str, as_json: bool) -> None:
    async with open_operations(at) as (operations, principal):
        requests = operations.approvals
        row = await with_whole_id(
            queries_of(operations),
            "approval",
            principal,
            approval_id,
            lambda full_id: requests.vote(principal, full_id, approve=approve, reason=reason),
        )
    if as_json:
        emit_json(_document(row))
        return
    emit_line(row.approval_id, row.status, _votes(row))
    if row.status is ApprovalStatus.REQUESTED:
        note("quorum not reached; more approvals are required")


def _row(row: ApprovalRow, now_ms: int) -> tuple[str, ...]:
    age_ms = now_ms - round(row.requested_at.timestamp() * 1000)
    return (
        row.approval_id,
        row.job_type,
        row.tenant_id,
        row.status.value,
        _votes(row),
        f"{span(max(0, age_ms))} ago",
        _deadline(row, now_ms),
        shorten(_request_text(row)),
    )


def _facts(detail: ApprovalDetail, now_ms: int) -> Iterator[tuple[str, str]]:
    row = detail.approval
    facts = {
        "approval": row.approval_id,
        "status": row.status.value,
        "request": _request_text(row),
        "policies": ", ".join(row.policies),
        "job": row.job_id,
        "task": row.job_type,
        "queue": row.queue,
        "tenant": row.tenant_id,
        "requested by": row.requested_by,
        "requested": iso(row.requested_at),
        "deadline": _deadline(row, now_ms),
        "votes": _votes(row),
        "payload": "" if detail.job is None else detail.job.payload.text,
        "details": "" if row.details is None else encode_json(row.details, "the details").decode(),
        "decided by": row.decided_by,
        "decided": iso(row.decided_at),
        "reason": row.decision_reason,
    }
    return ((name, value) for name, value in facts.items() if value)


def _request_text(row: ApprovalRow) -> str:
    return ": ".join(part for part in (row.name, row.reason) if part)


def _votes(row: ApprovalRow) -> str:
    return f"{sum(vote.approve for vote in row.votes)} of {row.quorum}"


def _word(approve: bool) -> str:
    return "yes" if approve else "no"


def _deadline(row: ApprovalRow, now_ms: int) -> str:
    if row.deadline is None:
        return ""
    left_ms = round(row.deadline.timestamp() * 1000) - now_ms
    if row.status is ApprovalStatus.REQUESTED and left_ms > 0:
        return f"in {span(left_ms)}"
    return iso(row.deadline) or ""


def _document(row: ApprovalRow) -> dict[str, Any]:
    return {
        "approval_id": row.approval_id,
        "status": row.status,
        "job_id": row.job_id,
        "task": row.job_type,
        "queue": row.queue,
        "tenant_id": row.tenant_id,
        "name": row.name or None,
        "reason": row.reason,
        "policies": row.policies,
        "details": row.details,
        "payload_hash": row.payload_hash,
        "quorum": row.quorum,
        "requested_by": row.requested_by or None,
        "requested_at": iso(row.requested_at),
        "deadline": iso(row.deadline),
        "decided_by": row.decided_by,
        "decided_at": iso(row.decided_at),
        "decision_reason": row.decision_reason,
        "votes": [
            {"voter": vote.voter, "approve": vote.approve, "reason": vote.reason, "at": iso(vote.at)}
            for vote in row.votes
        ],
    }


def _detail_document(detail: ApprovalDetail) -> dict[str, Any]:
    job = detail.job
    return {
        **_document(detail.approval),
        "payload": None if job is None else raw_json(job.payload.text.encode()),
        "state": None if job is None else job.state.value,
        "events": [event_document(event) for event in detail.events],
    }
