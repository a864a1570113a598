"""Puts jobs in line when they fall due: delayed ones and retries.

It sleeps until the next one is due, as the engine told it, and looks once a second in any case, since a
notice may be lost. The engine's clock decides what is due; ours only measures the sleep.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Final

from holdfast.engine.port import MAX_BATCH, Engine
from holdfast.upkeep.loop import Queues, forever

_LOOK_S: Final = 1.0


class Promoter:
    """Promotes until cancelled."""

    def __init__(self, engine: Engine, queues: Queues, random: Random | None = None) -> None:
        self._engine = engine
        self._queues = queues
        self._random = random or Random()
        self._wake = asyncio.Event()
        self._next_at = 0.0
        self._offset_s = 0.0

    async def run(self) -> None:
        """Promote what is due, again and again."""
        await forever("promoter", self._turn, self._wake)

    def due(self, at_ms: int) -> None:
        """A job waits that is due at that time of the engine's clock: be there."""
        at = at_ms / 1000 - self._offset_s
        if at < self._next_at:
            self._next_at = at
            self._wake.set()

    async def _turn(self) -> float:
        left_s = self._next_at - time.monotonic()
        if self._wake.is_set() and left_s > 0:
            # Woken for one that is due sooner than we thought, but not yet.
            self._wake.clear()
            return left_s
        self._wake.clear()
        wait_s = await self._promote()
        self._next_at = time.monotonic() + wait_s
        return wait_s

    async def _promote(self) -> float:
        queues = await self._queues.now()
        while True:
            promotion = await self._engine.promote(queues, MAX_BATCH)
            if promotion.count < MAX_BATCH:
                break
        self._offset_s = promotion.now_ms / 1000 - time.monotonic()
        look_s = _LOOK_S * self._random.uniform(1.0, 1.2)
        if not promotion.next_due_at_ms:
            return look_s
        return min(look_s, max(0.001, (promotion.next_due_at_ms - promotion.now_ms) / 1000))
