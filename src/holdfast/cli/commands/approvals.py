"""`holdfast approvals`: what waits for a person's yes, and the answer.

Who answers is who `HOLDFAST_TOKEN` says; nothing on the command line can say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.event_view import event_document, event_rows, iso
from holdfast.cli.output import as_json as raw_json
from holdfast.cli.output import emit_facts, emit_json, emit_rows, note, shorten, span
from holdfast.cli.prefixes import abbreviated, queries_of
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.codec import encode_json
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus

if TYPE_CHECKING:
    from holdfast.operations.approvals import ApprovalDetail


approvals = typer.Typer(help="What waits for a person's yes, and the answer.", no_args_is_help=True)

_COLUMNS: Final = ("approval", "task", "tenant", "status", "votes", "asked", "deadline", "question")

ApprovalId = Annotated[str, typer.Argument(metavar="APPROVAL", help="Its id, as `holdfast approvals list` shows it.")]
Statuses = Annotated[
    list[ApprovalStatus] | None,
    typer.Option("--status", "-s", help="In this status; repeatable. Default: requested.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Why; kept with the vote.")]


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
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="At most so many.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="CURSOR", help="Go on where a list ended, as told on stderr.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Questions to people, newest first. If there are more, stderr says how to go on."""
    async with open_operations(at) as (offices, person):
        from holdfast.ledger.queries.operator_filters import ApprovalFilter

        statuses = frozenset() if everything else frozenset(status or [ApprovalStatus.REQUESTED])
        page = await offices.approvals.list(person, ApprovalFilter(statuses=statuses), limit, cursor)
        now_ms = await offices.engine.now_ms()
    if as_json:
        emit_json([_document(row) for row in page.approvals])
    else:
        emit_rows(_COLUMNS, [_row(row, now_ms) for row in page.approvals], empty="nothing waits for a person")
    if page.cursor is not None:
        note(f"there may be more: --cursor {page.cursor}")


@command(
    approvals,
    "show",
    examples=(
        "holdfast approvals show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast approvals show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .payload",
    ),
)
async def show(at: EngineTarget, approval_id: ApprovalId, as_json: AsJson = False) -> None:
    """One question: the payload, what the task shows, who wants it and why, votes, and every step of the job."""
    async with open_operations(at) as (offices, person):
        requests = offices.approvals
        sheet = await abbreviated(
            queries_of(offices), "approval", person, approval_id, lambda whole: requests.show(person, whole)
        )
        now_ms = await offices.engine.now_ms()
    if as_json:
        emit_json(_sheet_document(sheet))
        return
    emit_facts(_facts(sheet, now_ms))
    if sheet.approval.votes:
        print()
        votes = [(_word(vote.approve), vote.person, iso(vote.at) or "", vote.reason) for vote in sheet.approval.votes]
        emit_rows(("vote", "person", "when", "why"), votes, empty="")
    print()
    emit_rows(("when", "after", "what", "detail"), event_rows(sheet.events), empty="the ledger has dropped the job")


@command(
    approvals,
    "approve",
    examples=(
        "holdfast approvals approve 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast approvals approve 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'checked with the customer'",
    ),
)
async def approve(at: EngineTarget, approval_id: ApprovalId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Say yes to what `holdfast approvals show` shows; with enough yeses the job goes on at once."""
    await _vote(at, approval_id, approve=True, reason=reason, as_json=as_json)


@command(
    approvals,
    "reject",
    examples=("holdfast approvals reject 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'wrong account'",),
)
async def reject(at: EngineTarget, approval_id: ApprovalId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Say no: the job is cancelled at once."""
    await _vote(at, approval_id, approve=False, reason=reason, as_json=as_json)


async def _vote(at: EngineTarget, approval_id: str, *, approve: bool, reason: str, as_json: bool) -> None:
    async with open_operations(at) as (offices, person):
        requests = offices.approvals
        row = await abbreviated(
            queries_of(offices),
            "approval",
            person,
            approval_id,
            lambda whole: requests.vote(person, whole, approve=approve, reason=reason),
        )
    if as_json:
        emit_json(_document(row))
        return
    print(f"{row.approval_id}\t{row.status}\t{_votes(row)}")
    if row.status is ApprovalStatus.REQUESTED:
        note("more people have to say yes")


def _row(row: ApprovalRow, now_ms: int) -> tuple[str, ...]:
    asked_ms = now_ms - round(row.requested_at.timestamp() * 1000)
    return (
        row.approval_id,
        row.job_type,
        row.tenant_id,
        row.status.value,
        _votes(row),
        f"{span(max(0, asked_ms))} ago",
        _deadline(row, now_ms),
        shorten(_question(row)),
    )


def _facts(sheet: ApprovalDetail, now_ms: int) -> Iterator[tuple[str, str]]:
    row = sheet.approval
    facts = {
        "approval": row.approval_id,
        "status": row.status.value,
        "question": _question(row),
        "policies": ", ".join(row.policies),
        "job": row.job_id,
        "task": row.job_type,
        "queue": row.queue,
        "tenant": row.tenant_id,
        "asked by": row.requested_by,
        "asked": iso(row.requested_at),
        "deadline": _deadline(row, now_ms),
        "votes": _votes(row),
        "payload": "" if sheet.job is None else sheet.job.payload.text,
        "details": "" if row.details is None else encode_json(row.details, "the details").decode(),
        "decided by": row.decided_by,
        "decided": iso(row.decided_at),
        "because": row.decision_reason,
    }
    return ((name, value) for name, value in facts.items() if value)


def _question(row: ApprovalRow) -> str:
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
            {"person": vote.person, "approve": vote.approve, "reason": vote.reason, "at": iso(vote.at)}
            for vote in row.votes
        ],
    }


def _sheet_document(sheet: ApprovalDetail) -> dict[str, Any]:
    job = sheet.job
    return {
        **_document(sheet.approval),
        "payload": None if job is None else raw_json(job.payload.text.encode()),
        "state": None if job is None else job.state.value,
        "events": [event_document(event) for event in sheet.events],
    }
