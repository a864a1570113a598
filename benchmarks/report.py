"""Tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.model import (
    BARE_PY,
    BARE_RAW,
    DBOS,
    FASTSTREAM,
    FASTSTREAM_PUSH,
    PGQUEUER,
    PROCRASTINATE,
    SKETCH,
    Measure,
    Results,
    Summary,
    percentile,
)
from benchmarks.stages.stage import Stage

#: Column heads of the ratios, and against whom.
_AGAINST: Final = {
    "× redis-py": BARE_PY,
    "× raw": BARE_RAW,
    "× yardstick": SKETCH,
    "× pgqueuer": PGQUEUER,
    "× procrastinate": PROCRASTINATE,
    "× DBOS": DBOS,
    "× FastStream": FASTSTREAM,
    "× FS to Redis": FASTSTREAM_PUSH,
}
#: In these stages the first row of each measure is what the others are compared with.
_FIRST_ROW: Final = {
    "backlog": "× shallow",
    "history": "× empty",
    "peers": "× holdfast",
    "peers-latency": "× holdfast",
    "peers-kill": "× holdfast",
}
_NOTE: Final = (
    "Median and best of the rounds; ratios are of medians. Gaps under 30 % are ties on a shared machine; "
    "CPU per job is steadier than time."
)


def print_heading(console: Console, results: Results) -> None:
    """Versions and settings, before the first number."""
    facts = {**results.machine, **{name: str(value) for name, value in results.settings.items()}}
    for name, value in facts.items():
        console.print(f"{name:18} {value}", highlight=False)
    console.print()


def print_tables(console: Console, results: Results, stages: Sequence[Stage]) -> None:
    """One table per stage, then what failed."""
    for stage in stages:
        if any(results.sides(measure.key) for measure in stage.measures):
            console.print()
            console.print(_table(results, stage))
    _print_servers(console, results)
    _print_latencies(console, results)
    _print_flatness(console, results)
    _print_memory(console, results)
    _print_calibrations(console, results)
    console.print(_NOTE, style="dim")
    for failure in results.failures:
        console.print(f"failed: {failure.splitlines()[0]}", style="red", markup=False, highlight=False)


def write_json(path: Path, results: Results) -> None:
    """Everything, samples included."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _table(results: Results, stage: Stage) -> Table:
    references = _references(results, stage)
    table = Table(title=stage.title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("median", "best", *references):
        table.add_column(name, justify="right", no_wrap=True)
    for measure in stage.measures:
        sides = results.sides(measure.key)
        if sides:
            table.add_row(f"[bold]{measure.title}[/], {measure.unit}")
        for side in sides:
            table.add_row(f"  {side}", *_cells(results, measure, side, list(references.values())))
    return table


def _cells(results: Results, measure: Measure, side: str, references: Sequence[str]) -> list[str]:
    row = results.summary(measure.key, side)
    assert row is not None
    first = results.sides(measure.key)[0]
    others = [results.summary(measure.key, other or first) if measure.compared else None for other in references]
    ratios = [_ratio(row, other) for other in others]
    return [_number(row.median, measure), _number(row.best, measure), *ratios]


def _references(results: Results, stage: Stage) -> dict[str, str]:
    """Ratio columns: against other sides, or (an empty name) against the first row of the same measure."""
    if stage.name in _FIRST_ROW:
        return {_FIRST_ROW[stage.name]: ""}
    present = {side for measure in stage.measures for side in results.sides(measure.key)}
    return {head: side for head, side in _AGAINST.items() if side in present}


def _ratio(row: Summary, reference: Summary | None) -> str:
    if reference is None or reference.side == row.side or not reference.median:
        return ""
    return f"{row.median / reference.median:.2f}"


def _number(value: float, measure: Measure) -> str:
    return f"{value:,.{measure.digits}f}"


def _print_servers(console: Console, results: Results) -> None:
    """What was not known yet when the heading was printed."""
    for name in ("PostgreSQL", "peers", "FastStream"):
        if name in results.settings:
            console.print(f"{name}: {results.settings[name]}", highlight=False)


def _print_latencies(console: Console, results: Results) -> None:
    for side, ordered in results.latencies_ms.items():
        shares = " · ".join(f"p{share * 100:g} {percentile(ordered, share):.2f}" for share in (0.5, 0.95, 0.99))
        console.print(f"all rounds, {side}: {shares} ms of {len(ordered):,} jobs", highlight=False)


def _print_flatness(console: Console, results: Results) -> None:
    for store in ("Redis", "SQLite"):
        words = []
        for who, key in (("worker", f"backlog.{store}.cpu"), ("Redis", f"backlog.{store}.redis")):
            sides = results.sides(key)
            rows = [results.summary(key, side) for side in sides[:2]]
            if len(rows) == 2 and rows[0] is not None and rows[1] is not None:
                words.append(f"{who} {rows[1].median / rows[0].median - 1:+.1%}")
        if words:
            console.print(f"CPU a job on {store}, deep queue against shallow: {', '.join(words)}", highlight=False)


def _print_calibrations(console: Console, results: Results) -> None:
    loops = [calibration.loop_ms for calibration in results.calibrations]
    trips = [calibration.round_trip_us for calibration in results.calibrations]
    if loops:
        console.print(
            f"calibration over the run: loop {min(loops):.1f} to {max(loops):.1f} ms, "
            f"round trip {min(trips):.0f} to {max(trips):.0f} µs",
            highlight=False,
        )


def _print_memory(console: Console, results: Results) -> None:
    memory = results.memory
    if "expired" in memory:
        mb = {name: f"{memory[name] / 1e6:,.1f} MB" for name in ("before", "deep", "expired", "bounded_streams")}
        console.print(
            f"memory of Redis: {mb['before']} empty, {mb['deep']} with the deep queue, {mb['expired']} when all "
            f"was done and expired ({mb['bounded_streams']} of that feed and results, both bounded)",
            highlight=False,
        )
