"""Pictures for the page about the peers: one bar for each side, our own in colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.model import OURS_LEDGER, OURS_REDIS, OURS_UPKEEP, Results
from benchmarks.stages.audited import Audited
from benchmarks.stages.rivals import Killed, Rivals, RivalsLatency

_COLOURS: Final = {OURS_REDIS: "#1b6ca8", OURS_LEDGER: "#0b3c5d", OURS_UPKEEP: "#328cc1"}
_OTHERS: Final = "#b8b8b8"
#: File → measures, one panel each, and whether its axis is logarithmic.
_PICTURES: Final = {
    "drain": (("peers.1", "peers.2"), True),
    "submit": (("peers.single", "peers.bulk"), True),
    "latency": (("latency.p50", "latency.p99"), True),
    "cost": (("peers.1.cpu", "peers.rss"), True),
    "audited": (("audited",), True),
    "killed": (("kill.lost", "kill.seconds"), False),
}
_MEASURES: Final = {
    measure.key: measure for stage in (Rivals, RivalsLatency, Audited, Killed) for measure in stage.measures
}


def draw(page: Path, run: Results) -> list[str]:
    """Write SVG files next to the page, named after it, for the measures of the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Text stays text: a tenth of the size, and it can be searched.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "holdfast"})
    names = []
    for name, (keys, logarithmic) in _PICTURES.items():
        measured = [key for key in keys if run.sides(key)]
        if measured:
            path = page.with_name(f"{page.stem}-{name}.svg")
            _draw(path, run, measured, logarithmic)
            names.append(path.name)
    return names


def _draw(path: Path, run: Results, keys: list[str], logarithmic: bool) -> None:
    from matplotlib import pyplot as plt

    most = max(len(run.sides(key)) for key in keys)
    figure, grid = plt.subplots(1, len(keys), figsize=(5.6 * len(keys), 0.26 * most + 0.9), squeeze=False)
    for axes, key in zip(grid.flat, keys, strict=True):
        _bars(axes, run, key, logarithmic)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(axes: Any, run: Results, key: str, logarithmic: bool) -> None:
    measure = _MEASURES[key]
    rows = [summary for side in run.sides(key) if (summary := run.summary(key, side)) is not None]
    rows.sort(key=lambda row: row.median, reverse=not measure.more_is_better)
    values = [row.median for row in rows]
    axes.barh([row.side for row in rows], values, color=[_COLOURS.get(row.side, _OTHERS) for row in rows])
    for index, row in enumerate(rows):
        axes.annotate(f" {row.median:,.{measure.digits}f}", (row.median, index), va="center", fontsize=7)
    if logarithmic:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.tick_params(labelsize=7)
    axes.set_title(f"{measure.title}, {measure.unit}", fontsize=9)
