"""Flat or growing: the rule that judges a long run, on generated series with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.endurance.model import Endurance
from benchmarks.endurance.page import text
from benchmarks.endurance.verdict import (
    COUNT,
    FLAT,
    GROWING,
    LENGTH,
    MEMORY,
    REPORTED,
    SHRINKING,
    TOO_SHORT,
    Limit,
    judge,
    rise,
    theil_sen,
)
from benchmarks.endurance.watch import LIMITS, limit_of

EVERY_S = 5
MINUTES = 30
MB = 1e6


def series(value: Callable[[float], float], minutes: float = MINUTES) -> list[tuple[float, float]]:
    return [(float(at), value(at)) for at in range(0, round(minutes * 60) + 1, EVERY_S)]


def noise(share: float) -> Callable[[float], float]:
    random_ = random.Random(7)
    return lambda level: level * random_.gauss(1, share)


def test_a_constant_series_is_flat() -> None:
    verdict = judge(series(lambda _: 80 * MB), MEMORY)
    assert (verdict.word, verdict.level, verdict.growth, verdict.peak) == (FLAT, 80 * MB, 0, 80 * MB)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_noise_is_flat(share: float) -> None:
    jitter = noise(share)
    assert judge(series(lambda _: jitter(80 * MB)), MEMORY).word == FLAT


@pytest.mark.parametrize("period_s", [30, 60, 300])
def test_a_saw_tooth_is_flat(period_s: int) -> None:
    assert judge(series(lambda at: 20_000 * (at % period_s) / period_s), LENGTH).word == FLAT


def test_a_warm_up_is_not_growth() -> None:
    assert judge(series(lambda at: min(at, 600) * MB), MEMORY).word == FLAT


def test_a_slow_leak_is_growth() -> None:
    # One byte a job at 4,000 jobs/s.
    jitter = noise(0.005)
    verdict = judge(series(lambda at: jitter(80 * MB) + 4_000 * at), MEMORY)
    assert verdict.word == GROWING
    assert verdict.growth == pytest.approx(4_000 * 900, rel=0.1)


def test_a_leak_under_a_saw_tooth_is_growth() -> None:
    def value(at: float) -> float:
        return 5_000 * (at % 60) / 60 + 5 * at

    assert judge(series(value), LENGTH).word == GROWING


def test_handles_that_are_never_closed_are_growth() -> None:
    assert judge(series(lambda at: 20 + at // 120), COUNT).word == GROWING
    assert judge(series(lambda at: 20 + (at // 60) % 2), COUNT).word == FLAT


def test_outliers_do_not_change_the_verdict() -> None:
    random_ = random.Random(3)
    assert judge(series(lambda _: 80 * MB if random_.random() > 0.1 else 800 * MB), MEMORY).word == FLAT


def test_a_shrinking_series_does_not_fail() -> None:
    verdict = judge(series(lambda at: 800 * MB - at * MB / 10), MEMORY)
    assert (verdict.word, verdict.fails) == (SHRINKING, False)


def test_growth_below_the_floor_or_the_share_is_flat() -> None:
    assert judge(series(lambda at: 100 + at / 1_000), Limit(0, 1)).word == FLAT
    assert judge(series(lambda at: 100 + at / 1_000), Limit(0.02, 0)).word == FLAT
    assert judge(series(lambda at: 100 + at / 1_000), Limit(0.005, 0.5)).word == GROWING


def test_short_series_and_series_without_a_limit_are_not_judged() -> None:
    assert judge(series(lambda at: at * MB, minutes=1), MEMORY).word == TOO_SHORT
    assert judge([], MEMORY).word == TOO_SHORT
    assert judge(series(lambda at: at * MB), None).word == REPORTED


def test_the_page_of_a_short_run_makes_no_claim() -> None:
    endurance = Endurance("2026-11-16", {}, minutes=1, top_per_s=10, wanted_per_s=5, expire_s=5, every_s=5)
    endurance.verdicts["Redis: keys"] = judge([], LENGTH)
    assert "**Too short to say what grows.**" in text(endurance, "picture.png")
    endurance.verdicts["Redis: keys"] = judge(series(lambda _: 1), LENGTH)
    assert "**Nothing grows.**" in text(endurance, "picture.png")


def test_the_slope_and_rise_of_a_line_are_exact() -> None:
    line = [(float(at), 3.0 * at) for at in range(20)]
    assert theil_sen(line) == pytest.approx(3)
    assert rise(line) == 3 * 14
    assert (theil_sen(line[:1]), rise(line[:1])) == (0, 0)


def test_every_kind_of_series_has_its_limit() -> None:
    assert limit_of("worker 1: memory, bytes") is MEMORY
    assert limit_of("PostgreSQL: size, bytes") is None
    assert {limit_of(f"x: {ending}") for ending in LIMITS} >= {MEMORY, LENGTH, COUNT, None}
