"""The picture: medians as bars with the range of the rounds, and the deep queue's drain as a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.model import BARE_PY, BARE_RAW, OURS_REDIS, OURS_SQLITE, SKETCH, Measure, Results
from benchmarks.stages.stage import Stage

_COLOURS: Final = {
    OURS_REDIS: "#1b6ca8",
    OURS_SQLITE: "#5fa777",
    BARE_PY: "#b8b8b8",
    BARE_RAW: "#808080",
    SKETCH: "#d98e04",
}
_OTHER: Final = "#1b6ca8"
_PANELS: Final = {
    "submit": ("submit.single", "submit.concurrent", "submit.bulk"),
    "drain": ("drain.1", "drain.2"),
    "latency": ("latency.p50", "latency.p95", "latency.p99"),
}


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
    figure, grid = plt.subplots(1, count, figsize=(5.2 * count, 4.2), squeeze=False)
    for axes, stage in zip(grid[0], panels, strict=False):
        _bars(axes, results, stage)
    if curves:
        _curve(grid[0][-1], results)
    figure.suptitle(f"holdfast {results.machine['holdfast']} · {results.began_at}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _bars(axes: Any, results: Results, stage: Stage) -> None:
    measures = [_measure(stage, key) for key in _PANELS[stage.name]]
    sides = list(dict.fromkeys(side for measure in measures for side in results.sides(measure.key)))
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        for place, measure in enumerate(measures):
            row = results.summary(measure.key, side)
            if row is None:
                continue
            low, high = sorted((row.best, row.worst))
            at = place + (index - (len(sides) - 1) / 2) * width
            error = [[row.median - low], [high - row.median]]
            axes.bar(at, row.median, width, yerr=error, color=_COLOURS.get(side, _OTHER), ecolor="#333333", capsize=2)
    axes.set_yscale("log")
    axes.set_xticks(range(len(measures)), [measure.title for measure in measures], fontsize=8)
    axes.set_ylabel(measures[0].unit)
    axes.set_title(stage.title, fontsize=9)
    axes.legend(
        handles=[_patch(side) for side in sides],
        fontsize=7,
        loc="lower right" if measures[0].more_is_better else "best",
    )
    axes.grid(axis="y", alpha=0.3)


def _curve(axes: Any, results: Results) -> None:
    for side, points in results.curves.items():
        left, rates = [], []
        total = points[-1][0]
        for (done, at), (next_done, next_at) in pairwise(points):
            left.append(total - (done + next_done) / 2)
            rates.append((next_done - done) / max(next_at - at, 1e-9))
        axes.plot(left, rates, color=_COLOURS.get(side, _OTHER), label=side, linewidth=1)
    axes.invert_xaxis()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("jobs still queued")
    axes.set_ylabel("jobs/s")
    axes.set_title("Drain rate against backlog, 1 worker", fontsize=9)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _patch(side: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=_COLOURS.get(side, _OTHER), label=side)


def _measure(stage: Stage, key: str) -> Measure:
    return next(measure for measure in stage.measures if measure.key == key)
