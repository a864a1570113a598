"""`holdfast trigger`: run, check, plan, pause and resume triggers, and list their executions."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.commands.worker import Level, LogJson, LogLevel, MetricsHost, MetricsPort
from holdfast.cli.lifecycle import LOOPBACK, run_until_signal
from holdfast.cli.output import emit_facts, emit_json, emit_line, emit_rows, instant, note, shorten, span
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.errors import InvalidOption
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.observe.log_formats import log_to_stderr
from holdfast.observe.prometheus import serve_metrics
from holdfast.operations.metrics import render_metrics
from holdfast.triggers.config import plan_capacity

if TYPE_CHECKING:
    from holdfast.ledger.port.messages import Execution
    from holdfast.operations.messages import TriggerInfo
    from holdfast.triggers.config import TriggerEntry


trigger = typer.Typer(
    help="Run, check, plan, pause and replay triggers, which turn broker messages into jobs.", no_args_is_help=True
)

_log: Final = logging.getLogger("holdfast.cli")

File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with the triggers.", show_default=False)]
App = Annotated[
    str | None,
    typer.Argument(
        metavar="APP",
        help="App whose tasks get the messages: module:app or file.py:app. Default: submit without checks.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the trigger.")]
Reason = Annotated[str, typer.Option(help="Reason for the audit log.")]


@command(
    trigger,
    "run",
    examples=(
        "holdfast trigger run triggers.yaml shop.tasks:app",
        "holdfast trigger run triggers.yaml --url redis://127.0.0.1:6379/0 --metrics-port 9101 --log-json",
    ),
)
async def run(
    at: EngineTarget,
    file: File,
    app: App = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Consume messages and pass them to their runtimes until a signal.

    All triggers of the file run in this process; any number of processes may run the same file. On SIGTERM or Ctrl-C it
    stops consuming and waits up to 30 s for messages in flight; on a second signal it does not wait. With
    --metrics-port, /readyz reports whether messages can be passed on.
    """
    from holdfast.triggers.service import TriggerService

    log_to_stderr(log_level, as_json=log_json)
    entries = load(file)
    async with at.some_app(app) as holdfast:
        backend = backend_of(holdfast)
        backend.require_ledger()
        triggers = TriggerService(holdfast, entries)
        if backend.ledger is None:
            _log.warning(
                "no ledger: triggers run, but their executions are not recorded; set HOLDFAST_LEDGER, which "
                "`holdfast trigger status`, pause and resume also need"
            )
        with run_until_signal(triggers.stop):
            async with AsyncExitStack() as stack:
                if metrics_port is not None:
                    server = serve_metrics(
                        metrics_host, metrics_port, lambda: render_metrics(holdfast), triggers.readiness
                    )
                    await stack.enter_async_context(server)
                await triggers.run()
    _log.info("triggers ended")


