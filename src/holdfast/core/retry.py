"""How long to wait before a retry (requirements Y1, Y8, Y9), and backoff for unreachable stores.

Whether a failed attempt is retried at all is decided by `verdict.judge`.

`Retry`: `delay = min(cap, base · multiplier^(n−1)) + jitter`, n counting retries from 1, or a list of delays.
`Backoff`: waits that grow up to a limit, spread at random so that processes do not retry at the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Final

from holdfast.clock import to_ms
from holdfast.errors import InvalidOption

#: A duration as users write it: a `timedelta`, or seconds.
Duration = timedelta | float | int

_MAX_RETRIES: Final = 3
_CAP_MS: Final = 30_000
#: No cap needs more doublings than this, and 2.0 ** 2000 overflows.
_MAX_EXPONENT: Final = 64
#: Longer durations are mistakes, and some would end after the last year that a datetime can represent.
_LONGEST: Final = timedelta(days=365_000)


def duration_ms(value: Duration, name: str) -> int:
    """Convert to whole milliseconds. Raises `InvalidOption`, which names the option."""
    if isinstance(value, bool) or not isinstance(value, timedelta | float | int):
        raise InvalidOption(f"{name} must be a timedelta or a number of seconds, not {value!r}")
    try:
        span = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError) as exc:
        raise InvalidOption(f"{name}={value!r} is not a duration") from exc
    if span < timedelta():
        raise InvalidOption(f"{name} must not be negative, got {span.total_seconds():g} s")
    if span > _LONGEST:
        raise InvalidOption(f"{name} must be at most {_LONGEST.days} days, got {span.days}")
    return to_ms(span)


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """How often and when a failed job is retried.

    The defaults: three retries after about 1, 2 and 4 seconds; a delay is at most 30 seconds (or `base`, if longer).

    >>> Retry(max_retries=3, delays=[60, 300, 900])           # after 1, 5 and 15 minutes
    >>> Retry(max_attempts=10, base=1, cap=600, jitter=None)  # ten runs, 1 s doubling up to 10 min

    `unavailable_deadline` bounds how long a job waits for an unavailable dependency, which uses up no retries.
    Default: no bound.
    """

    max_retries: int
    base_ms: int
    multiplier: float
    cap_ms: int
    jitter_ms: int
    delays_ms: tuple[int, ...]
    unavailable_deadline_ms: int | None

    def __init__(
        self,
        max_retries: int | None = None,
        *,
        max_attempts: int | None = None,
        base: Duration = 1.0,
        multiplier: float = 2.0,
        cap: Duration | None = None,
        jitter: Duration | None = 0.3,
        delays: Sequence[Duration] = (),
        unavailable_deadline: Duration | None = None,
    ) -> None:
        if max_retries is not None and max_attempts is not None:
            raise InvalidOption("give max_retries or max_attempts, not both")
        if max_attempts is not None:
            max_retries = max_attempts - 1
        if max_retries is None:
            max_retries = len(delays) or _MAX_RETRIES
        if max_retries < 0:
            raise InvalidOption(f"max_retries must be 0 or more (max_attempts 1 or more), got {max_retries}")
        if not multiplier >= 1:
            raise InvalidOption(f"multiplier must be 1 or more, got {multiplier!r}")
        put = object.__setattr__
        put(self, "max_retries", max_retries)
        base_ms = duration_ms(base, "base")
        put(self, "base_ms", base_ms)
        put(self, "multiplier", float(multiplier))
        put(self, "cap_ms", max(_CAP_MS, base_ms) if cap is None else duration_ms(cap, "cap"))
        put(self, "jitter_ms", 0 if jitter is None else duration_ms(jitter, "jitter"))
        put(self, "delays_ms", tuple(duration_ms(delay, "delays") for delay in delays))
        put(
            self,
            "unavailable_deadline_ms",
            None if unavailable_deadline is None else duration_ms(unavailable_deadline, "unavailable_deadline"),
        )

    def delay_ms(self, retry_count: int, random: Random) -> int:
        """The wait before the `retry_count`-th retry, counted from 1."""
        jitter = random.randint(0, self.jitter_ms) if self.jitter_ms else 0
        if self.delays_ms:
            return self.delays_ms[min(retry_count, len(self.delays_ms)) - 1] + jitter
        grown = self.base_ms * self.multiplier ** min(retry_count - 1, _MAX_EXPONENT)
        return int(min(self.cap_ms, grown)) + jitter


_BASE_S: Final = 0.05
_CAP_S: Final = 2.0
_MAX_BACKOFF_EXPONENT: Final = 16


class Backoff:
    """Waits that double, by default from 50 ms to 2 s.

    Each is spread by ± 50 %, so that workers do not retry at the same moment.
    """

    def __init__(self, random: Random | None = None, *, base_s: float = _BASE_S, cap_s: float = _CAP_S) -> None:
        self._random = random or Random()
        self._base_s = base_s
        self._cap_s = cap_s
        self.failures = 0

    def next_s(self) -> float:
        """Count a failure and return how long to wait."""
        grown = min(self._cap_s, self._base_s * 2.0 ** min(self.failures, _MAX_BACKOFF_EXPONENT))
        self.failures += 1
        return grown * self._random.uniform(0.5, 1.5)

    def reset(self) -> None:
        self.failures = 0
