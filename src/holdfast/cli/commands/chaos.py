"""`holdfast chaos`: inject faults into a real deployment under load, then check that no job was lost."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TimeElapsedColumn

from holdfast.cli.command import AsJson, ExitCode, command
from holdfast.cli.output import console, emit_json, emit_line, emit_rows, note
from holdfast.cli.session import EngineTarget
from holdfast.errors import UsageError
from holdfast.extras import require
from holdfast.observe.log_formats import log_to_file
from holdfast.observe.terminal import progress_bars

if TYPE_CHECKING:
    from rich.progress import Progress as Bars  # noqa: TID251 - only its type

    from holdfast.verification.chaos.report import ChaosReport
    from holdfast.verification.chaos.run import Progress


#: Maximum number of defects printed; all are counted.
_SHOWN: Final = 30
_JOBS: Final = 2_000
_FAULTS: Final = 20
_LONG_JOBS: Final = 100_000
_LONG_FAULTS: Final = 200
#: Interval between progress lines where stderr is not a terminal.
_PRINT_INTERVAL_S: Final = 10.0


class TopologyName(StrEnum):
    """Redis topologies."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "chaos",
        examples=(
            "holdfast chaos",
            "holdfast chaos --jobs 500 --faults 10 --seed 7",
            "holdfast chaos --long --report chaos.json",
            "holdfast chaos --topology sentinel --keep --folder /tmp/chaos",
            "holdfast chaos --rewind",
        ),
    )(chaos)


async def chaos(
    at: EngineTarget,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of jobs to submit. Default: 2,000.", show_default=False)
    ] = None,
    faults: Annotated[
        int | None, typer.Option(min=0, help="Number of faults to inject. Default: 20.", show_default=False)
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Default to 100,000 jobs and 200 faults; takes about half an hour.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of jobs and faults. Default: random.", show_default=False)
    ] = None,
    topology: Annotated[TopologyName, typer.Option(help="Redis topology.")] = TopologyName.SINGLE,
    workers: Annotated[int, typer.Option(min=1, max=20, help="Worker processes.")] = 3,
    rate: Annotated[
        float | None,
        typer.Option(min=1, help="Jobs per second. Default: the load lasts as long as the faults.", show_default=False),
    ] = None,
    min_replicas: Annotated[
        int,
        typer.Option(min=0, max=1, help="With Sentinel and Cluster: replicas that a master needs to accept writes."),
    ] = 0,
    rewind: Annotated[
        bool,
        typer.Option(
            "--rewind", help="Also start Redis with data that is some seconds old, as after a restore of a snapshot."
        ),
    ] = False,
    redis_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="redis-server to run. Default: the one on PATH.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for logs and journal; kept. Default: a temporary one.", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary directory even if all checks pass.")] = False,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.", show_default=False)
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run workers, upkeep, server, Redis and PostgreSQL on this machine, and inject faults chosen by a seed.

    Faults are kills, stops, restarts, repeated outages, jobs that end their workers, cut and slow connections, lost
    replies, full disks, fail-overs, hung masters and, with --rewind, a Redis that comes back with older data.
    Afterwards it repairs everything and checks that no accepted job was lost, each has one outcome, effects happened at
    most once, only jobs that end their workers are poison pills and nothing is left in Redis. Exit code 1 if a check
    fails. Uses its own stores: --url and --namespace have no effect.
    """
    if sys.platform != "linux":
        raise UsageError(f"holdfast chaos does not run on {sys.platform}; use Linux or a container")
    require("holdfast chaos", "fastapi", "httpx", "uvicorn", "alembic", "asyncpg", "hiredis", "redis")
    from holdfast.verification.chaos.report import document
    from holdfast.verification.chaos.report import markdown as as_markdown
    from holdfast.verification.chaos.run import ChaosOptions, run

    options = ChaosOptions(
        seed=secrets.randbelow(2**31) if seed is None else seed,
        jobs=jobs or (_LONG_JOBS if long else _JOBS),
        faults=faults if faults is not None else (_LONG_FAULTS if long else _FAULTS),
        topology=topology.value,
        workers=workers,
        rate=rate or 0.0,
        redis_binary=redis_server,
        min_replicas=min_replicas,
        rewind=rewind,
    )
    if rewind and topology is not TopologyName.SINGLE:
        raise UsageError("--rewind is for a single Redis; omit --topology")
    if min_replicas and topology is TopologyName.SINGLE:
        raise UsageError(
            "--min-replicas needs replicas, and a single Redis has none; use --topology sentinel or cluster"
        )
    note(f"seed {options.seed}; reproduce with: {options.command}")
    directory = folder or Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new directory, or omit --folder")
    directory.mkdir(parents=True, exist_ok=True)
    # During outages the submitter's log would flood stderr.
    with log_to_file("holdfast", directory / "chaos.log"), _ChaosScreen() as screen:
        report = await run(options, directory, screen.show)
    if report_file is not None:
        report_file.write_bytes(msgspec.json.format(msgspec.json.encode(document(report)), indent=2) + b"\n")
    if markdown is not None:
        markdown.write_text(as_markdown(report))
    if as_json:
        emit_json(document(report))
    else:
        _print(report)
    if report.ok and folder is None and not keep:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        note(f"logs and journal are in {directory}")
    if not report.ok:
        note(f"checks FAILED; seed {options.seed}; reproduce with: {options.command}")
    raise typer.Exit(ExitCode.OK if report.ok else ExitCode.FAILED)


def _print(report: ChaosReport) -> None:
    from holdfast.verification.chaos.report import FAULT_COLUMNS, faults_table, summary

    emit_rows(("what", ""), summary(report), empty="")
    emit_line()
    emit_rows(FAULT_COLUMNS, faults_table(report.struck), empty="no faults were injected")
    for what, reason in report.unsupported.items():
        note(f"{what} is not possible here: {reason}")
    for defect in report.findings.defects[:_SHOWN]:
        note(defect)
    if report.findings.defect_count > _SHOWN:
        note(f"… and {report.findings.defect_count - _SHOWN} more")


class _ChaosScreen:
    """Progress on stderr: bars on a terminal, else lines."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._phase = ""
        self._printed_at = 0.0
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = progress_bars(console(sys.stderr), "{task.description:>9}", *columns, transient=True)

    def __enter__(self) -> _ChaosScreen:
        if self._bars is not None:
            self._bars.start()
            self._tasks = {name: self._bars.add_task(name, total=None) for name in ("accepted", "ended", "faults")}
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress."""
        if self._bars is None:
            self._print_progress(progress)
            return
        for name, done, total in (
            ("accepted", progress.accepted, progress.jobs),
            ("ended", progress.ended, progress.jobs),
            ("faults", progress.struck, progress.faults),
        ):
            self._bars.update(self._tasks[name], completed=done, total=total or None)
        if progress.message or progress.phase != self._phase:
            self._bars.console.print(progress.message or progress.phase)
        self._phase = progress.phase

    def _print_progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase == self._phase and not progress.message and now - self._printed_at < _PRINT_INTERVAL_S:
            return
        self._phase, self._printed_at = progress.phase, now
        counts = progress.open_jobs or f"{progress.accepted:,} accepted, {progress.struck} of {progress.faults} faults"
        note(f"{progress.phase}: {progress.message or counts}")
