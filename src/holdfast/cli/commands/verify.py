"""`holdfast verify`: proves that the ledger tells legal stories, or that a deployment keeps the protocol's promises."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from holdfast.cli.command import AsJson, ExitCode, command
from holdfast.cli.lifecycle import on_signals
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.parse import parse_time_or_age
from holdfast.cli.session import EngineTarget, open_stores
from holdfast.errors import HoldfastError, InvalidOption

if TYPE_CHECKING:
    from holdfast.ledger.verify import LedgerReport
    from holdfast.settings import Settings
    from holdfast.verification.acceptance.fixture import AcceptanceReport as Acceptance
    from holdfast.verification.acceptance.fixture import Criterion, CriterionResult


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
            "holdfast verify --deployment",
            "holdfast verify --deployment --json | jq '.results[] | select(.verdict == \"failed\")'",
        ),
    )(verify)


async def verify(
    at: EngineTarget,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Read every story in the ledger and prove it; changes nothing.")
    ] = False,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment",
            help="Run the protocol's acceptance criteria on your own servers, in a namespace and a schema of their own "
            "that are removed again; takes less than a minute.",
        ),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="With --ledger: only jobs created since then, or so long ago (1h, 2d).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that the ledger tells legal stories, or that a deployment keeps what the protocol promises.

    --ledger reads every job's events, at one moment, beside busy workers: no gap, only legal moves, at most one end,
    rows that agree, dead letters. Forks and anomalies are what an outage of the engine leaves; they are counted, and no
    faults.

    --deployment runs a few dozen jobs on HOLDFAST_URL and HOLDFAST_LEDGER, kills and pauses workers of its own, and
    looks at what became of them. Nothing of yours is touched, and nothing is left behind.

    Exit code 1 if anything is wrong.
    """
    if ledger == deployment:
        raise InvalidOption("say what to verify: --ledger (the stories in it) or --deployment (your servers)")
    if deployment:
        if since is not None:
            raise InvalidOption("--since goes with --ledger")
        await _verify_deployment(at.settings(), as_json=as_json)
        return
    from holdfast.ledger.verify import verify_ledger

    async with open_stores(at) as both:
        start = None if since is None else parse_time_or_age(since, "--since", await both.engine.now_ms())
        report = await verify_ledger(both.require_queries(), start, _progress if sys.stderr.isatty() else None)
    if as_json:
        emit_json(_document(report))
    else:
        _print(report)
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _progress(report: LedgerReport) -> None:
    print(f"\r{report.jobs:,} jobs, {report.events:,} events …", end="", file=sys.stderr, flush=True)


def _print(report: LedgerReport) -> None:
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


def _document(report: LedgerReport) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": report.ok, **document}


# A deployment --------------------------------------------------------------------------------------


async def _verify_deployment(settings: Settings, *, as_json: bool) -> None:
    from holdfast.verification.acceptance.run import verify_deployment

    left: list[str] = []
    running = asyncio.create_task(verify_deployment(settings, _step if sys.stderr.isatty() else None, left))
    try:
        # Also when it is told to end: what it has written is removed first.
        with on_signals(lambda: _cancel(running)):
            report = await running
    except asyncio.CancelledError:
        note("interrupted; what the check had written was removed" if not left else "interrupted")
        _tell(left)
        raise KeyboardInterrupt from None
    except HoldfastError:
        _tell(left)
        raise
    if as_json:
        emit_json({"ok": report.ok, **msgspec.to_builtins(report)})
    else:
        _print_acceptance(report)
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _tell(remarks: list[str]) -> None:
    for remark in remarks:
        note(remark)


def _cancel(running: asyncio.Task[Acceptance]) -> None:
    running.cancel()


def _step(criterion: Criterion, result: CriterionResult | None) -> None:
    word = "…" if result is None else str(result.verdict)
    print(f"\r\033[K{criterion.id} {criterion.title}: {word}", end="", file=sys.stderr, flush=True)


def _print_acceptance(report: Acceptance) -> None:
    from holdfast.verification.acceptance.fixture import CriterionStatus

    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
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
    _tell(report.notes)
