"""Bulk operations: dry run, confirmation prompt, progress bar and report."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from holdfast.cli.command import ExitCode
from holdfast.cli.output import console, emit_json, emit_line, emit_rows, note, number_of, read_answer
from holdfast.errors import InvalidOption
from holdfast.observe.terminal import progress_bars
from holdfast.operations.bulk import BulkReport, BulkResult
from holdfast.operations.bulk import Progress as BulkProgress

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")]
All = Annotated[bool, typer.Option("--all", help="All, if no id and no filter is given.")]
Rate = Annotated[str, typer.Option(metavar="N/s", help="Maximum rate, to leave room for other jobs.")]


def parse_rate(text: str) -> float:
    """Parse `50/s`, `50` or `600/m` into a rate per second."""
    number, _, unit = text.partition("/")
    per_s = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0}.get(unit)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if per_s is None or not 0 < value <= 1_000_000:
        raise InvalidOption(f"--rate={text!r} is not a rate; use a value like 50/s or 600/m")
    return value / per_s


def selects_ids(ids: list[str], *, filtered: bool, everything: bool) -> bool:
    """Whether ids are given, rather than a filter or --all. Raises `InvalidOption` for both or neither."""
    if not all(ids):
        raise InvalidOption("an id must not be empty")
    if ids and (filtered or everything):
        raise InvalidOption("ids exclude a filter and --all; pass one of them")
    if not ids and not filtered and not everything:
        raise InvalidOption("nothing is selected; pass ids, a filter or --all")
    return bool(ids)


def confirm(prompt: str, *, yes: bool) -> None:
    """Prompt; exit with code 0 unless the answer is yes. Raises `InvalidOption` if stdin is closed."""
    if yes:
        return
    answer = read_answer(f"{prompt} [y/N]")
    if not answer:
        raise InvalidOption("cannot prompt: stdin is closed; pass --yes, or check with --dry-run")
    if answer.strip().lower() not in ("y", "yes"):
        note("nothing was changed")
        raise typer.Exit(ExitCode.OK)


async def with_progress(what: str, matched: int, do: Callable[[BulkProgress], Awaitable[BulkReport]]) -> BulkReport:
    """Run `do` with a progress bar.

    Ctrl-C leaves the rest unchanged; the same command continues with it.
    """
    done = 0
    with _bar(what, matched) as advance:

        def on_result(_: BulkResult) -> None:
            nonlocal done
            done += 1
            advance()

        try:
            return await do(on_result)
        except asyncio.CancelledError:
            note(f"stopped after {done} of {matched}; repeat the command to continue with the rest")
            raise


async def confirm_count(
    do: Callable[..., Awaitable[BulkReport]], prompt: str, thing: str, what: str, *, dry_run: bool, yes: bool
) -> BulkReport:
    """Count with a dry run, prompt with that number, then run.

    Returns the dry run's report if nothing matches.
    """
    report = await do(dry_run=True)
    if dry_run or not report.matched:
        return report
    confirm(prompt.format(number_of(report.matched, thing)), yes=yes)
    return await with_progress(what, report.matched, lambda on_result: do(progress=on_result))


def print_report(report: BulkReport, thing: str, *, as_json: bool) -> None:
    """Print a table or a document. Exits with 1 if an item failed, with 3 if a store or a queue refused."""
    if as_json:
        emit_json(report_document(report))
    elif report.dry_run:
        emit_line(str(report.matched), "would be changed")
        if report.skipped:
            note(f"{report.skipped} skipped: already replayed")
    else:
        rows = [
            (r.id, "done" if r.done else r.code, r.job_id if r.job_id != r.id else "", r.message)
            for r in report.results
        ]
        emit_rows((thing, "result", "new job", "error"), rows, empty="nothing to do")
        if len(rows) != 1 or report.replayed_before:
            note(f"{report.done} done, {report.failed} failed, {report.skipped} skipped")
    if report.stopped:
        note(f"stopped: {report.stopped}; repeat the command to continue with the rest")
        raise typer.Exit(ExitCode.UNAVAILABLE)
    if not all(result.done or result.skipped for result in report.results):
        raise typer.Exit(ExitCode.FAILED)


def report_document(report: BulkReport) -> dict[str, Any]:
    """Build a report's document for `--json`."""
    return {
        "matched": report.matched,
        "dry_run": report.dry_run,
        "done": report.done,
        "failed": report.failed,
        "skipped": report.skipped,
        "stopped": report.stopped or None,
        "results": [
            {
                "id": result.id,
                "done": result.done,
                "skipped": result.skipped,
                "job_id": result.job_id or None,
                "code": result.code or None,
                "message": result.message or None,
            }
            for result in report.results
        ],
    }


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bars(console(sys.stderr), "{task.description}", *columns, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
