"""Reading along with the engine's feed, from now on; for screens only, it registers no reader.

A feed without a registered reader is bounded, so a reader that is too slow may miss entries: rates are
then too low, nothing else.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.core.job import Event
from holdfast.engine.port import Engine

_PAGE: Final = 200
#: Getting to the end of a long feed may take a while; longer than this no screen should stand still.
_PATIENCE_S: Final = 2.0


class Follower:
    """The events of one queue that happened after `skip`."""

    def __init__(self, engine: Engine, queue: str) -> None:
        self._engine = engine
        self._queue = queue
        self._position = ""

    async def skip(self) -> None:
        """Go to the end of the feed as it is now."""
        await self._read(keep=False)

    async def read(self) -> list[Event]:
        """What was appended since the last call."""
        return await self._read(keep=True)

    async def _read(self, *, keep: bool) -> list[Event]:
        events: list[Event] = []
        give_up_at = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up_at:
            entries = await self._engine.feed(self._queue, self._position, _PAGE)
            new = [entry for entry in entries if entry.position != self._position]
            if not new:
                break
            self._position = new[-1].position
            if keep:
                events += [event for entry in new for event in entry.events]
            if len(entries) < _PAGE:
                break
        return events
