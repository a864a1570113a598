"""`holdfast reconcile`: puts back jobs that the engine has lost, now instead of at the next pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.command import AsJson, Queues, command
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.session import EngineTarget
from holdfast.errors import InvalidOption
from holdfast.operations.jobs import unreachable_error

if TYPE_CHECKING:
    from holdfast.upkeep.reconciler import LostJob, ReconcileReport


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be put back.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "reconcile",
        examples=(
            "holdfast reconcile --dry-run",
            "holdfast reconcile --queue mail",
            "holdfast reconcile --json | jq .restored",
        ),
    )(reconcile)


async def reconcile(at: EngineTarget, queue: Queues = None, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Compare the ledger's open jobs with the engine, and put back those that the engine has lost.

    Safe at any time, as often as you like, beside busy workers. The ledger must be caught up with the engine's feed: a
    worker or `holdfast upkeep` runs.
    """
    from holdfast.upkeep.reconciler import Reconciler

    async with Holdfast(settings=at.settings()) as holdfast:
        ledger = holdfast.ledger_backend
        if ledger is None:
            raise InvalidOption("there is no ledger to compare with: set HOLDFAST_LEDGER")
        if ledger.projection is None:
            note("engine and ledger are one file here: neither can lose what the other has")
        report = await Reconciler(holdfast.engine, ledger, queue or ()).reconcile(dry_run=dry_run)
    if as_json:
        emit_json(_document(report, dry_run=dry_run))
    else:
        _print(report, dry_run=dry_run)
    if report.away:
        raise unreachable_error(report.away)


def _print(report: ReconcileReport, *, dry_run: bool) -> None:
    columns = ("job", "queue", "tenant", "task", "state", "attempt", "retries")
    emit_rows(columns, [_row(job) for job in report.jobs], empty="the engine has lost no job")
    done = "would be put back" if dry_run else f"lost, {report.restored} put back"
    note(f"{report.checked} open jobs looked at, {report.lost} {done}")
    for reason, count in report.skipped.items():
        note(f"{count} left alone: {reason}")


def _row(job: LostJob) -> tuple[str, ...]:
    key = job.key
    return (
        key.job_id,
        key.queue,
        key.tenant_id,
        job.task,
        job.state.value,
        str(job.attempt),
        str(job.retry_count),
    )


def _document(report: ReconcileReport, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "checked": report.checked,
        "lost": report.lost,
        "restored": report.restored,
        "skipped": report.skipped,
        "away": sorted(report.away),
        "jobs": [msgspec.structs.asdict(job.key) | _own(job) for job in report.jobs],
    }


def _own(job: LostJob) -> dict[str, Any]:
    return {
        "task": job.task,
        "state": job.state.value,
        "attempt": job.attempt,
        "retry_count": job.retry_count,
    }