@command(
    trigger,
    "check",
    examples=(
        "holdfast trigger check triggers.yaml",
        "holdfast trigger check triggers.yaml shop.tasks:app --connect",
    ),
)
async def check(
    at: EngineTarget,
    file: File,
    app: App = None,
    connect: Annotated[bool, typer.Option("--connect", help="Also connect to the brokers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report all errors in a trigger file, each with its path; with an APP also tasks that it does not have.

    Nothing is consumed.
    """
    from holdfast.triggers.service import check_entries

    entries = load(file)
    await check_entries(at.some_app(app), entries, connect=connect)
    if as_json:
        emit_json([_entry_document(entry) for entry in entries])
        return
    columns = ("trigger", "broker", "queue", "group", "concurrency", "policy", "to")
    rows = [
        (
            entry.name,
            entry.adapter.type,
            entry.queue_name,
            entry.consumer_group,
            str(entry.concurrency),
            str(entry.ack_policy),
            _target(entry),
        )
        for entry in entries
    ]
    emit_rows(columns, rows, empty="no triggers")
    note("no errors" + (", all brokers answered" if connect else ""))


@command(
    trigger,
    "status",
    examples=("holdfast trigger status", "holdfast trigger status --json | jq '.[] | select(.status != \"healthy\")'"),
)
async def status(at: EngineTarget, as_json: AsJson = False) -> None:
    """List triggers: processes, health, and who paused them."""
    async with open_operations(at) as (operations, principal):
        views = await operations.triggers.list(principal)
    _print(views, as_json=as_json)


@command(
    trigger,
    "executions",
    examples=(
        "holdfast trigger executions --queue orders --limit 20",
        "holdfast trigger executions --status failed --status unparsable",
        "holdfast trigger executions --message orders/0/17 --json | jq '.[0].agent_run_id'",
    ),
)
async def executions(
    at: EngineTarget,
    queue: Annotated[
        str, typer.Option("--queue", "-q", metavar="NAME", help="Only this queue of the broker.", show_default=False)
    ] = "",
    message: Annotated[
        str, typer.Option("--message", "-m", metavar="ID", help="Only the message with this id.", show_default=False)
    ] = "",
    statuses: Annotated[
        list[ExecutionStatus] | None,
        typer.Option("--status", "-s", help="Only with this status; repeatable. Default: all.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List executions of messages, newest first."""
    async with open_operations(at) as (operations, principal):
        found = await operations.triggers.executions(
            principal, queue_name=queue, message_id=message, statuses=statuses or (), limit=limit
        )
    if as_json:
        emit_json([execution_document(each) for each in found])
        return
    columns = ("when", "queue", "message", "event", "tenant", "status", "took", "retries", "run", "error")
    emit_rows(columns, [_execution_row(each) for each in found], empty="no executions")


@command(
    trigger,
    "plan",
    examples=(
        "holdfast trigger plan --rate 8.33 --seconds-per-message 2 --message-bytes 2000 --waiting",
        "holdfast trigger plan --rate 100 --seconds-per-message 0.05 --message-bytes 500 --cores 4 --json",
    ),
)
async def plan(
    at: EngineTarget,
    rate: Annotated[float, typer.Option(help="Messages per second.", show_default=False)],
    seconds_per_message: Annotated[
        float, typer.Option(help="Processing time of one message, in seconds.", show_default=False)
    ],
    message_bytes: Annotated[float, typer.Option(help="Size of one message, in bytes.", show_default=False)],
    waiting: Annotated[
        bool, typer.Option("--waiting", help="The work waits for I/O and does not keep a core busy.")
    ] = False,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of the machine. Default: this machine's.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the concurrency and memory that a message rate needs; nothing is measured."""
    capacity = plan_capacity(
        rate=rate,
        seconds_per_message=seconds_per_message,
        message_bytes=message_bytes,
        cores=cores or os.cpu_count() or 1,
        waiting=waiting,
    )
    if as_json:
        emit_json(
            {
                "concurrency": capacity.concurrency,
                "required": capacity.required,
                "enough": capacity.enough,
                "rate": round(capacity.rate, 3),
                "memory_mb": round(capacity.memory_mb, 1),
                "processes": capacity.processes,
            }
        )
        return
    facts = {"concurrency": str(capacity.concurrency), "memory": f"{capacity.memory_mb:.0f} MB"}
    if not capacity.enough:
        facts["processes"] = f"{capacity.processes}, each on a separate machine"
    emit_facts(facts.items(), 12)
    if not capacity.enough:
        note(
            f"the rate needs a concurrency of {capacity.required}; one machine's cores allow {capacity.concurrency} "
            f"({capacity.rate:.4g} messages/s); if the work waits for I/O rather than computes, pass --waiting"
        )


@command(
    trigger,
    "pause",
    examples=("holdfast trigger pause orders --reason 'the warehouse moves'", "holdfast trigger pause orders --json"),
)
async def pause(at: EngineTarget, name: Name, reason: Reason = "", as_json: AsJson = False) -> None:
    """Pause a trigger. All its processes stop consuming within seconds; messages in flight are finished."""
    async with open_operations(at) as (operations, principal):
        view = await operations.triggers.pause(principal, name, reason=reason)
    _print([view], as_json=as_json)


@command(
    trigger, "resume", examples=("holdfast trigger resume orders --reason 'moved'", "holdfast trigger resume orders")
)
async def resume(at: EngineTarget, name: Name, reason: Reason = "", as_json: AsJson = False) -> None:
    """Resume a trigger in all its processes."""
    async with open_operations(at) as (operations, principal):
        view = await operations.triggers.resume(principal, name, reason=reason)
    _print([view], as_json=as_json)


def load(file: Path) -> list[TriggerEntry]:
    """Load the file's triggers. Prints each error on a separate line, then raises `InvalidOption`."""
    from holdfast.triggers.config_file import InvalidTriggers, load_file

    try:
        return load_file(file)
    except InvalidTriggers as exc:
        for mistake in exc.mistakes:
            # Not redacted: they hold no values, and masking the text after `password:` would hide the remedy.
            emit_line(f"{file}: {mistake}", out=sys.stderr)
        raise InvalidOption(f"{file} has errors; fix those listed above") from exc


# Printing ----------------------------------------------------------------------------------------------


def _print(views: Any, *, as_json: bool) -> None:
    if as_json:
        emit_json([_document(view) for view in views])
        return
    columns = ("trigger", "status", "broker", "queue", "processes", "workers", "paused by", "detail")
    emit_rows(columns, [_row(view) for view in views], empty="no trigger has reported here")


def _document(view: TriggerInfo) -> dict[str, Any]:
    pause = view.pause
    return {
        "name": view.name,
        "status": view.status,
        "adapter": view.adapter,
        "queue_name": view.queue_name,
        "active_workers": view.active_workers,
        "paused": pause is not None,
        "paused_by": None if pause is None else pause.paused_by,
        "pause_reason": None if pause is None else pause.reason,
        "paused_at": None if pause is None else instant(pause.paused_at_ms),
        "processes": [
            {"process": each.process, "seen_at": instant(each.seen_at_ms), "health": dict(each.health)}
            for each in view.processes
        ],
    }


def _row(view: TriggerInfo) -> tuple[str, ...]:
    pause = view.pause
    if pause is not None:
        detail = f"since {instant(pause.paused_at_ms)}" + (f": {shorten(pause.reason)}" if pause.reason else "")
    else:
        unhealthy = [each.process for each in view.processes if each.health.get("status") != "healthy"]
        detail = f"unhealthy: {', '.join(unhealthy)}" if unhealthy else ""
    return (
        view.name,
        view.status,
        view.adapter or "–",
        view.queue_name or "–",
        str(len(view.processes)),
        str(view.active_workers),
        "–" if pause is None else pause.paused_by,
        detail,
    )


def execution_document(row: Execution) -> dict[str, Any]:
    """Build an execution's document for `--json`."""
    return {
        "tenant_id": row.tenant_id,
        "id": row.id,
        "message_id": row.message_id,
        "queue_name": row.queue_name,
        "event_name": row.event_name,
        "status": str(row.status),
        "started_at": instant(row.started_at_ms),
        "completed_at": instant(row.completed_at_ms),
        "duration_ms": row.completed_at_ms - row.started_at_ms,
        "agent_run_id": row.agent_run_id,
        "error_message": row.error_message,
        "retry_count": row.retry_count,
        "trace_id": row.trace_id,
    }


def _execution_row(row: Execution) -> tuple[str, ...]:
    return (
        instant(row.started_at_ms),
        row.queue_name,
        row.message_id,
        row.event_name or "–",
        row.tenant_id,
        str(row.status),
        span(row.completed_at_ms - row.started_at_ms),
        str(row.retry_count),
        row.agent_run_id or "–",
        shorten(row.error_message),
    )


def _entry_document(entry: TriggerEntry) -> dict[str, Any]:
    """Build a trigger's document without its connection, which may hold credentials."""
    document = entry.model_dump(mode="json", exclude={"adapter": {"connection"}, "runtime": {"token"}})
    return document | {"runtime": {entry.runtime.kind: _target(entry)}}


def _target(entry: TriggerEntry) -> str:
    runtime = entry.runtime
    return runtime.task or runtime.callable or runtime.url or ""
