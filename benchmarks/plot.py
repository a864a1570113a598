"""The picture: medians as bars with the range of the rounds, and the deep queue's drain as a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.model import (
    BARE_PY,
    BARE_RAW,
    DBOS,
    FASTSTREAM,
    FASTSTREAM_PUSH,
    OURS_LEDGER,
    OURS_REDIS,
    OURS_SQLITE,
    OURS_UPKEEP,
    PGQUEUER,
    PROCRASTINATE,
    SKETCH,
    Measure,
    Results,
)
from benchmarks.stages.stage import Stage

_COLOURS: Final = {
    OURS_REDIS: "#1b6ca8",
    OURS_SQLITE: "#5fa777",
    BARE_PY: "#b8b8b8",
    BARE_RAW: "#808080",
    SKETCH: "#d98e04",
    OURS_LEDGER: "#0b3c5d",
    OURS_UPKEEP: "#328cc1",
    PGQUEUER: "#b5651d",
    PROCRASTINATE: "#c9a66b",
    DBOS: "#8e6c8a",
    FASTSTREAM: "#9c9c3c",
    FASTSTREAM_PUSH: "#6b8e23",
}
_PANELS: Final = {
    "submit": ("submit.single", "submit.concurrent", "submit.bulk"),
    "drain": ("drain.1", "drain.2"),
    "latency": ("latency.p50", "latency.p95", "latency.p99"),
    "audited": ("audited",),
    "lag": ("lag.p50", "lag.p95", "lag.p99"),
    "kafka": ("kafka",),
    "rabbitmq": ("rabbitmq",),
    "outbox": ("outbox",),
    "delay": ("delay.p50", "delay.p99"),
}
_LEGEND_PER_COLUMN: Final = 2
_LEGEND_LINE_INCHES: Final = 0.2


def draw(path: Path, results: Results, stages: Sequence[Stage]) -> bool:
    """Write the picture; False if nothing was measured."""
    panels = [stage for stage in stages if stage.name in _PANELS and results.sides(_PANELS[stage.name][0])]
    curves = bool(results.curves)
    if not panels and not curves:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    count = len(panels) + curves
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.6 * columns, 3.8 * rows + 0.6), squeeze=False)
    axes_left = list(grid.flat)
    for axes, stage in zip(axes_left, panels, strict=False):
        _bars(axes, results, stage)
    if curves:
        _curve(axes_left[len(panels)], results)
    for axes in axes_left[count:]:
        axes.set_axis_off()
    figure.suptitle(f"holdfast {results.machine['holdfast']} · {results.began_at}", fontsize=10)
    handles, across = [_patch(side) for side in _drawn(results)], _LEGEND_PER_COLUMN * columns
    figure.legend(handles=handles, fontsize=8, loc="lower center", ncols=across)
    bottom_inches = _LEGEND_LINE_INCHES * (-(-len(handles) // across) + 1)
    figure.tight_layout(rect=(0, bottom_inches / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _bars(axes: Any, results: Results, stage: Stage) -> None:
    measures = [_measure(stage, key) for key in _PANELS[stage.name]]
    sides = list(dict.fromkeys(side for measure in measures for side in results.sides(measure.key)))
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        for index, measure in enumerate(measures):
            row = results.summary(measure.key, side)
            if row is None:
                continue
            low, high = sorted((row.best, row.worst))
            at = index + (index - (len(sides) - 1) / 2) * width
            error = [[row.median - low], [high - row.median]]
            axes.bar(at, row.median, width, yerr=error, color=_COLOURS[side], ecolor="#333333", capsize=2)
    axes.set_yscale("log")
    axes.set_xticks(range(len(measures)), [measure.title for measure in measures], fontsize=8)
    axes.set_ylabel(measures[0].unit)
    axes.set_title(stage.title, fontsize=9)
    axes.grid(axis="y", alpha=0.3)


def _curve(axes: Any, results: Results) -> None:
    for side, points in results.curves.items():
        left, rates = [], []
        total = points[-1][0]
        for (done, at), (next_done, next_at) in pairwise(points):
            left.append(total - (done + next_done) / 2)
            rates.append((next_done - done) / max(next_at - at, 1e-9))
        axes.plot(left, rates, color=_COLOURS[side], linewidth=1)
    axes.invert_xaxis()
    axes.locator_params(axis="x", nbins=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("jobs still queued")
    axes.set_ylabel("jobs/s")
    axes.set_title("Drain rate against backlog, 1 worker", fontsize=9)
    axes.grid(alpha=0.3)


def _drawn(results: Results) -> list[str]:
    sides = {sample.side for sample in results.samples} | set(results.curves)
    return [side for side in _COLOURS if side in sides]


def _patch(side: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=_COLOURS[side], label=side)


def _measure(stage: Stage, key: str) -> Measure:
    return next(measure for measure in stage.measures if measure.key == key)
