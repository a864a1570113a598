"""Pauses between attempts to reach a store."""

from __future__ import annotations

from random import Random

from holdfast.core.retry import Backoff


def test_pauses_double_up_to_the_cap_and_are_spread() -> None:
    backoff = Backoff(Random(1), base_s=1.0, cap_s=8.0)
    for middle in (1, 2, 4, 8, 8, 8):
        assert 0.5 * middle <= backoff.next_s() <= 1.5 * middle
    assert backoff.failures == 6
    assert len({Backoff(Random(seed)).next_s() for seed in range(50)}) == 50


def test_success_starts_over() -> None:
    backoff = Backoff(Random(1), base_s=1.0, cap_s=8.0)
    for _ in range(2_000):  # far beyond where doubling would overflow
        backoff.next_s()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() <= 1.5
