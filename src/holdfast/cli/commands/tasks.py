"""`holdfast tasks`: the tasks that workers have announced, and their arguments."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, Queues, command
from holdfast.cli.output import emit_facts, emit_json, emit_rows, span
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.clock import iso
from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import Priority
from holdfast.operations.tasks import TaskInfo

_COLUMNS: Final = ("task", "queue", "arguments", "schema", "last announced")


tasks = typer.Typer(help="List and show the tasks that workers have announced.", no_args_is_help=True)


@command(
    tasks,
    "list",
    examples=(
        "holdfast tasks list",
        "holdfast tasks list --queue mail",
        "holdfast tasks list --json | jq -r '.[].task'",
    ),
)
async def list_tasks(at: EngineTarget, queue: Queues = None, as_json: AsJson = False) -> None:
    """List tasks with their queues and arguments; optional arguments are in brackets.

    A task is listed once a worker that has it was started, also after that worker has stopped.
    """
    async with open_operations(at) as (operations, principal):
        found = await operations.tasks.list(principal, queue or ())
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json([_summary(info) for info in found])
    else:
        emit_rows(_COLUMNS, [_row(info, now_ms) for info in found], empty="no worker has announced a task here")


@command(
    tasks,
    "show",
    examples=("holdfast tasks show send_mail", "holdfast tasks show send_mail --json | jq '.schemas[0].schema'"),
)
async def show(
    at: EngineTarget,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")],
    as_json: AsJson = False,
) -> None:
    """Show a task: its queue, and the JSON Schema of its arguments.

    During a deployment a task may have several schemas; the latest is the first.
    """
    async with open_operations(at) as (operations, principal):
        info = await operations.tasks.get(principal, task)
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json({"task": info.task, "schemas": [_schema(each) for each in info.schemas]})
        return
    emit_facts([("task", info.task)])
    for each in info.schemas:
        facts = {
            "queue": each.queue,
            "priority": _priority(each),
            "schema": each.fingerprint,
            "announced": f"{span(max(0, now_ms - each.seen_at_ms))} ago",
        }
        emit_facts(facts.items())
        if each.document is not None:
            emit_json(each.document)


def _row(info: TaskInfo, now_ms: int) -> tuple[str, ...]:
    latest, arguments = info.latest, info.arguments
    others = f" and {info.current - 1} more" if info.current > 1 else ""
    return (
        info.task,
        latest.queue,
        "unknown" if arguments is None else ", ".join(arguments),
        latest.fingerprint + others,
        f"{span(max(0, now_ms - latest.seen_at_ms))} ago",
    )


def _summary(info: TaskInfo) -> dict[str, Any]:
    latest = info.latest
    return {
        "task": info.task,
        "queue": latest.queue,
        "priority": _priority(latest),
        "arguments": info.arguments,
        "fingerprint": latest.fingerprint,
        "current_schemas": info.current,
        "seen_at": iso(latest.seen_at_ms),
    }


def _schema(announced: AnnouncedTask) -> dict[str, Any]:
    return {
        "fingerprint": announced.fingerprint,
        "queue": announced.queue,
        "priority": _priority(announced),
        "schema": announced.document,
        "seen_at": iso(announced.seen_at_ms),
    }


def _priority(announced: AnnouncedTask) -> str:
    return Priority(announced.priority).name.lower()
