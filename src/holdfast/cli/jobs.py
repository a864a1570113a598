"""`holdfast jobs`: look at jobs, watch them, cancel them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli.command import AsJson, Connection, OneQueue, Queues, command
from holdfast.cli.format import error_text, instant, job_document, joined, number_of, shorten, span, state_text
from holdfast.cli.lookup import actor, find_job, queues_or_all
from holdfast.cli.output import console, emit_json, emit_rows, on_terminal
from holdfast.cli.timeline import rows as timeline_rows
from holdfast.cli.watch import watch
from holdfast.core.job import JobView
from holdfast.core.states import State
from holdfast.errors import InvalidOption

jobs = typer.Typer(help="Look at jobs, watch them, cancel them.", no_args_is_help=True)


@command(
    jobs,
    "list",
    examples=(
        "holdfast jobs list",
        "holdfast jobs list --state retrying --state suspended --limit 20",
        "holdfast jobs list --queue mail --json | jq '.[].job_id'",
    ),
)
async def list_jobs(
    at: Connection,
    queue: Queues = None,
    state: Annotated[
        list[State] | None,
        typer.Option("--state", "-s", help="Only jobs in this state; repeatable. Default: all.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Some jobs, newest first."""
    async with at.engine() as engine:
        found: list[JobView] = []
        for name in await queues_or_all(engine, queue):
            found += await engine.find(name, state or list(State), limit)
        now_ms = await engine.now_ms()
    views = sorted(found, key=lambda view: view.created_at_ms, reverse=True)[:limit]
    if as_json:
        emit_json([job_document(view) for view in views])
        return
    columns = ("job", "task", "queue", "state", "attempt", "age", "note")
    emit_rows(columns, [_row(view, now_ms) for view in views], empty="no jobs")


@command(
    jobs,
    "show",
    examples=(
        "holdfast jobs show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast jobs show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .result",
    ),
)
async def show(
    at: Connection,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    queue: OneQueue = None,
    stack: Annotated[bool, typer.Option("--stack", help="Print the last error's stack too.")] = False,
    as_json: AsJson = False,
) -> None:
    """One job with its timeline: created, each attempt, what it waits for, its end.

    On Redis the arguments of a job that succeeded are not kept.
    """
    async with at.engine() as engine:
        view = await find_job(engine, job_id, queue)
    if as_json:
        emit_json(job_document(view))
        return
    _print_job(view)
    print()
    emit_rows(("when", "after", "what", "detail"), timeline_rows(view), empty="")
    if stack and view.failure is not None and view.failure.stack:
        print()
        print(view.failure.stack.rstrip())


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
    at: Connection,
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

    With --json one JSON document a line.
    """
    async with at.engine() as engine:
        code = await watch(engine, queue, interval, until_empty=until_empty, timeout_s=timeout, as_json=as_json)
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
    at: Connection,
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="One or more job ids.")],
    queue: OneQueue = None,
    reason: Annotated[str, typer.Option(help="Why; kept with the job.")] = "",
    as_json: AsJson = False,
) -> None:
    """Cancel jobs that have not ended. A running one is taken from its worker at once.

    Stops at the first that cannot be cancelled (exit code 4 if it has ended); those before it are cancelled.
    """
    if not all(job_ids):
        raise InvalidOption("a job id must not be empty")
    done = []
    async with at.engine() as engine:
        for job_id in job_ids:
            view = await find_job(engine, job_id, queue)
            came_from = await engine.move(view.queue, job_id, State.CANCELLED, actor=actor(), reason=reason)
            done.append({"job_id": job_id, "queue": view.queue, "from": came_from.value, "to": State.CANCELLED.value})
            if not as_json:
                print(f"{job_id}\t{came_from} → {State.CANCELLED}", flush=True)
    if as_json:
        emit_json(done)


def _row(view: JobView, now_ms: int) -> tuple[str | Text, ...]:
    return (
        view.job_id,
        view.task,
        view.queue,
        state_text(view.state),
        str(view.attempt),
        span(max(0, now_ms - view.created_at_ms)),
        _remark(view, now_ms),
    )


def _remark(view: JobView, now_ms: int) -> str:
    if view.state is State.RUNNING:
        return f"on {view.worker}"
    if view.next_attempt_at_ms > now_ms:
        return f"due in {span(view.next_attempt_at_ms - now_ms)}"
    return shorten(joined(view.failure.type or view.failure.code, view.failure.message)) if view.failure else ""


def _print_job(view: JobView) -> None:
    facts = {
        "job": view.job_id,
        "task": view.task,
        "queue": view.queue,
        "tenant": view.tenant_id,
        "state": state_text(view.state) if on_terminal() else view.state.value,
        "attempt": f"{view.attempt} ({_retries(view)})",
        "created": instant(view.created_at_ms),
        "trace": view.trace_id,
        "arguments": _text(view.payload),
        "result": _text(view.result),
        "error": error_text(view.failure) if view.failure else "",
    }
    out = console()
    for name, value in facts.items():
        if value:
            out.print(Text.assemble((f"{name:<10} ", "bold" if on_terminal() else ""), value))


def _retries(view: JobView) -> str:
    lost = number_of(view.meta.lost_leases, "lost lease")
    return f"{number_of(view.meta.retry_count, 'retry', 'retries')}, {lost}"


def _text(encoded: bytes | None) -> str:
    return "" if encoded is None else shorten(encoded.decode("utf-8", "replace"), 400)
