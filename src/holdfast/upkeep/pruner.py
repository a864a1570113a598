"""Drops what has expired: old results, finished records, dead consumers. Ends jobs that wait for a ledger in vain."""

from __future__ import annotations

from random import Random
from typing import Final

from holdfast.engine.port import Engine
from holdfast.upkeep.dead_letters import Unrecorded
from holdfast.upkeep.loop import Queues, forever

_PAUSE_S: Final = 30.0


class Pruner:
    """Prunes until cancelled, about every 30 seconds."""

    def __init__(self, engine: Engine, queues: Queues, random: Random | None = None) -> None:
        self._engine = engine
        self._queues = queues
        self._unrecorded = Unrecorded(engine)
        self._random = random or Random()

    async def run(self) -> None:
        """Prune, again and again."""
        await forever("pruner", self._turn)

    async def _turn(self) -> float:
        queues = await self._queues.now()
        await self._engine.prune(queues)
        await self._engine.reach(queues, self._unrecorded.move_on)
        return _PAUSE_S * self._random.uniform(0.8, 1.2)
