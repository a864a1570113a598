"""`holdfast jobs`: list, watch, cancel, resume and expedite jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from holdfast.cli.command import AsJson, OneQueue, Queues, command
from holdfast.cli.event_view import JobHistoryView, counts_document, event_rows, history_document, row_document, stacks
from holdfast.cli.job_view import engine_row, ledger_row, print_job, print_ledger_only, timeline_rows
from holdfast.cli.live_view import watch
from holdfast.cli.output import emit_json, emit_line, emit_rows, emit_text, job_document, note, state_text
from holdfast.cli.parse import parse_time_or_age
from holdfast.cli.prefixes import whole_job_ids
from holdfast.cli.session import EngineTarget, StoreSession, ledger_queries, open_operations, open_stores, queues_or_all
from holdfast.core.job import JobInfo
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import FINAL, State
from holdfast.errors import InvalidOption, UnknownJob
from holdfast.operations.jobs import JobOperations, unreachable_error, with_arguments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.ledger.queries.job_list import JobFilter
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.records import JobDetail, JobRow


_COLUMNS: Final = ("job", "task", "queue", "state", "attempt", "age", "note")

Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant. Default: all.", show_default=False)
]

JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Job ids.")]
Reason = Annotated[str, typer.Option(help="Reason, recorded with the job.")]

jobs = typer.Typer(help="List, watch, cancel, resume and expedite jobs.", no_args_is_help=True)


@command(
    jobs,
    "list",
    examples=(
        "holdfast jobs list",
        "holdfast jobs list --state retrying --state suspended --limit 20",
        "holdfast jobs list --type shop.charge --since 1h --error timeout",
        "holdfast jobs list --queue mail --json | jq '.[].job_id'",
    ),
)
async def list_jobs(
    at: EngineTarget,
    queue: Queues = None,
    state: Annotated[
        list[State] | None,
        typer.Option("--state", "-s", help="Only jobs in this state; repeatable. Default: all.", show_default=False),
    ] = None,
    job_type: Annotated[
        str | None, typer.Option("--type", "-t", metavar="TASK", help="Only jobs of this task.", show_default=False)
    ] = None,
    tenant: Tenant = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only jobs created since this instant or age (1h, 2d).", show_default=False),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only jobs created before this instant or age.", show_default=False),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Only with this text in the last error; case-insensitive.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="ID", help="Only jobs of this trace.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only jobs of this idempotency key.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR", help="Continue after a previous page; stderr prints the cursor.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs from the ledger, newest first; without a ledger, the jobs that the engine still has.

    If more rows follow, stderr prints the cursor. Without a ledger only --state, --queue and --limit are available.
    """
    async with open_stores(at) as session:
        if session.queries is None:
            given = (job_type, tenant, since, until, error, trace, key, cursor)
            if any(value is not None for value in given):
                session.require_queries()
            await _list_engine(session, queue, state, limit, as_json=as_json)
            return
        from holdfast.ledger.queries.job_list import JobFilter

        now_ms = await session.engine.now_ms()
        job_filter = JobFilter(
            states=frozenset(state or ()),
            job_type=job_type,
            tenant_id=tenant,
            tenants=session.principal.visible_tenants,
            queues=frozenset(queue or ()),
            since=None if since is None else parse_time_or_age(since, "--since", now_ms),
            until=None if until is None else parse_time_or_age(until, "--until", now_ms),
            error=error,
            trace_id=trace,
            idempotency_key=key,
        )
        found, cursor = await _pages(session.queries, job_filter, limit, cursor)
    if as_json:
        emit_json([row_document(job) for job in found])
    else:
        rows = [ledger_row(job, now_ms) for job in found]
        emit_rows(_COLUMNS, rows, empty="no jobs")
    if cursor is not None:
        note(f"more rows may follow: --cursor {cursor}")


