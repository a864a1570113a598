"""A clock that tests move by hand, so that an hour passes without waiting for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from holdfast.clock import Clock, to_ms
from holdfast.errors import InvalidOption

#: 2024-01-01T00:00:00Z: any instant does, as long as it is the same in every run.
START_MS: Final = 1_704_067_200_000


class ManualClock(Clock):
    """Stands still until `advance` is called. Safe to read from any thread."""

    def __init__(self, start_ms: int = START_MS) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by: timedelta | float) -> None:
        """Let time pass: a `timedelta`, or seconds."""
        span = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if span < timedelta():
            raise InvalidOption(f"time does not run backwards: advance({by!r}); use `jump` to test a clock that does")
        self._now_ms += to_ms(span)

    def jump(self, to_ms: int) -> None:
        """Set the clock, back or forth, as a bad time server would."""
        self._now_ms = to_ms
