"""`holdfast reconcile`: restore jobs that the engine has lost, without waiting for upkeep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.command import AsJson, Queues, command
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.session import EngineTarget
from holdfast.errors import InvalidOption
from holdfast.execution.backend import backend_of
from holdfast.operations.jobs import unreachable_error

if TYPE_CHECKING:
    from holdfast.upkeep.reconciler import LostJob, ReconcileReport


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list the jobs that would be restored.")]


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
    """Compare the ledger's open jobs with the engine, and restore those that the engine has lost.

    Safe to run at any time and repeatedly, while workers run. The ledger must have caught up with the engine's feed, so
    a worker or `holdfast upkeep` must be running.
    """
    from holdfast.upkeep.reconciler import Reconciler

    async with Holdfast(settings=at.settings()) as holdfast:
        ledger = backend_of(holdfast).ledger
        if ledger is None:
            raise InvalidOption("there is no ledger to compare with; set HOLDFAST_LEDGER")
        if ledger.projection is None:
            note("engine and ledger are one file; there is nothing to reconcile")
        report = await Reconciler(holdfast.engine, ledger, queue or ()).reconcile(dry_run=dry_run)
    if as_json:
        emit_json(_document(report, dry_run=dry_run))
    else:
        _print(report, dry_run=dry_run)
    if report.unreachable:
        raise unreachable_error(report.unreachable)


def _print(report: ReconcileReport, *, dry_run: bool) -> None:
    columns = ("job", "queue", "tenant", "task", "state", "attempt", "retries")
    emit_rows(columns, [_row(job) for job in report.jobs], empty="no lost jobs")
    done = "would be restored" if dry_run else f"lost, {report.restored} restored"
    note(f"{report.checked} open jobs checked, {report.lost} {done}")
    for reason, count in report.skipped.items():
        note(f"{count} skipped: {reason}")


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
        "unreachable": sorted(report.unreachable),
        "jobs": [msgspec.structs.asdict(job.key) | _own(job) for job in report.jobs],
    }


def _own(job: LostJob) -> dict[str, Any]:
    return {
        "task": job.task,
        "state": job.state.value,
        "attempt": job.attempt,
        "retry_count": job.retry_count,
    }
