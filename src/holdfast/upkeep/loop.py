"""The loop around a background duty, the queues it serves, and throttled logging of its failures.

`run_forever` waits as long as the duty's last pass returned; no failure ends it. `LogThrottle` logs a failure when it
starts and then once a minute, not with every try.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.upkeep")


async def run_forever(name: str, run_once: Callable[[], Awaitable[float]], wake: asyncio.Event | None = None) -> None:
    """Call `run_once` until cancelled.

    It returns the seconds to pause before the next call; `wake` ends the pause early.
    """
    backoff = Backoff()
    while True:
        try:
            pause_s = await run_once()
            backoff.reset()
        except EngineUnavailable as exc:
            pause_s = backoff.next_s()
            _log.info("%s: cannot reach the engine, retrying: %s", name, exc)
        except Exception:  # noqa: BLE001 - top of a loop
            pause_s = backoff.next_s()
            _log.exception("%s failed unexpectedly, retrying", name)
        # Before the pause, which may last for minutes: a driver may have turned the cancellation into another error.
        raise_if_cancelled()
        await pause(pause_s, wake)


async def pause(seconds: float, wake: asyncio.Event | None) -> None:
    """Sleep until the time is over or `wake` is set."""
    if wake is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return


class QueueSelection:
    """The queues that upkeep serves: those named, otherwise all that the engine has at the moment."""

    def __init__(self, engine: ReadPort, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)

    @property
    def is_explicit(self) -> bool:
        """Whether the queues were named."""
        return bool(self._names)

    async def names(self) -> Sequence[str]:
        return self._names or await self._engine.queues()


def next_part(queues: Sequence[str], after: str, size: int) -> list[str]:
    """At most `size` queues: those after `after` by name, then from the start."""
    names = sorted(queues)
    if len(names) <= size:
        return names
    start = bisect_right(names, after)
    return (names[start:] + names[:start])[:size]


_REPEAT_S: Final = 60.0


class LogThrottle:
    """Throttled log of one recurring failure."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_at: float | None = None

    def log(self, level: int, message: str, *arguments: object, cause: Exception | None = None) -> None:
        """Log the failure, unless it was logged within the last minute."""
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= _REPEAT_S:
            self._logged_at = now
            self._log.log(level, message, *arguments, exc_info=cause)

    def reset(self) -> bool:
        """Record a success; returns whether a failure had been logged."""
        logged, self._logged_at = self._logged_at is not None, None
        return logged
