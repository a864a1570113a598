"""Capacity planning: concurrency, processes and memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidOption
from holdfast.triggers.config import plan_capacity


@pytest.mark.parametrize(
    ("rate", "seconds", "cores", "waiting", "required", "concurrency"),
    [
        (500 / 60, 2, 8, True, 17, 17),
        (500 / 60, 2, 8, False, 17, 16),
        (10, 0.5, 8, False, 5, 5),
        (30, 0.1, 8, False, 3, 3),
        (0.01, 0.01, 8, False, 1, 1),
        (1000, 1, 2, False, 1000, 4),
    ],
)
def test_concurrency(rate: float, seconds: float, cores: int, waiting: bool, required: int, concurrency: int) -> None:
    plan = plan_capacity(rate=rate, seconds_per_message=seconds, message_bytes=1000, cores=cores, waiting=waiting)
    assert (plan.required, plan.concurrency) == (required, concurrency)
    assert plan.enough == (concurrency == required)
    assert plan.processes == math.ceil(required / concurrency)
    assert plan.rate == pytest.approx(concurrency / seconds)


def test_memory() -> None:
    plan = plan_capacity(rate=10, seconds_per_message=1, message_bytes=2**20, cores=5)
    assert plan.memory_mb == pytest.approx((100 + 10 * 100 + 50) * 1.5)
    assert plan_capacity(rate=1, seconds_per_message=1, message_bytes=0, cores=1).memory_mb == 225


@given(rate=st.floats(0.001, 1e6), seconds=st.floats(0.001, 1e3), cores=st.integers(1, 256), size=st.floats(0, 1e6))
def test_concurrency_is_limited_only_by_the_cores(rate: float, seconds: float, cores: int, size: float) -> None:
    free = plan_capacity(rate=rate, seconds_per_message=seconds, message_bytes=size, cores=cores, waiting=True)
    bound = plan_capacity(rate=rate, seconds_per_message=seconds, message_bytes=size, cores=cores)
    assert free.enough
    assert free.concurrency >= rate * seconds * (1 - 1e-6)
    assert free.concurrency <= rate * seconds + 1.000001
    assert bound.concurrency == min(free.concurrency, 2 * cores)
    assert bound.memory_mb <= free.memory_mb


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"rate": -1},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"seconds_per_message": 0},
        {"message_bytes": -1},
        {"message_bytes": float("nan")},
        {"cores": 0},
    ],
)
def test_invalid_numbers_are_refused(wrong: dict[str, float]) -> None:
    right = {"rate": 1, "seconds_per_message": 1, "message_bytes": 1, "cores": 1}
    with pytest.raises(InvalidOption, match="must be"):
        plan_capacity(**right | wrong)  # type: ignore[arg-type]
