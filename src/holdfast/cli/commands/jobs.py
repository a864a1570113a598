"""`holdfast jobs`: look at jobs, watch them, cancel them, resume them, hurry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from holdfast.cli.command import AsJson, OneQueue, Queues, command
from holdfast.cli.event_view import JobHistoryView, counts_document, event_rows, history_document, row_document, stacks
from holdfast.cli.job_view import engine_row, ledger_row, print_beside, print_job, timeline_rows
from holdfast.cli.live_view import watch
from holdfast.cli.output import emit_json, emit_rows, job_document, note, state_text, visible
from holdfast.cli.parse import parse_time_or_age
from holdfast.cli.prefixes import whole_job_ids
from holdfast.cli.session import EngineTarget, StoreSession, ledger_queries, open_operations, open_stores, queues_or_all
from holdfast.core.job import JobInfo
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import FINAL, State
from holdfast.errors import InvalidOption, UnknownJob
from holdfast.operations.access import visible_tenants
from holdfast.operations.jobs import JobOperations, unreachable_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.ledger.queries.job_list import JobFilter
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.records import JobDetail, JobRow


_COLUMNS: Final = ("job", "task", "queue", "state", "attempt", "age", "note")

Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant. Default: all.", show_default=False)
]

JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="One or more job ids.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the job.")]

jobs = typer.Typer(help="Look at jobs, watch them, cancel them, resume them, hurry them.", no_args_is_help=True)


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
        typer.Option(
            metavar="WHEN", help="Created at this instant or later, or so long ago (1h, 2d).", show_default=False
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Created before this instant, or longer ago than this.", show_default=False),
    ] = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text in the last error, in any case.", show_default=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="ID", help="Only jobs of this trace.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only jobs of this idempotency key.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="CURSOR", help="Go on where a list ended, as told on stderr.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Jobs, newest first, from the ledger; without one, those that the engine still has.

    If there are more, stderr says how to go on. Without a ledger only --state, --queue and --limit can be used.
    """
    async with open_stores(at) as both:
        if both.queries is None:
            given = (job_type, tenant, since, until, error, trace, key, cursor)
            if any(value is not None for value in given):
                both.require_queries()
            await _list_engine(both, queue, state, limit, as_json=as_json)
            return
        from holdfast.ledger.queries.job_list import JobFilter

        now_ms = await both.engine.now_ms()
        wanted = JobFilter(
            states=frozenset(state or ()),
            job_type=job_type,
            tenant_id=tenant,
            tenants=visible_tenants(both.principal),
            queues=frozenset(queue or ()),
            since=None if since is None else parse_time_or_age(since, "--since", now_ms),
            until=None if until is None else parse_time_or_age(until, "--until", now_ms),
            error=error,
            trace_id=trace,
            idempotency_key=key,
        )
        found, cursor = await _pages(both.queries, wanted, limit, cursor)
    if as_json:
        emit_json([row_document(job) for job in found])
    else:
        rows = [ledger_row(job, now_ms) for job in found]
        emit_rows(_COLUMNS, rows, empty="no jobs")
    if cursor is not None:
        note(f"there may be more: --cursor {cursor}")


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
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    queue: OneQueue = None,
    tenant: Tenant = None,
    stack: Annotated[bool, typer.Option("--stack", help="Print the stack of every failed attempt, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """One job with its whole story: every attempt, its errors, what it waits for, its end, its dead letter.

    From the ledger; without one, what the engine still has (on Redis not the arguments of a job that succeeded).
    """
    async with open_stores(at) as both:
        view, story = await both.with_job(job_id, tenant, queue, lambda whole: _whole(both, whole, tenant, queue))
    if as_json:
        emit_json(job_document(view) | (history_document(story) if story is not None else {}))
        return
    print_job(view)
    print()
    # The last line of the timeline is the present.
    present = [] if view.state in FINAL else timeline_rows(view)[-1:]
    lines = event_rows(story.events) + present if story is not None else timeline_rows(view)
    emit_rows(("when", "after", "what", "detail"), lines, empty="")
    if story is not None:
        print_beside(story)
    if stack:
        last = [view.failure.stack] if view.failure is not None and view.failure.stack else []
        for text in stacks(story.events) if story is not None else last:
            print()
            print(visible(text.rstrip()))


@command(
    jobs,
    "counts",
    examples=("holdfast jobs counts", "holdfast jobs counts --tenant acme --exact --json | jq .states.failed"),
)
async def count_jobs(
    at: EngineTarget,
    queue: OneQueue = None,
    tenant: Tenant = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count successes, too, where they would be estimated.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """How many jobs the ledger has in each state.

    On PostgreSQL the successes are an estimate (marked ~) once there are more than 100,000; all else is exact.
    """
    async with open_stores(at) as both:
        both.require_queries()
        counts = await both.counts(tenant, queue, exact=exact)
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
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End once no job is queued, running or retrying.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="End with exit code 5 after so many seconds.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Live counts by state, and how many jobs begin and end a second, until Ctrl-C.

    Jobs that have ended are counted by the ledger; without one these counts are missing. With --json one JSON document
    a line.
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
    """Cancel jobs that have not ended. A running one is taken from its worker at once.

    Stops at the first that cannot be cancelled (exit code 4 if it has ended); those before it are cancelled.
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
    """Send suspended jobs back to work, with fresh retries.

    Stops at the first that is not suspended (exit code 4); those before it are resumed. A job whose effect is still in
    doubt will be suspended again: `holdfast effects resolve` comes first.
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
    """Jobs that wait for a retry, or for their time, are due now.

    Stops at the first that waits for no time (exit code 4); those before it are due.
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
    """One after the other, each told as soon as it is done. `to` is where they go; None: due where they are."""
    if not all(job_ids):
        raise InvalidOption("a job id must not be empty")
    done = []
    async with open_operations(at) as (offices, person):
        for job_id in await whole_job_ids(offices, person, job_ids, queue):
            view = await offices.operating.find(person, job_id, queue)
            came_from = await act(offices.operating, person, job_id, queue=view.queue, reason=reason)
            done.append({"job_id": job_id, "queue": view.queue, "from": came_from.value, "to": (to or came_from).value})
            if not as_json:
                print(f"{job_id}\t{came_from} → {to or 'due now'}", flush=True)
    if as_json:
        emit_json(done)


async def _list_engine(
    both: StoreSession, queue: list[str] | None, state: list[State] | None, limit: int, *, as_json: bool
) -> None:
    async def find(name: str) -> list[JobInfo]:
        return await both.engine.find(name, state or list(State), limit)

    found, away = await both.engine.for_each_queue(await queues_or_all(both.engine, queue), find)
    now_ms = await both.engine.now_ms()
    jobs = [view for views in found.values() for view in views]
    views = sorted(jobs, key=lambda view: view.created_at_ms, reverse=True)[:limit]
    if as_json:
        emit_json([job_document(view) for view in views])
    else:
        emit_rows(_COLUMNS, [engine_row(view, now_ms) for view in views], empty="no jobs")
        note("from the engine: there is no ledger, and jobs that ended are forgotten in time")
    if away:
        raise unreachable_error(away)


async def _pages(
    queries: Queries, wanted: JobFilter, limit: int, cursor: str | None
) -> tuple[list[JobRow], str | None]:
    """Pages until there are enough: a page can be short where a filter has much to look through."""
    from holdfast.ledger.queries.paging import MAX_LIMIT

    found: list[JobRow] = []
    while True:
        page = await queries.jobs(wanted, min(limit - len(found), MAX_LIMIT), cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


async def _whole(
    both: StoreSession, job_id: str, tenant: str | None, queue: str | None
) -> tuple[JobInfo, JobHistoryView | None]:
    """The engine's view, or the one that the ledger's events add up to; and the story, if there is a ledger."""
    live = await both.find_live(job_id, queue)
    if live is not None and tenant not in (None, live.tenant_id):
        live = None
    if both.queries is None:
        if live is None:
            raise UnknownJob(job_id)
        return live, None
    try:
        row = await both.row(job_id, tenant, queue or (live.queue if live is not None else None))
    except UnknownJob:
        if live is None:
            raise
        note("the ledger does not have it yet")
        return live, None
    story = JobHistoryView(
        await both.queries.events(row.key),
        await both.queries.dead_letter_of(row.key),
        await both.queries.steps(row.key),
        await both.queries.effects(row.key),
    )
    return live or _folded(row, story), story


def _folded(row: JobDetail, story: JobHistoryView) -> JobInfo:
    try:
        return rebuild_job(row.queue, [event.event() for event in story.events])
    except IncompleteHistory as exc:
        note(f"the engine has forgotten it, and the ledger has not all of it ({exc}); this is what its row says")
        from holdfast.operations.jobs import info_from_row

        return info_from_row(row)
