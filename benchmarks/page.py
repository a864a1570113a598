"""A page of figures for the docs, from the JSON of one or more runs: `python -m benchmarks.page JSON [JSON …]`.

Prints Markdown: what was measured on, then a table for each stage of the ledger that the runs have.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.markdown import about, lines
from benchmarks.model import DBOS, PGQUEUER, PROCRASTINATE, SKETCH, Measure, Results
from benchmarks.stages.audited import Audited
from benchmarks.stages.durable import Durable
from benchmarks.stages.effects import Effects
from benchmarks.stages.history import History
from benchmarks.stages.lag import Lag
from benchmarks.stages.projector import Projector
from benchmarks.stages.stage import Stage

_STAGES: Final[Sequence[type[Stage]]] = (Audited, Projector, Lag, Durable, Effects, History)
_AGAINST: Final = (PGQUEUER, PROCRASTINATE, DBOS, SKETCH)
_FACTS: Final = ("cores", "python", "Redis", "PostgreSQL", "peers", "rounds", "jobs")


def main(files: Sequence[str]) -> int:
    """Print the page."""
    if not files:
        print(__doc__, file=sys.stderr)
        return 2
    print(page([msgspec.json.decode(Path(file).read_bytes(), type=Results) for file in files]), end="")
    return 0


def page(runs: Sequence[Results]) -> str:
    """The whole page; a stage that several runs have comes from the last of them."""
    parts = ["# The ledger, figures", "Written by `python -m benchmarks.page`; how to read it: [here](ledger.md)."]
    parts += [about(run, _FACTS, "compare within one table only") for run in runs]
    for stage in _STAGES:
        having = [run for run in runs if any(run.sides(measure.key) for measure in stage.measures)]
        if having:
            parts += [f"## {stage.title}", *_tables(having[-1], stage.measures)]
    return "\n\n".join(parts) + "\n"


def _tables(run: Results, measures: Sequence[Measure]) -> list[str]:
    """One of what is compared, and one more for each measure whose sides are different things."""
    compared = [measure for measure in measures if measure.compared]
    return [_table(run, compared), *(_list(run, measure) for measure in measures if not measure.compared)]


def _list(run: Results, measure: Measure) -> str:
    rows = [[measure.title, measure.unit], ["---"] * 2]
    rows += [[side, *_row(run, measure, [side])[1:]] for side in run.sides(measure.key)]
    return lines(rows)


def _table(run: Results, measures: Sequence[Measure]) -> str:
    """Measures down, sides across; then the first measure against each side that is there to be compared with."""
    sides = list(dict.fromkeys(side for measure in measures for side in run.sides(measure.key)))
    rows = [["", *sides], ["---"] * (len(sides) + 1)]
    rows += [_row(run, measure, sides) for measure in measures if run.sides(measure.key)]
    rows += [_ratios(run, measures[0], side, sides) for side in _AGAINST if side in sides]
    return lines(rows)


def _row(run: Results, measure: Measure, sides: Sequence[str]) -> list[str]:
    cells = [f"{measure.title}, {measure.unit}"]
    for side in sides:
        summary = run.summary(measure.key, side)
        cells.append("–" if summary is None else f"{summary.median:,.{measure.digits}f}")
    return cells


def _ratios(run: Results, measure: Measure, against: str, sides: Sequence[str]) -> list[str]:
    reference = run.summary(measure.key, against)
    cells = [f"{measure.title}, × {against}"]
    for side in sides:
        summary = run.summary(measure.key, side)
        if summary is None or reference is None or not reference.median:
            cells.append("–")
        else:
            cells.append(f"{summary.median / reference.median:.2f}")
    return cells


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
