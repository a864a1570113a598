"""Before many things change at once: how many, a question, and a bar; then what became of each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.cli.command import ExitCode
from holdfast.cli.output import emit_json, emit_rows, note, number_of
from holdfast.errors import InvalidOption
from holdfast.operations.bulk import BulkReport, BulkResult
from holdfast.operations.bulk import Progress as Tell

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many it would be, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
All = Annotated[bool, typer.Option("--all", help="All of them, where no id and no filter is given.")]
Rate = Annotated[
    str, typer.Option(metavar="N/s", help="At most so many a second, so that they do not crowd out others.")
]


def parse_rate(text: str) -> float:
    """`50/s`, `50`, `600/m`."""
    number, _, unit = text.partition("/")
    per_s = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0}.get(unit)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if per_s is None or not 0 < value <= 1_000_000:
        raise InvalidOption(f"--rate={text!r} is no rate; write such as 50/s or 600/m")
    return value / per_s


def selects_ids(ids: list[str], *, filtered: bool, everything: bool) -> bool:
    """Whether single ones are meant, rather than a filter or all. Raises `InvalidOption` if nobody can tell."""
    if not all(ids):
        raise InvalidOption("an id must not be empty")
    if ids and (filtered or everything):
        raise InvalidOption("give ids, or a filter (or --all), not both")
    if not ids and not filtered and not everything:
        raise InvalidOption("say which: ids, a filter, or --all")
    return bool(ids)


def confirm(question: str, *, yes: bool) -> None:
    """Go on, or end here. Where nobody can answer, `--yes` has to be said."""
    if yes:
        return
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise InvalidOption("nobody is there to answer: say --yes, or look first with --dry-run")
    if answer.strip().lower() not in ("y", "yes"):
        note("nothing was changed")
        raise typer.Exit(ExitCode.OK)


async def with_progress(what: str, matched: int, do: Callable[[Tell], Awaitable[BulkReport]]) -> BulkReport:
    """Do it, with a bar for a person who looks. Ctrl-C leaves everything in order, and the rest for another call."""
    done = 0
    with _bar(what, matched) as advance:

        def tell(_: BulkResult) -> None:
            nonlocal done
            done += 1
            advance()

        try:
            return await do(tell)
        except asyncio.CancelledError:
            note(f"stopped after {done} of {matched}; the same command goes on with the rest")
            raise


async def confirm_count(
    do: Callable[..., Awaitable[BulkReport]], question: str, thing: str, what: str, *, dry_run: bool, yes: bool
) -> BulkReport:
    """How many it would be, and a question with that number; then all of them."""
    report = await do(dry_run=True)
    if dry_run or not report.matched:
        return report
    confirm(question.format(number_of(report.matched, thing)), yes=yes)
    return await with_progress(what, report.matched, lambda tell: do(progress=tell))


def print_report(report: BulkReport, thing: str, *, as_json: bool) -> None:
    """A table or a document; exit code 1 if something could not be done, 3 if a store or a queue refused."""
    if as_json:
        emit_json(report_document(report))
    elif report.dry_run:
        print(f"{report.matched}\twould be changed")
    else:
        rows = [
            (r.id, "done" if r.done else r.code, r.job_id if r.job_id != r.id else "", r.message)
            for r in report.results
        ]
        emit_rows((thing, "result", "new job", "why not"), rows, empty="nothing to do")
        note(f"{report.done} done, {report.failed} not")
    if report.stopped:
        note(f"stopped: {report.stopped}; the same command goes on with the rest")
        raise typer.Exit(ExitCode.UNAVAILABLE)
    if report.failed:
        raise typer.Exit(ExitCode.FAILED)


def report_document(report: BulkReport) -> dict[str, Any]:
    """A report for programs."""
    return {
        "matched": report.matched,
        "dry_run": report.dry_run,
        "done": report.done,
        "failed": report.failed,
        "stopped": report.stopped or None,
        "results": [
            {
                "id": result.id,
                "done": result.done,
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
