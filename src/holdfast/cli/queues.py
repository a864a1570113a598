"""`holdfast queues`: how full they are, and an operator's hand on them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
import typer

from holdfast.cli.command import AsJson, Connection, Queues, command
from holdfast.cli.lookup import queues_or_all
from holdfast.cli.output import emit_json, emit_rows
from holdfast.core.states import FINAL, State
from holdfast.engine.port import Control, Engine, QueueStats

queues = typer.Typer(help="How full queues are; pause and resume them.", no_args_is_help=True)

_OPEN: Final = tuple(state for state in State if state not in FINAL)

Names = Annotated[list[str], typer.Argument(metavar="QUEUE...", help="One or more queues.")]
Intake = Annotated[bool, typer.Option("--intake", help="New submissions, not the work on what is there.")]


@command(queues, "list", examples=("holdfast queues list", "holdfast queues list --json | jq '.[].states.queued'"))
async def list_queues(at: Connection, queue: Queues = None, as_json: AsJson = False) -> None:
    """Every queue: open jobs by state, workers, dead letters, controls."""
    async with at.engine() as engine:
        found = [await engine.stats(name) for name in await queues_or_all(engine, queue)]
    if as_json:
        emit_json([_document(stats) for stats in found])
        return
    columns = ("queue", *(state.value for state in _OPEN), "delayed", "workers", "dead letters", "control")
    emit_rows(columns, [_row(stats) for stats in found], empty="no queue has ever had a job here")


@command(
    queues,
    "pause",
    examples=("holdfast queues pause mail", "holdfast queues pause mail --intake"),
)
async def pause(at: Connection, names: Names, intake: Intake = False, as_json: AsJson = False) -> None:
    """Workers take nothing more from the queue; what runs goes on. With --intake new jobs are refused instead."""
    await _control(at, names, intake=intake, paused=True, as_json=as_json)


@command(
    queues,
    "resume",
    examples=("holdfast queues resume mail", "holdfast queues resume mail --intake"),
)
async def resume(at: Connection, names: Names, intake: Intake = False, as_json: AsJson = False) -> None:
    """Workers take jobs from the queue again; with --intake new jobs are accepted again."""
    await _control(at, names, intake=intake, paused=False, as_json=as_json)


async def _control(at: Connection, names: list[str], *, intake: bool, paused: bool, as_json: bool) -> None:
    async with at.engine() as engine:
        changed = {name: await _set(engine, name, intake=intake, paused=paused) for name in names}
    if as_json:
        emit_json([{"queue": name} | _plain(control) for name, control in changed.items()])
        return
    for name, control in changed.items():
        print(f"{name}\t{_words(control)}")


async def _set(engine: Engine, queue: str, *, intake: bool, paused: bool) -> Control:
    """Change one of the two and leave the other as it is."""
    before = await engine.control(queue)
    change = {"intake_paused": paused} if intake else {"paused": paused}
    after = msgspec.structs.replace(before, **change)
    await engine.set_control(queue, after)
    return after


def _document(stats: QueueStats) -> dict[str, Any]:
    return {
        "queue": stats.queue,
        "states": {state.value: stats.states.get(state, 0) for state in _OPEN},
        "delayed": stats.delayed,
        "workers": stats.workers,
        "dead_letters": stats.dead_letters,
        "feed_entries": stats.feed_entries,
        **_plain(stats.control),
    }


def _row(stats: QueueStats) -> tuple[str, ...]:
    return (
        stats.queue,
        *(str(stats.states.get(state, 0)) for state in _OPEN),
        str(stats.delayed),
        str(stats.workers),
        str(stats.dead_letters),
        _words(stats.control),
    )


def _plain(control: Control) -> dict[str, Any]:
    return {
        "paused": control.paused,
        "intake_paused": control.intake_paused,
        "concurrency": control.concurrency,
    }


def _words(control: Control) -> str:
    words = [
        *(["paused"] if control.paused else []),
        *(["intake paused"] if control.intake_paused else []),
        *([f"concurrency {control.concurrency}"] if control.concurrency is not None else []),
    ]
    return ", ".join(words) or "open"
