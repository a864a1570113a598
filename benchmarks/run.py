"""One run: servers up, stages in turn, rounds interleaved within each, tables, JSON and plot at the end."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine, plot, report
from benchmarks.board import Board
from benchmarks.brokers import Kafka, RabbitMQ
from benchmarks.children import ProbeFailed
from benchmarks.model import Calibration, Results
from benchmarks.options import Options, parse
from benchmarks.postgres import Postgres
from benchmarks.stages.audited import Audited
from benchmarks.stages.backlog import Backlog
from benchmarks.stages.consume import ConsumeKafka, ConsumeRabbitMQ
from benchmarks.stages.drain import Drain
from benchmarks.stages.durable import Durable
from benchmarks.stages.effects import Effects
from benchmarks.stages.history import History
from benchmarks.stages.http import Http
from benchmarks.stages.lag import Lag
from benchmarks.stages.latency import Latency
from benchmarks.stages.outbox import Delay, Outbox
from benchmarks.stages.projector import Projector
from benchmarks.stages.rivals import Killed, Rivals, RivalsLatency
from benchmarks.stages.stage import Hall, Probe, Stage
from benchmarks.stages.submit import Submit
from benchmarks.stores import RedisStore, SqliteStore

STAGES: Final[Mapping[str, Callable[[Hall], Stage]]] = {
    "submit": Submit,
    "drain": Drain,
    "latency": Latency,
    "backlog": Backlog,
    "audited": Audited,
    "projector": Projector,
    "lag": Lag,
    "durable": Durable,
    "effects": Effects,
    "history": History,
    "http": Http,
    "kafka": ConsumeKafka,
    "rabbitmq": ConsumeRabbitMQ,
    "outbox": Outbox,
    "delay": Delay,
    "peers": Rivals,
    "peers-latency": RivalsLatency,
    "peers-kill": Killed,
}

_FILE_WIDTH: Final = 110


def main(arguments: Sequence[str]) -> int:
    """Measure and report; 1 if any measurement failed."""
    options = parse(arguments)
    # As an exit, so that servers and children are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Written to a file, lines need not fit a terminal.
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    began_at = datetime.now(UTC)
    options.out.mkdir(parents=True, exist_ok=True)
    with machine.held_awake() as awake, _hall(options, began_at) as hall:
        hall.results.machine["cores held awake"] = "yes" if awake else "no (needs root and /dev/cpu_dma_latency)"
        report.print_heading(console, hall.results)
        stages: list[Stage] = [STAGES[name](hall) for name in options.stages]
        with _progress(console) as progress:
            for stage in stages:
                _Rounds(hall, stage, progress).run()
    results = hall.results
    results.summarise([measure for stage in stages for measure in stage.measures])
    report.print_tables(console, results, stages)
    _write(console, options.out, began_at, results, stages)
    return 1 if results.failures else 0


class _Rounds:
    """All rounds of one stage."""

    def __init__(self, hall: Hall, stage: Stage, progress: Progress) -> None:
        self._hall = hall
        self._stage = stage
        self._progress = progress
        self._bar = progress.add_task(f"{stage.name}: preparing", total=None)

    def run(self) -> None:
        self._show(f"{self._stage.name}: preparing")
        if not self._guarded("preparing", self._prepare):
            return
        for number in range(1, self._rounds + 1):
            self._calibrate(number)
            for probe in self._stage.probes():
                self._probe(probe, number)
        self._show(f"{self._stage.name}: finishing")
        self._guarded("finishing", self._finish)
        self._show(f"{self._stage.name}: done")

    @property
    def _rounds(self) -> int:
        return 1 if self._stage.once else self._hall.options.rounds

    def _prepare(self) -> None:
        self._stage.prepare()
        total = len(self._stage.probes()) * self._rounds
        self._progress.update(self._bar, total=total)

    def _finish(self) -> None:
        if summary := self._stage.finish():
            self._say(summary)

    def _calibrate(self, number: int) -> None:
        loop_ms = machine.loop_ms()
        round_trip_us = machine.round_trip_us(self._hall.redis.port)
        self._hall.results.calibrations.append(Calibration(self._stage.name, number, loop_ms, round_trip_us))
        self._say(
            f"[bold]{self._stage.name}, round {number}[/]  "
            f"calibration: loop {loop_ms:.1f} ms, round trip {round_trip_us:.0f} µs"
        )

    def _probe(self, probe: Probe, number: int) -> None:
        self._show(f"{self._stage.name} {number}: {probe.label}")
        self._guarded(probe.label, lambda: self._say(f"  {probe.label:36} {probe.run(number)}"))
        self._progress.advance(self._bar)

    def _guarded(self, label: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except ProbeFailed as exc:
            self._hall.results.failures.append(f"{self._stage.name}, {label}: {exc}")
            self._progress.console.print(f"  {label}: {exc}", style="red", markup=False, highlight=False)
            return False
        return True

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False)

    def _show(self, what: str) -> None:
        self._progress.update(self._bar, description=what)
        self._progress.refresh()


@contextmanager
def _hall(options: Options, began_at: datetime) -> Iterator[Hall]:
    # Next to the results and not in the system's folder for temporary files: that may be memory, where a sync is free.
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=options.out))
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
        redis = RedisStore(scratch / "redis", options.aof)
        cleanup.callback(redis.close)
        results = Results(began_at.isoformat(timespec="seconds"), machine.describe(), _settings(options, redis))
        results.settings["SQLite file"] = f"synchronous=FULL on {machine.filesystem(scratch)}"
        sqlite, board, postgres = SqliteStore(scratch / "sqlite"), Board(scratch / "board"), Postgres(scratch)
        cleanup.callback(postgres.close)
        kafka, rabbitmq = Kafka(scratch), RabbitMQ(scratch)
        cleanup.callback(kafka.close)
        cleanup.callback(rabbitmq.close)
        yield Hall(options, redis, sqlite, postgres, kafka, rabbitmq, board, scratch, results, cleanup)


def _settings(options: Options, redis: RedisStore) -> dict[str, object]:
    return {
        "stages": ", ".join(options.stages),
        "rounds": options.rounds,
        "jobs": options.jobs,
        "backlog": f"{options.shallow:,} and {options.deep:,}, on SQLite {options.sqlite_deep:,}",
        "yardstick": options.sketch.name if options.sketch else "none",
        "Redis": f"{redis.version}, appendonly {options.aof}",
    }


def _progress(console: Console) -> Progress:
    # No refreshing by itself: that would be a thread that works while others are measured.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )


def _write(console: Console, out: Path, began_at: datetime, results: Results, stages: Sequence[Stage]) -> None:
    stem = out / f"bench-{began_at:%Y%m%d-%H%M%S}"
    report.write_json(stem.with_suffix(".json"), results)
    console.print(f"\nJSON  {stem.with_suffix('.json')}", highlight=False, soft_wrap=True)
    if plot.draw(stem.with_suffix(".png"), results, stages):
        console.print(f"plot  {stem.with_suffix('.png')}", highlight=False, soft_wrap=True)
