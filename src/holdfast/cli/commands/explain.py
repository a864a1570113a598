"""`holdfast explain JOB`: a job's history, state and next steps in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.command import AsJson, OneQueue, command
from holdfast.cli.output import emit_json, emit_line, shorten
from holdfast.cli.session import EngineTarget, StoreSession, open_stores
from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.errors import EffectInDoubt, UnknownJob
from holdfast.ledger.port.effects import EffectState
from holdfast.observe.redact import redact_and_truncate
from holdfast.operations.effects import MANY, with_lost_holders

if TYPE_CHECKING:
    from holdfast.ledger.port.operators import ApprovalRow
    from holdfast.ledger.queries.explain import Explanation
    from holdfast.ledger.queries.explain_state import OperatorAction
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operator_filters import AuditRow
    from holdfast.ledger.queries.records import JobDetail


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "explain",
        examples=(
            "holdfast explain 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
            "holdfast explain 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq -r '.then[]'",
        ),
    )(explain_job)


async def explain_job(
    at: EngineTarget,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")],
    queue: OneQueue = None,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Tenant of the job. Default: search all tenants.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain in sentences what happened to a job, why it is in its state, and what happens next.

    Needs a ledger: the engine's own file on SQLite, HOLDFAST_LEDGER on Redis.
    """
    async with open_stores(at) as session:
        session.require_queries()
        full_id, explanation = await session.with_job(
            job_id, tenant, queue, lambda full_id: _explain(session, full_id, tenant, queue)
        )
    if as_json:
        emit_json(
            {
                "job_id": full_id,
                "history": explanation.history,
                "reason": explanation.reason,
                "next_steps": explanation.next_steps,
            }
        )
        return
    for sentence in explanation.sentences:
        emit_line(sentence)


async def _explain(
    session: StoreSession, job_id: str, tenant: str | None, queue: str | None
) -> tuple[str, Explanation]:
    # Imports SQLAlchemy, which other commands do not need.
    from holdfast.ledger.queries.explain import Explanation, explain
    from holdfast.ledger.queries.explain_state import JobFacts

    queries = session.require_queries()
    live = await session.find_live(job_id, queue)
    try:
        job = await session.row(job_id, tenant, queue)
    except UnknownJob:
        if live is None or tenant not in (None, live.tenant_id):
            raise
        reason = f"The job is {live.state} in the engine; the ledger does not have it yet."
        then = "Try again in a moment. If this persists, check that a worker or `holdfast upkeep` is running."
        return job_id, Explanation([], [reason], [then])
    dead_letter = await queries.dead_letter_of(job.key)
    if live is not None and (live.queue, live.tenant_id) != (job.queue, job.tenant_id):
        live = None
    events = [event.event() for event in await queries.events(job.key)]
    facts = JobFacts(
        job_id=job_id,
        now_ms=await session.engine.now_ms(),
        task=job.job_type,
        arguments=shorten(redact_and_truncate(job.payload.text, 2_000), 400),
        queue=job.queue,
        **await _queue(session, job.queue),
        live=live,
        lease_ms=round(session.settings.visibility_timeout_s * 1000),
        dlq_id=dead_letter.dlq_id if dead_letter is not None else job.dlq_id,
        dead_letter_status=dead_letter.status if dead_letter is not None else None,
        replayed_as=dead_letter.replayed_as if dead_letter is not None else None,
        replay_of=_replay_of(job),
        in_doubt=await _in_doubt(session, queries, job, events),
        approvals=await _approvals(queries, job),
        operator_actions=await _operator_actions(queries, job),
    )
    return job_id, explain(events, facts)


async def _queue(session: StoreSession, queue: str) -> dict[str, Any]:
    """Controls of the queue, and its workers and running jobs, which only a principal of all tenants may see."""
    stats = await session.engine.stats(queue)
    facts: dict[str, Any] = {"paused": stats.control.paused, "unverified": not stats.gate.is_open}
    if not session.principal.sees_all_tenants:
        return facts
    facts["workers"] = stats.workers
    return facts | {"concurrency": stats.control.concurrency, "running": stats.states.get(State.RUNNING, 0)}


def _replay_of(job: JobDetail) -> str | None:
    meta = job.meta.value if job.meta is not None else None
    replay = meta.get("replay") if isinstance(meta, dict) else None
    return replay.get("job_id") if isinstance(replay, dict) else None


async def _approvals(queries: Queries, job: JobDetail) -> tuple[ApprovalRow, ...]:
    """Return the job's approval requests, oldest first."""
    from holdfast.ledger.queries.operator_filters import ApprovalFilter
    from holdfast.ledger.queries.paging import MAX_LIMIT

    page = await queries.approvals(ApprovalFilter(tenants=[job.tenant_id], job_id=job.job_id), MAX_LIMIT)
    return tuple(row for row in reversed(page.approvals) if row.queue == job.queue)


async def _operator_actions(queries: Queries, job: JobDetail) -> tuple[OperatorAction, ...]:
    """Return the audit entries about the job, its approvals and its dead letter, oldest first."""
    from holdfast.ledger.queries.explain_state import OperatorAction
    from holdfast.ledger.queries.operator_filters import AuditFilter
    from holdfast.ledger.queries.paging import MAX_LIMIT

    audit_filter = AuditFilter(tenants=[job.tenant_id], queues=frozenset({job.queue}), since=job.created_at)
    page = await queries.audit_log(audit_filter, MAX_LIMIT)
    own = [entry for entry in page.entries if job.job_id in (entry.target_id, _job_of(entry))]
    return tuple(
        OperatorAction(
            type=entry.type, actor=entry.actor, reason=entry.reason, at_ms=round(entry.at.timestamp() * 1000)
        )
        for entry in reversed(own)
    )


def _job_of(entry: AuditRow) -> str | None:
    after = entry.after.value if entry.after is not None else None
    return after.get("job_id") if isinstance(after, dict) else None


async def _in_doubt(
    session: StoreSession, queries: Queries, job: JobDetail, events: Sequence[Event]
) -> tuple[str, ...]:
    """Return keys in doubt that the job has reserved or is suspended for.

    Another job may have reserved a key that this one is suspended for.
    """
    from holdfast.ledger.queries.operators import EffectQueries

    rows = await with_lost_holders(
        session.engine, await EffectQueries(queries.engine).find_unresolved(job.tenant_id, limit=MANY)
    )
    message = " ".join(str((event.data or {}).get("message") or "") for event in events[-1:])
    return tuple(
        row.key
        for row in rows
        if row.state == EffectState.IN_DOUBT
        and ((row.queue, row.job_id) == (job.queue, job.job_id) or EffectInDoubt.named(row.key) in message)
    )
