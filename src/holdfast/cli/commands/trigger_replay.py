"""`holdfast trigger replay`: publish a trigger's dead letters to its queue again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.commands.triggers import File, Name, load
from holdfast.cli.commands.triggers import trigger as trigger
from holdfast.cli.confirm import All, DryRun, Rate, Yes, confirm, parse_rate, print_report, with_progress
from holdfast.cli.output import number_of
from holdfast.cli.parse import Reason
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.errors import NotFound, UsageError

if TYPE_CHECKING:
    from holdfast.core.principal import Principal
    from holdfast.operations.bulk import BulkReport
    from holdfast.operations.operations import Operations
    from holdfast.triggers.config import TriggerEntry


@command(
    trigger,
    "replay",
    examples=(
        "holdfast trigger replay triggers.yaml orders --dry-run --all",
        "holdfast trigger replay triggers.yaml orders --limit 10 --reason 'try some first'",
        "holdfast trigger replay triggers.yaml orders --all --rate 20/s --reason 'the parser is fixed' --yes",
    ),
)
async def replay(
    at: EngineTarget,
    file: File,
    name: Name,
    everything: All = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the oldest N.", show_default=False)
    ] = None,
    rate: Rate = "50/s",
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Publish the dead letters of a trigger to its queue again, as the original messages.

    A dead letter is acknowledged after the broker has confirmed its message. If this command is killed in between, the
    next run publishes some messages a second time; the trigger recognises them by `x-replay-of`. Messages that fail
    again during the run stay dead letters. On Redis Streams and SQS, dead letters that a killed command had in flight
    can be replayed after the visibility timeout.
    """
    if everything == (limit is not None):
        raise UsageError("no unique selection of dead letters; pass either --all or --limit N (the oldest N)")
    entry = _entry(load(file), name)
    per_s = parse_rate(rate)
    async with open_operations(at) as (operations, principal):
        report = await _replay(operations, principal, entry, limit, per_s, reason, dry_run=dry_run, yes=yes)
    print_report(report, "message", as_json=as_json)


async def _replay(
    operations: Operations,
    principal: Principal,
    entry: TriggerEntry,
    limit: int | None,
    rate: float,
    reason: str,
    *,
    dry_run: bool,
    yes: bool,
) -> BulkReport:
    from holdfast.operations.messages import check_replay
    from holdfast.triggers.replay import replay_dead_letters

    check_replay(principal)

    async def audit(**what: Any) -> None:
        if operations.ledger is not None:
            request = {"queue_name": entry.queue_name, "limit": limit}
            await operations.triggers.record_replay(principal, entry.name, reason=reason, what=request | what)

    many = partial(replay_dead_letters, entry, limit=limit, rate_per_s=rate)
    counted = await many(dry_run=True)
    if dry_run:
        return counted
    if counted.matched:
        dead_letters = number_of(counted.matched, "dead letter")
        confirm(f"Replay {dead_letters} to {entry.queue_name}, {rate:g} a second?", yes=yes)
    # Before anything is published, so that a killed command leaves an audit entry.
    await audit(status="started")
    report = await with_progress("replaying", counted.matched, lambda progress: many(progress=progress))
    await audit(status="ended", done=report.done, failed=report.failed)
    return report


def _entry(entries: list[TriggerEntry], name: str) -> TriggerEntry:
    for entry in entries:
        if entry.name == name:
            return entry
    raise NotFound("trigger", name[:200])
