"""The wall clock as a dependency, and conversions between milliseconds, `datetime` and ISO 8601.

Leases, retries and schedules use the *engine's* clock: Redis `TIME`, or this `Clock` when embedded, where engine and
worker share a machine. Durations in a worker use the monotonic clock and are not affected by a step of the wall clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time in whole milliseconds since the epoch, UTC."""

    def now_ms(self) -> int: ...


class SystemClock(Clock):
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def to_ms(value: timedelta) -> int:
    """A duration in whole milliseconds."""
    return round(value / timedelta(milliseconds=1))


def to_datetime(at_ms: int) -> datetime:
    """An aware UTC instant from milliseconds since the epoch."""
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def iso(at_ms: int) -> str | None:
    """ISO 8601 in UTC with milliseconds; None for "never"."""
    return to_datetime(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at_ms else None
