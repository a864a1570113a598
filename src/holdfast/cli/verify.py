"""`holdfast verify`: reads the ledger and proves that it tells legal stories."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from holdfast.cli.command import AsJson, Connection, command
from holdfast.cli.exits import ExitCode
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.parse import when
from holdfast.cli.stores import stores
from holdfast.errors import InvalidOption

if TYPE_CHECKING:
    from holdfast.ledger.verify import Report

#: Faults that are shown; all are counted.
_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "verify",
        examples=(
            "holdfast verify --ledger",
            "holdfast verify --ledger --since 2d",
            "holdfast verify --ledger --json | jq .fault_count",
        ),
    )(verify)


async def verify(
    at: Connection,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Check the ledger (the only thing to check so far).")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only jobs created since then, or so long ago (1h, 2d).", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every job's events and prove them: no gap, only legal moves, at most one end, rows that agree, dead letters.

    Reads all of it at one moment, beside busy workers. Exit code 1 if anything is wrong. Forks and anomalies are what
    an outage of the engine leaves; they are counted, and no faults.
    """
    from holdfast.ledger.verify import verify_ledger

    if not ledger:
        raise InvalidOption("say what to verify: --ledger")
    async with stores(at) as both:
        start = None if since is None else when(since, "--since", await both.engine.now_ms())
        report = await verify_ledger(both.remembered(), start, _progress if sys.stderr.isatty() else None)
    if as_json:
        emit_json(_document(report))
    else:
        _print(report)
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _progress(report: Report) -> None:
    print(f"\r{report.jobs:,} jobs, {report.events:,} events …", end="", file=sys.stderr, flush=True)


def _print(report: Report) -> None:
    if sys.stderr.isatty() and report.events:
        print(file=sys.stderr)
    counted = {
        "jobs": report.jobs,
        "still open": report.open_jobs,
        "events": report.events,
        "dead letters": report.dead_letters,
        "restored": report.restores,
        "forks": report.forks,
        "anomalies": report.anomalies,
        "faults": report.fault_count,
    }
    emit_rows(("what", "count"), [(name, str(count)) for name, count in counted.items()], empty="")
    for fault in report.faults[:_SHOWN]:
        note(str(fault))
    if report.fault_count > _SHOWN:
        note(f"… and {report.fault_count - _SHOWN} more")


def _document(report: Report) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": report.ok, **document}
