"""`holdfast verify`: check the histories in the ledger, or the acceptance criteria on a deployment."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from holdfast.cli.command import AsJson, ExitCode, command
from holdfast.cli.lifecycle import on_signals
from holdfast.cli.output import emit_json, emit_line, emit_rows, note, progress_line
from holdfast.cli.parse import parse_time_or_age
from holdfast.cli.session import EngineTarget, open_stores
from holdfast.errors import HoldfastError, InvalidOption

if TYPE_CHECKING:
    from holdfast.ledger.verify import LedgerReport
    from holdfast.settings import Settings
    from holdfast.verification.acceptance.fixture import AcceptanceReport as Acceptance
    from holdfast.verification.acceptance.fixture import Criterion, CriterionResult


#: Maximum number of faults printed; all are counted.
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
            "holdfast verify --deployment",
            "holdfast verify --deployment --json | jq '.results[] | select(.verdict == \"failed\")'",
        ),
    )(verify)


async def verify(
    at: EngineTarget,
    ledger: Annotated[bool, typer.Option("--ledger", help="Check every job history in the ledger; read-only.")] = False,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment",
            help="Run the protocol's acceptance criteria on your own servers, in a separate namespace and schema that "
            "are removed afterwards; takes less than a minute.",
        ),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="With --ledger: only jobs created since this instant or age (1h, 2d).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every job history in the ledger, or the protocol's guarantees on a deployment.

    --ledger reads the events of all jobs from one snapshot, while workers may run. It checks for gaps, illegal moves,
    more than one final event, rows that differ from their events, and missing dead letters. Forks and anomalies, which
    an outage of the engine leaves, are counted but are not faults.

    --deployment runs a few dozen jobs on HOLDFAST_URL and HOLDFAST_LEDGER, kills and pauses its own workers, and checks
    the outcomes. It does not touch your data and removes everything it wrote.

    Exit code 1 if a check fails.
    """
    if ledger == deployment:
        raise InvalidOption(
            "nothing to verify is named; pass either --ledger (its histories) or --deployment (your servers)"
        )
    if deployment:
        if since is not None:
            raise InvalidOption("--since requires --ledger")
        await _verify_deployment(at.settings(), as_json=as_json)
        return
    from holdfast.ledger.verify import verify_ledger

    async with open_stores(at) as session:
        start = None if since is None else parse_time_or_age(since, "--since", await session.engine.now_ms())
        report = await verify_ledger(session.require_queries(), start, _progress if sys.stderr.isatty() else None)
    if as_json:
        emit_json(_document(report))
    else:
        _print(report)
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _progress(report: LedgerReport) -> None:
    progress_line(f"{report.jobs:,} jobs, {report.events:,} events …")


def _print(report: LedgerReport) -> None:
    if sys.stderr.isatty() and report.events:
        emit_line(out=sys.stderr)
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


def _document(report: LedgerReport) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": report.ok, **document}


# A deployment --------------------------------------------------------------------------------------


async def _verify_deployment(settings: Settings, *, as_json: bool) -> None:
    from holdfast.verification.acceptance.run import verify_deployment

    left: list[str] = []
    running = asyncio.create_task(verify_deployment(settings, _step if sys.stderr.isatty() else None, left))
    try:
        # A signal cancels the run, so that it removes what it wrote before it ends.
        with on_signals(lambda: _cancel(running)):
            report = await running
    except asyncio.CancelledError:
        note("interrupted; everything the check wrote was removed" if not left else "interrupted")
        _print_notes(left)
        raise KeyboardInterrupt from None
    except HoldfastError:
        _print_notes(left)
        raise
    if as_json:
        emit_json({"ok": report.ok, **msgspec.to_builtins(report)})
    else:
        _print_acceptance(report)
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _print_notes(remarks: list[str]) -> None:
    for remark in remarks:
        note(remark)


def _cancel(running: asyncio.Task[Acceptance]) -> None:
    running.cancel()


def _step(criterion: Criterion, result: CriterionResult | None) -> None:
    word = "…" if result is None else str(result.verdict)
    progress_line(f"{criterion.id} {criterion.title}: {word}")


def _print_acceptance(report: Acceptance) -> None:
    from holdfast.verification.acceptance.fixture import CriterionStatus

    if sys.stderr.isatty():
        progress_line()
    colours = {
        CriterionStatus.PASSED: "green",
        CriterionStatus.FAILED: "bold red",
        CriterionStatus.NOT_APPLICABLE: "dim",
    }
    rows: list[tuple[str | Text, ...]] = [
        (one.id, one.title, Text(one.verdict, colours[one.verdict]), f"{one.seconds:.2f}", one.seen)
        for one in report.results
    ]
    emit_rows(("criterion", "title", "verdict", "seconds", "seen"), rows, empty="", texts=1)
    where = report.url if report.ledger is None else f"{report.url}, ledger {report.ledger}"
    counted = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in CriterionStatus)
    note(f"{where}: {counted}, in {report.seconds:.1f} s")
    _print_notes(report.notes)
