"""Flat or growing: the rule, on numbers alone.

Only the second half of a run is judged: until then caches fill and the first records have not expired yet. The growth
over that half is the Theil–Sen slope (the median of the slopes between all pairs of samples) times its length: up to a
quarter of the samples may be off without moving it. It counts as growth if

- it is more than a share of the level *and* more than a floor, both by kind (below), and
- the troughs rise with it: the lowest tenth of the last third lies above that of the first third by at least a third of
  the growth. What is swept now and then has high peaks and a steady floor, whatever the phase it is caught in; a leak
  raises the floor.

What grows only in the last quarter of the time judged is not detected; the reported peak shows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import msgspec

FLAT: Final = "flat"
GROWING: Final = "growing"
SHRINKING: Final = "shrinking"
TOO_SHORT: Final = "too short"
REPORTED: Final = "reported"

#: Below this many samples in the second half nothing is said.
_LEAST: Final = 10
#: Of the growth that the floor has to follow, and which of the samples of a third, from below, is its floor.
_FOLLOWS: Final = 1 / 3
_FLOOR: Final = 0.1

Sample = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """How much growth over the time judged is still flat; the larger of the two."""

    share: float
    floor: float


#: Allocators take and give back memory in pieces of up to a megabyte or two. In a quarter of an hour at 4,000 jobs/s
#: three megabytes are less than one byte a job: a leak of one byte per job is seen.
MEMORY: Final = Limit(0.03, 3e6)
#: A stream or a set breathes by a batch (500) or two, as claims and sweeps fall.
LENGTH: Final = Limit(0.10, 1_000)
#: Handles, threads, connections, consumers: whole numbers that a reconnect or a look from outside moves by one or two.
COUNT: Final = Limit(0.05, 2)
#: Seconds that the ledger is behind.
LAG: Final = Limit(0.50, 1)


class Verdict(msgspec.Struct, frozen=True):
    """What is said of one series."""

    word: str
    #: Median of the time judged.
    level: float
    #: Over the time judged, by the slope.
    growth: float
    #: Highest of the whole run.
    peak: float

    @property
    def fails(self) -> bool:
        return self.word == GROWING


def judge(samples: Sequence[Sample], limit: Limit | None) -> Verdict:
    """The verdict on (seconds, value) in order of time; without a limit it is only reported."""
    peak = max((value for _, value in samples), default=0.0)
    half = _second_half(samples)
    level = statistics.median(value for _, value in half) if half else 0.0
    if len(half) < _LEAST:
        return Verdict(REPORTED if limit is None else TOO_SHORT, level, 0.0, peak)
    growth = theil_sen(half) * (half[-1][0] - half[0][0])
    if limit is None:
        return Verdict(REPORTED, level, growth, peak)
    trend = growth if rise(half) / (growth or 1) >= _FOLLOWS else 0.0
    return Verdict(_word(trend, max(limit.share * abs(level), limit.floor)), level, growth, peak)


def theil_sen(samples: Sequence[Sample]) -> float:
    """The median slope between all pairs."""
    slopes = [(later - value) / (then - at) for (at, value), (then, later) in combinations(samples, 2) if then > at]
    return statistics.median(slopes) if slopes else 0.0


def rise(samples: Sequence[Sample]) -> float:
    """From the floor of the first third to that of the last one."""
    third = max(1, len(samples) // 3)
    return _floor(samples[-third:]) - _floor(samples[:third])


def _floor(samples: Sequence[Sample]) -> float:
    ordered = sorted(value for _, value in samples)
    return ordered[int(_FLOOR * (len(ordered) - 1))]


def _second_half(samples: Sequence[Sample]) -> list[Sample]:
    if not samples:
        return []
    middle = (samples[0][0] + samples[-1][0]) / 2
    return [sample for sample in samples if sample[0] >= middle]


def _word(trend: float, allowed: float) -> str:
    if abs(trend) <= allowed:
        return FLAT
    return GROWING if trend > 0 else SHRINKING
