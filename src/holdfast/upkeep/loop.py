"""A piece of upkeep, again and again: it waits as long as the piece says, and no failure ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from holdfast.cancelling import obey_cancellation
from holdfast.core.backoff import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.upkeep")


async def forever(name: str, turn: Callable[[], Awaitable[float]], wake: asyncio.Event | None = None) -> None:
    """Call `turn` until cancelled; it returns the seconds to its next turn, which `wake` cuts short."""
    backoff = Backoff()
    while True:
        try:
            pause_s = await turn()
            backoff.reset()
        except EngineUnavailable as exc:
            pause_s = backoff.next_s()
            _log.info("%s: the engine does not answer, trying again: %s", name, exc)
        except Exception:  # noqa: BLE001 - top of a loop
            pause_s = backoff.next_s()
            _log.exception("%s failed in an unexpected way, trying again", name)
        # Before the pause, which may last for minutes: a driver may have turned the cancellation into another error.
        obey_cancellation()
        await pause(pause_s, wake)


async def pause(seconds: float, wake: asyncio.Event | None) -> None:
    """Sleep, unless woken."""
    if wake is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return


class Queues:
    """Which queues to keep: those that were named, else all that the engine knows at the moment."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)

    @property
    def named(self) -> bool:
        """Whether they were named."""
        return bool(self._names)

    async def now(self) -> Sequence[str]:
        return self._names or await self._engine.queues()
