"""`holdfast suspended`: list, show, resume and discard suspended jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.confirm import (
    All,
    DryRun,
    Rate,
    Yes,
    confirm_count,
    parse_rate,
    print_report,
    selects_ids,
    with_progress,
)
from holdfast.cli.event_view import iso
from holdfast.cli.job_view import print_job, timeline_rows
from holdfast.cli.output import (
    emit_json,
    emit_line,
    emit_rows,
    emit_text,
    job_document,
    join_parts,
    note,
    shorten,
    span,
)
from holdfast.cli.parse import Code, OneOfQueues, Task, Tenant, Words, parse_time_or_age
from holdfast.cli.prefixes import whole_job_ids
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.states import State
from holdfast.errors import TransitionInvalid
from holdfast.operations.bulk import BulkReport
from holdfast.operations.suspended import SuspendedFilter, SuspendedJob

suspended = typer.Typer(help="List, show, resume and discard suspended jobs.", no_args_is_help=True)

_COLUMNS: Final = ("job", "task", "queue", "tenant", "attempt", "age", "error")

JobIds = Annotated[list[str] | None, typer.Argument(metavar="JOB...", help="Job ids.", show_default=False)]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only jobs created since this instant or age (1h, 2d).", show_default=False),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only jobs created before this instant or age.", show_default=False),
]


@command(
    suspended,
    "list",
    examples=("holdfast suspended list", "holdfast suspended list --task order --code EFFECT_IN_DOUBT --json"),
)
async def list_suspended(
    at: EngineTarget,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    text: Words = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR", help="Continue after a previous page; stderr prints the cursor.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List suspended jobs, newest first. If more rows follow, stderr prints the cursor."""
    async with open_operations(at) as (operations, principal):
        now_ms = await operations.engine.now_ms()
        criteria = _filter(now_ms, task, queue, tenant, code, text, since, until)
        page = await operations.suspended.list(principal, criteria, limit, cursor)
    if as_json:
        emit_json([_document(job) for job in page.jobs])
    else:
        emit_rows(_COLUMNS, [_row(job, now_ms) for job in page.jobs], empty="no suspended jobs")
    if page.cursor is not None:
        note(f"more rows may follow: --cursor {page.cursor}")


@command(suspended, "show", examples=("holdfast suspended show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",))
async def show(
    at: EngineTarget,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")],
    as_json: AsJson = False,
) -> None:
    """Show one suspended job: its error and attempts. `holdfast jobs show` prints its full history."""
    async with open_operations(at) as (operations, principal):
        (full_id,) = await whole_job_ids(operations, principal, [job_id])
        view = await operations.jobs.find(principal, full_id)
    if view.state is not State.SUSPENDED:
        raise TransitionInvalid(full_id, view.state, State.QUEUED)
    if as_json:
        emit_json(job_document(view))
        return
    print_job(view)
    emit_line()
    emit_rows(("when", "after", "what", "detail"), timeline_rows(view), empty="")
    if view.failure is not None and view.failure.stack:
        emit_line()
        emit_text(view.failure.stack.rstrip())


@command(
    suspended,
    "resume",
    examples=(
        "holdfast suspended resume 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the bank is back'",
        "holdfast suspended resume --task order --since 1d --dry-run",
        "holdfast suspended resume --all --rate 20/s --reason 'after the outage' --yes",
    ),
)
async def resume(
    at: EngineTarget,
    job_ids: JobIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    text: Words = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    reason: Annotated[str, typer.Option(help="Reason for the jobs and the audit log.")] = "",
    rate: Rate = "500/s",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Resume suspended jobs. Their retry count is reset, their history is kept."""
    ids, per_s = job_ids or [], parse_rate(rate)
    given = (task, queue, tenant, code, text, since, until)
    single = selects_ids(ids, filtered=any(value is not None for value in given), everything=everything)
    async with open_operations(at) as (operations, principal):
        ids = await whole_job_ids(operations, principal, ids) if single else ids
        chosen = ids if single else _filter(await operations.engine.now_ms(), *given)
        do = partial(operations.suspended.resume, principal, chosen, reason=reason, rate_per_s=per_s)
        report = await _run(do, "Resume", ids, dry_run=dry_run, yes=yes)
    print_report(report, "job", as_json=as_json)


@command(
    suspended,
    "discard",
    examples=(
        "holdfast suspended discard 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'customer withdrew'",
        "holdfast suspended discard --task order --until 30d --reason 'too old to matter' --yes",
    ),
)
async def discard(
    at: EngineTarget,
    job_ids: JobIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    text: Words = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    reason: Annotated[str, typer.Option(help="Reason for the jobs and the audit log. Required.")] = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Discard suspended jobs: they end as cancelled."""
    given = (task, queue, tenant, code, text, since, until)
    ids = job_ids or []
    single = selects_ids(ids, filtered=any(value is not None for value in given), everything=everything)
    async with open_operations(at) as (operations, principal):
        ids = await whole_job_ids(operations, principal, ids) if single else ids
        chosen = ids if single else _filter(await operations.engine.now_ms(), *given)
        do = partial(operations.suspended.discard, principal, chosen, reason=reason)
        report = await _run(do, "Cancel", ids, dry_run=dry_run, yes=yes)
    print_report(report, "job", as_json=as_json)


async def _run(
    do: Callable[..., Awaitable[BulkReport]], verb: str, ids: list[str], *, dry_run: bool, yes: bool
) -> BulkReport:
    """Run on ids directly; on a filter, count first and prompt."""
    if ids and not dry_run:
        return await with_progress(verb, len(ids), lambda on_result: do(progress=on_result))
    return await confirm_count(do, f"{verb} {{}}?", "suspended job", verb, dry_run=dry_run, yes=yes)


def _filter(
    now_ms: int,
    task: str | None,
    queue: list[str] | None,
    tenant: str | None,
    code: str | None,
    text: str | None,
    since: str | None,
    until: str | None,
) -> SuspendedFilter:
    return SuspendedFilter(
        job_type=task,
        queues=frozenset(queue or ()),
        tenant_id=tenant,
        error_code=code,
        error=text,
        since=None if since is None else parse_time_or_age(since, "--since", now_ms),
        until=None if until is None else parse_time_or_age(until, "--until", now_ms),
    )


def _row(job: SuspendedJob, now_ms: int) -> tuple[str, ...]:
    age_ms = max(0, now_ms - round(job.created_at.timestamp() * 1000))
    error = join_parts(job.error_code, shorten(job.error))
    return (job.job_id, job.task, job.queue, job.tenant_id, str(job.attempt), span(age_ms), error)


def _document(job: SuspendedJob) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "task": job.task,
        "queue": job.queue,
        "tenant_id": job.tenant_id,
        "attempt": job.attempt,
        "retry_count": job.retry_count,
        "error_code": job.error_code or None,
        "error": job.error or None,
        "created_at": iso(job.created_at),
    }
