"""`holdfast explain JOB`: its story in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.command import AsJson, OneQueue, command
from holdfast.cli.output import emit_json, visible
from holdfast.cli.session import EngineTarget, StoreSession, open_stores
from holdfast.core.job import Event
from holdfast.errors import EffectInDoubt, UnknownJob
from holdfast.ledger.port.effects import EffectState
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
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    queue: OneQueue = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="The job's tenant; without it all are asked.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What happened to a job, why it is where it is, and what will happen next, in plain sentences.

    Needs a ledger: the engine's own file on SQLite, HOLDFAST_LEDGER on Redis.
    """
    async with open_stores(at) as both:
        both.require_queries()
        whole, told = await both.with_job(job_id, tenant, queue, lambda whole: _explained(both, whole, tenant, queue))
    if as_json:
        emit_json({"job_id": whole, "happened": told.happened, "why": told.why, "then": told.then})
        return
    print(visible("\n".join(told.sentences)))


async def _explained(both: StoreSession, job_id: str, tenant: str | None, queue: str | None) -> tuple[str, Explanation]:
    # SQLAlchemy, which other commands do not need.
    from holdfast.ledger.queries.explain import Explanation, explain
    from holdfast.ledger.queries.explain_state import JobFacts

    queries = both.require_queries()
    live = await both.find_live(job_id, queue)
    try:
        job = await both.row(job_id, tenant, queue)
    except UnknownJob:
        if live is None or tenant not in (None, live.tenant_id):
            raise
        why = f"The engine has it as {live.state}; the ledger does not have it yet."
        then = "Ask again in a moment. If this lasts: does a worker or `holdfast upkeep` run?"
        return job_id, Explanation([], [why], [then])
    letter = await queries.dead_letter_of(job.key)
    if live is not None and (live.queue, live.tenant_id) != (job.queue, job.tenant_id):
        live = None
    events = [event.event() for event in await queries.events(job.key)]
    scene = JobFacts(
        job_id=job_id,
        now_ms=await both.engine.now_ms(),
        task=job.job_type,
        queue=job.queue,
        **await _queue(both, job.queue),
        live=live,
        lease_ms=round(both.settings.visibility_timeout_s * 1000),
        dlq_id=letter.dlq_id if letter is not None else job.dlq_id,
        dead_letter_status=letter.status if letter is not None else None,
        replayed_as=letter.replayed_as if letter is not None else None,
        replay_of=_replay_of(job),
        in_doubt=await _in_doubt(both, queries, job, events),
        approvals=await _approvals(queries, job),
        operator_actions=await _deeds(queries, job),
    )
    return job_id, explain(events, scene)


async def _queue(both: StoreSession, queue: str) -> dict[str, Any]:
    """What keeps workers from its jobs; who is not of every tenant does not learn how many workers there are."""
    if not both.principal.sees_all_tenants:
        return {"paused": (await both.engine.get_control(queue)).paused}
    stats = await both.engine.stats(queue)
    return {"paused": stats.control.paused, "workers": stats.workers}


def _replay_of(job: JobDetail) -> str | None:
    meta = job.meta.value if job.meta is not None else None
    replay = meta.get("replay") if isinstance(meta, dict) else None
    return replay.get("job_id") if isinstance(replay, dict) else None


async def _approvals(queries: Queries, job: JobDetail) -> tuple[ApprovalRow, ...]:
    """What people were asked about the job, the oldest first."""
    from holdfast.ledger.queries.operator_filters import ApprovalFilter
    from holdfast.ledger.queries.paging import MAX_LIMIT

    page = await queries.approvals(ApprovalFilter(tenants=[job.tenant_id], job_id=job.job_id), MAX_LIMIT)
    return tuple(row for row in reversed(page.approvals) if row.queue == job.queue)


async def _deeds(queries: Queries, job: JobDetail) -> tuple[OperatorAction, ...]:
    """What people did about it: to its approvals and its dead letter, which say whose they are."""
    from holdfast.ledger.queries.explain_state import OperatorAction
    from holdfast.ledger.queries.operator_filters import AuditFilter
    from holdfast.ledger.queries.paging import MAX_LIMIT

    wanted = AuditFilter(tenants=[job.tenant_id], queues=frozenset({job.queue}), since=job.created_at)
    page = await queries.audit_log(wanted, MAX_LIMIT)
    about = [line for line in page.entries if job.job_id in (line.target_id, _job_of(line))]
    return tuple(
        OperatorAction(type=line.type, actor=line.actor, reason=line.reason, at_ms=round(line.at.timestamp() * 1000))
        for line in reversed(about)
    )


def _job_of(line: AuditRow) -> str | None:
    after = line.after.value if line.after is not None else None
    return after.get("job_id") if isinstance(after, dict) else None


async def _in_doubt(both: StoreSession, queries: Queries, job: JobDetail, events: Sequence[Event]) -> tuple[str, ...]:
    """Keys in doubt that the job holds, or that it is suspended for: another job may hold them."""
    from holdfast.ledger.queries.operators import EffectQueries

    rows = await with_lost_holders(
        both.engine, await EffectQueries(queries.engine).unresolved(job.tenant_id, limit=MANY)
    )
    told = " ".join(str((event.data or {}).get("message") or "") for event in events[-1:])
    return tuple(
        row.key
        for row in rows
        if row.state == EffectState.IN_DOUBT
        and ((row.queue, row.job_id) == (job.queue, job.job_id) or EffectInDoubt.named(row.key) in told)
    )
