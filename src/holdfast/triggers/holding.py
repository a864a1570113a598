"""Waiting out an outage (requirement T5): nothing is handed over, nothing is lost, no retry is used up.

All messages that could not be handed over because something is down wait for the same moment, longer each time, and are
then tried together. Until the last of them has got through the trigger holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.core.backoff import Backoff
from holdfast.triggers.item import Item
from holdfast.triggers.lines import Lines

_log: Final = logging.getLogger("holdfast.trigger")

_WHY: Final = "holding"


class Holding:
    """Messages that wait because something is down. One event loop."""

    def __init__(
        self, name: str, lines: Lines[Item], sleep: Callable[[float], Awaitable[None]], changed: Callable[[], None]
    ) -> None:
        """`changed` is told when holding begins and when it ends."""
        self._name = name
        self._lines = lines
        self._sleep = sleep
        self._changed = changed
        self._backoff = Backoff()
        #: All that have not got through; and those of them that wait for the next round.
        self._held: set[Item] = set()
        self._waiting: list[Item] = []
        self._round: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, item: Item, reason: str) -> None:
        """Keep it until the next round."""
        began = not self._held
        self._held.add(item)
        self._waiting.append(item)
        if self._round is None:
            # Nothing else is taken meanwhile: it would fail as well.
            self._lines.shut(_WHY)
            self._round = asyncio.create_task(self._try_later(), name="holdfast-trigger-holding")
        if began:
            _log.warning(
                "trigger %s holds, and takes no more messages until it can hand them over: %s",
                self._name,
                reason,
                extra={"trigger": self._name, "trace_id": item.trace_id, "stage": "held"},
            )
            self._changed()

    def release(self, item: Item) -> None:
        """It has got through, or is off in another way."""
        if item not in self._held:
            return
        self._held.discard(item)
        if not self._held:
            self._backoff.reset()
            _log.warning("trigger %s goes on", self._name, extra={"trigger": self._name, "stage": "resumed"})
            self._changed()

    async def stop(self) -> list[Item]:
        """No more rounds; those that waited for one."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait({self._round})
        left, self._waiting = self._waiting, []
        self._held.clear()
        return left

    async def _try_later(self) -> None:
        await self._sleep(self._backoff.next_s())
        waiting, self._waiting = self._waiting, []
        self._round = None
        # The last one first: each goes to the head of the line.
        for item in reversed(waiting):
            self._lines.back(item)
        self._lines.open(_WHY)
