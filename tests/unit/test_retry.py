"""The delay before a failed job runs again."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.retry import Retry, duration_ms
from holdfast.errors import InvalidOption


def delays(policy: Retry, count: int) -> list[int]:
    return [policy.delay_ms(n, Random(n)) for n in range(1, count + 1)]


@given(retry_count=st.integers(1, 200), seed=st.integers())
def test_the_default_delay_follows_the_formula(retry_count: int, seed: int) -> None:
    delay = Retry().delay_ms(retry_count, Random(seed))
    jitter = delay - min(30_000, 1_000 * 2 ** (retry_count - 1))
    assert 0 <= jitter <= 300


def test_jitter_reaches_both_of_its_ends() -> None:
    random = Random(1)
    jitters = {Retry().delay_ms(1, random) - 1_000 for _ in range(20_000)}
    assert jitters == set(range(301))


def test_the_defaults_are_three_retries_from_one_second_to_thirty() -> None:
    policy = Retry()
    assert (policy.max_retries, policy.base_ms, policy.multiplier, policy.cap_ms, policy.jitter_ms) == (
        3,
        1_000,
        2.0,
        30_000,
        300,
    )
    assert policy.unavailable_deadline_ms is None


@pytest.mark.parametrize(
    ("policy", "retries", "expected"),
    [
        pytest.param(
            Retry(max_retries=3, base=1, cap=30, jitter=None), 3, [1_000, 2_000, 4_000], id="three from 1 s to 30 s"
        ),
        pytest.param(
            Retry(delays=[60, 300, 900], jitter=None), 3, [60_000, 300_000, 900_000], id="after 1, 5 and 15 minutes"
        ),
        pytest.param(
            Retry(max_attempts=10, base=1, cap=600, jitter=None),
            9,
            [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000],
            id="ten attempts from 1 s to 600 s",
        ),
        pytest.param(
            Retry(base=1.0, multiplier=2.0, cap=timedelta(days=1), jitter=None),
            3,
            [1_000, 2_000, 4_000],
            id="base times multiplier to the n",
        ),
    ],
)
def test_every_sources_policy_can_be_expressed(policy: Retry, retries: int, expected: list[int]) -> None:
    assert policy.max_retries == retries
    assert delays(policy, retries) == expected


def test_the_cap_holds_for_any_number_of_failures() -> None:
    policy = Retry(max_attempts=10, base=1, cap=600, jitter=None)
    assert policy.delay_ms(11, Random()) == 600_000
    assert policy.delay_ms(100_000, Random()) == 600_000


def test_the_last_delay_of_a_list_repeats() -> None:
    assert delays(Retry(max_retries=4, delays=[1, 5], jitter=None), 4) == [1_000, 5_000, 5_000, 5_000]


def test_a_list_of_delays_has_jitter_too() -> None:
    assert {Retry(delays=[1], jitter=0.01).delay_ms(1, Random(seed)) for seed in range(500)} == set(range(1_000, 1_011))


def test_no_backoff_is_valid() -> None:
    assert delays(Retry(max_retries=2, base=0, cap=0, jitter=None), 2) == [0, 0]


def test_max_attempts_counts_the_first_run() -> None:
    assert Retry(max_attempts=1).max_retries == 0
    assert Retry(max_attempts=4) == Retry(max_retries=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_retries": -1},
        {"max_attempts": 0},
        {"max_retries": 1, "max_attempts": 2},
        {"multiplier": 0.5},
        {"multiplier": float("nan")},
        {"base": -1},
        {"cap": -0.001},
        {"jitter": timedelta(seconds=-1)},
        {"delays": [1, -5]},
        {"base": "1s"},
        {"base": True},
        {"cap": float("nan")},
        {"cap": float("inf")},
        {"unavailable_deadline": -1},
    ],
    ids=str,
)
def test_an_invalid_policy_is_refused_at_construction(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption) as caught:
        Retry(**wrong)
    assert any(name in str(caught.value) for name in wrong)


def test_durations_are_timedeltas_or_seconds() -> None:
    assert duration_ms(timedelta(minutes=1), "x") == 60_000
    assert duration_ms(0.25, "x") == 250
    assert duration_ms(2, "x") == 2_000
    assert duration_ms(0, "x") == 0


def test_a_long_base_raises_the_default_cap() -> None:
    policy = Retry(base=60, jitter=None)
    assert [policy.delay_ms(count, Random(1)) for count in (1, 2)] == [60_000, 60_000]
    assert Retry(base=60, cap=30, jitter=None).delay_ms(1, Random(1)) == 30_000
