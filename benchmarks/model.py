"""Samples, and what is made of them: median and best per measure and side, ratios between sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

import msgspec

OURS_REDIS: Final = "holdfast · Redis"
OURS_SQLITE: Final = "holdfast · SQLite"
BARE_PY: Final = "bare loop · redis-py"
BARE_RAW: Final = "bare loop · raw"
SKETCH: Final = "yardstick"
#: With the ledger: projected by the worker itself, or by `holdfast upkeep` in a separate process.
OURS_LEDGER: Final = "holdfast · Redis + PostgreSQL"
OURS_UPKEEP: Final = "holdfast · the same, upkeep apart"
PGQUEUER: Final = "pgqueuer"
PROCRASTINATE: Final = "procrastinate"
DBOS: Final = "DBOS"
FASTSTREAM: Final = "FastStream · does nothing"
FASTSTREAM_PUSH: Final = "FastStream · into a Redis list"


class Measure(msgspec.Struct, frozen=True):
    """One thing that is measured."""

    key: str
    title: str
    unit: str
    more_is_better: bool = False
    digits: int = 0
    #: Its sides are different things, so that a ratio between them would say nothing.
    compared: bool = True


class Sample(msgspec.Struct, frozen=True):
    """One value of one side in one round."""

    measure: str
    side: str
    round: int
    value: float


class Summary(msgspec.Struct, frozen=True):
    """All rounds of one side."""

    measure: str
    side: str
    median: float
    best: float
    worst: float
    rounds: int


class Calibration(msgspec.Struct, frozen=True):
    """The machine at the beginning of one round."""

    stage: str
    round: int
    loop_ms: float
    round_trip_us: float


class Results(msgspec.Struct):
    """Everything that one run found."""

    began_at: str
    machine: dict[str, str]
    settings: dict[str, Any]
    calibrations: list[Calibration] = []
    samples: list[Sample] = []
    #: Pooled over all rounds: side → milliseconds, sorted.
    latencies_ms: dict[str, list[float]] = {}
    #: The whole deep queue: side → (jobs done, seconds since the first).
    curves: dict[str, list[tuple[int, float]]] = {}
    #: Bytes in Redis: before, at the deepest, when all is done and expired, and of that its bounded streams.
    memory: dict[str, int] = {}
    failures: list[str] = []
    summaries: list[Summary] = []

    def add(self, measure: str, side: str, round_number: int, value: float) -> None:
        """One more sample."""
        self.samples.append(Sample(measure, side, round_number, value))

    def sides(self, measure: str) -> list[str]:
        """Who was measured, in order of appearance."""
        return list(dict.fromkeys(sample.side for sample in self.samples if sample.measure == measure))

    def values(self, measure: str, side: str) -> list[float]:
        """All rounds of one side."""
        return [sample.value for sample in self.samples if (sample.measure, sample.side) == (measure, side)]

    def summarise(self, measures: Sequence[Measure]) -> None:
        """Fill `summaries`."""
        self.summaries = [
            _summary(measure, side, self.values(measure.key, side))
            for measure in measures
            for side in self.sides(measure.key)
        ]

    def summary(self, measure: str, side: str) -> Summary | None:
        """One side's summary, if it was measured."""
        for summary in self.summaries:
            if (summary.measure, summary.side) == (measure, side):
                return summary
        return None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of a sorted list lies."""
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _summary(measure: Measure, side: str, values: Sequence[float]) -> Summary:
    low, high = min(values), max(values)
    best, worst = (high, low) if measure.more_is_better else (low, high)
    return Summary(measure.key, side, statistics.median(values), best, worst, len(values))
