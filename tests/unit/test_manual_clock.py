"""The manual clock."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.errors import InvalidOption
from holdfast.testing.inline import START_MS, ManualClock


def test_time_is_constant_until_it_is_advanced() -> None:
    clock = ManualClock()
    assert clock.now_ms() == clock.now_ms() == START_MS
    clock.advance(1.5)
    clock.advance(timedelta(minutes=1))
    assert clock.now_ms() == START_MS + 61_500


def test_time_goes_back_only_by_jump() -> None:
    clock = ManualClock(start_ms=1_000)
    with pytest.raises(InvalidOption):
        clock.advance(-1)
    clock.jump(to_ms=10)
    assert clock.now_ms() == 10