@command(
    jobs,
    "show",
    examples=(
        "holdfast jobs show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast jobs show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --stack",
        "holdfast jobs show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .result",
    ),
)
async def show(
    at: EngineTarget,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")],
    queue: OneQueue = None,
    tenant: Tenant = None,
    stack: Annotated[bool, typer.Option("--stack", help="Also print the stack of every failed attempt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one job with its history: attempts, errors, what it waits for, its outcome, its dead letter.

    Without a ledger, what the engine still has (on Redis, not the arguments of a job that succeeded).
    """
    async with open_stores(at) as session:
        view, history = await session.with_job(
            job_id, tenant, queue, lambda full_id: _load_job(session, full_id, tenant, queue)
        )
    if as_json:
        emit_json(job_document(view) | (history_document(history) if history is not None else {}))
        return
    print_job(view)
    emit_line()
    # The last entry of the timeline is the current state.
    present = [] if view.state in FINAL else timeline_rows(view)[-1:]
    lines = event_rows(history.events) + present if history is not None else timeline_rows(view)
    emit_rows(("when", "after", "what", "detail"), lines, empty="")
    if history is not None:
        print_ledger_only(history)
    if stack:
        last = [view.failure.stack] if view.failure is not None and view.failure.stack else []
        for text in stacks(history.events) if history is not None else last:
            emit_line()
            emit_text(text.rstrip())


@command(
    jobs,
    "counts",
    examples=("holdfast jobs counts", "holdfast jobs counts --tenant acme --exact --json | jq .states.failed"),
)
async def count_jobs(
    at: EngineTarget,
    queue: OneQueue = None,
    tenant: Tenant = None,
    exact: Annotated[bool, typer.Option("--exact", help="Count succeeded jobs instead of estimating them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the jobs in the ledger by state.

    On PostgreSQL, succeeded jobs are estimated (marked ~) above 100,000; other counts are exact.
    """
    async with open_stores(at) as session:
        session.require_queries()
        counts = await session.counts(tenant, queue, exact=exact)
    if as_json:
        emit_json(counts_document(counts))
        return
    marks = dict.fromkeys(counts.estimated, "~")
    rows = [
        (state_text(state), f"{marks.get(state, '')}{counts.states[state]}") for state in State if counts.states[state]
    ]
    emit_rows(("state", "jobs"), rows, empty="no jobs")


@command(
    jobs,
    "watch",
    examples=(
        "holdfast jobs watch",
        "holdfast jobs watch --queue mail --interval 0.5",
        "holdfast jobs watch --until-empty --timeout 300 && ./next-step",
        "holdfast jobs watch --json | jq .queues",
    ),
)
async def watch_jobs(
    at: EngineTarget,
    queue: Queues = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two samples.")] = 1.0,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Exit once no job is queued, running or retrying.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Exit with code 5 after this many seconds.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show live counts by state and rates per second until Ctrl-C.

    Counts of finished jobs come from the ledger and are missing without one. --json prints one JSON document per line.
    """
    async with at.engine() as engine, ledger_queries(at.settings(), engine) as queries:
        code = await watch(
            engine, queries, queue, interval, until_empty=until_empty, timeout_s=timeout, as_json=as_json
        )
    raise typer.Exit(code)


@command(
    jobs,
    "cancel",
    examples=(
        "holdfast jobs cancel 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'customer withdrew'",
        "holdfast jobs list -s retrying --json | jq -r '.[].job_id' | xargs holdfast jobs cancel --reason outage",
    ),
)
async def cancel(
    at: EngineTarget,
    job_ids: JobIds,
    queue: OneQueue = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Cancel jobs that have not finished. A running job loses its lease immediately.

    Stops at the first job that cannot be cancelled (exit code 4 if it has finished); the jobs before it are cancelled.
    """
    await _act(at, job_ids, queue, reason, JobOperations.cancel, to=State.CANCELLED, as_json=as_json)


@command(
    jobs,
    "resume",
    examples=(
        "holdfast jobs resume 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the bank is back'",
        "holdfast jobs list -s suspended --json | jq -r '.[].job_id' | xargs holdfast jobs resume",
    ),
)
async def resume(
    at: EngineTarget,
    job_ids: JobIds,
    queue: OneQueue = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Resume suspended jobs, with their retry count reset.

    Stops at the first job that is not suspended (exit code 4); the jobs before it are resumed. A job whose effect is
    still in doubt is suspended again: run `holdfast effects resolve` first.
    """
    await _act(at, job_ids, queue, reason, JobOperations.resume, to=State.QUEUED, as_json=as_json)


@command(
    jobs,
    "retry",
    examples=(
        "holdfast jobs retry 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the bank is back'",
        "holdfast jobs list -s retrying --json | jq -r '.[].job_id' | xargs holdfast jobs retry",
    ),
)
async def retry(
    at: EngineTarget,
    job_ids: JobIds,
    queue: OneQueue = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Make delayed and retrying jobs due now.

    Stops at the first job that is neither (exit code 4); the jobs before it are due.
    """
    await _act(at, job_ids, queue, reason, JobOperations.expedite, to=None, as_json=as_json)


async def _act(
    at: EngineTarget,
    job_ids: list[str],
    queue: str | None,
    reason: str,
    act: Callable[..., Awaitable[State]],
    *,
    to: State | None,
    as_json: bool,
) -> None:
    """Apply `act` to each job and print its result.

    `to` is the new state; None means that the state stays.
    """
    if not all(job_ids):
        raise InvalidOption("a job id must not be empty")
    done = []
    async with open_operations(at) as (operations, principal):
        for job_id in await whole_job_ids(operations, principal, job_ids, queue):
            view = await operations.jobs.find(principal, job_id, queue)
            from_state = await act(operations.jobs, principal, job_id, queue=view.queue, reason=reason)
            done.append(
                {"job_id": job_id, "queue": view.queue, "from": from_state.value, "to": (to or from_state).value}
            )
            if not as_json:
                emit_line(job_id, f"{from_state} → {to or 'due now'}", flush=True)
    if as_json:
        emit_json(done)


async def _list_engine(
    session: StoreSession, queue: list[str] | None, state: list[State] | None, limit: int, *, as_json: bool
) -> None:
    async def find(name: str) -> list[JobInfo]:
        return await session.engine.find(name, state or list(State), limit)

    found, unreachable = await session.engine.for_each_queue(await queues_or_all(session.engine, queue), find)
    now_ms = await session.engine.now_ms()
    jobs = [view for views in found.values() for view in views]
    views = sorted(jobs, key=lambda view: view.created_at_ms, reverse=True)[:limit]
    if as_json:
        emit_json([job_document(view) for view in views])
    else:
        emit_rows(_COLUMNS, [engine_row(view, now_ms) for view in views], empty="no jobs")
        note("read from the engine: there is no ledger, and finished jobs expire")
    if unreachable:
        raise unreachable_error(unreachable)


async def _pages(
    queries: Queries, job_filter: JobFilter, limit: int, cursor: str | None
) -> tuple[list[JobRow], str | None]:
    """Read pages until `limit` rows are found: a page may be short if the filter skips many rows."""
    from holdfast.ledger.queries.paging import MAX_LIMIT

    found: list[JobRow] = []
    while True:
        page = await queries.jobs(job_filter, min(limit - len(found), MAX_LIMIT), cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


async def _load_job(
    session: StoreSession, job_id: str, tenant: str | None, queue: str | None
) -> tuple[JobInfo, JobHistoryView | None]:
    """Return the job, and its history if the ledger has it.

    A job that the engine does not have is rebuilt from the ledger's events.
    """
    live = await session.find_live(job_id, queue)
    if live is not None and tenant not in (None, live.tenant_id):
        live = None
    if session.queries is None:
        if live is None:
            raise UnknownJob(job_id)
        return live, None
    try:
        row = await session.row(job_id, tenant, queue or (live.queue if live is not None else None))
    except UnknownJob:
        if live is None:
            raise
        note("the ledger does not have the job yet")
        return live, None
    history = JobHistoryView(
        await session.queries.events(row.key),
        await session.queries.dead_letter_of(row.key),
        await session.queries.steps(row.key),
        await session.queries.effects(row.key),
    )
    return _rebuild(row, history) if live is None else with_arguments(live, row), history


def _rebuild(row: JobDetail, history: JobHistoryView) -> JobInfo:
    try:
        return rebuild_job(row.queue, [event.event() for event in history.events])
    except IncompleteHistory as exc:
        note(f"the engine no longer has the job, and its history in the ledger is incomplete ({exc}); showing its row")
        from holdfast.operations.jobs import info_from_row

        return info_from_row(row)
