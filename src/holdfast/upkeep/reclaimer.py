"""Lost leases, where no worker runs: takes them over and gives them back, so that a worker may claim them.

A worker does this by itself, and runs what it takes over. The attempt that died stays counted.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Final

from holdfast.core.verdict import Release, Settlement
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.upkeep.loop import Queues, forever

_log: Final = logging.getLogger("holdfast.upkeep")

_MIN_PAUSE_S: Final = 0.02


class Reclaimer:
    """Reclaims until cancelled, under an incarnation of its own."""

    def __init__(
        self, engine: Engine, queues: Queues, settings: Settings, incarnation: str, random: Random | None = None
    ) -> None:
        self._engine = engine
        self._queues = queues
        self._settings = settings
        self._incarnation = incarnation
        self._random = random or Random()

    async def run(self) -> None:
        """Take over and give back, again and again."""
        await forever("reclaimer", self._turn)

    async def leave(self) -> None:
        """This reclaimer is gone for good."""
        await self._engine.leave(self._incarnation, await self._queues.now())

    async def _turn(self) -> float:
        queues = await self._queues.now()
        batch = self._settings.reclaim_batch
        try:
            claims = await self._engine.reclaim(self._incarnation, queues, batch)
        except EngineUnavailable:
            self._engine.counts.reclaim_errors += 1
            raise
        # What an earlier turn took over but could not give back, because the engine went away.
        claims += await self._engine.resume(self._incarnation, queues, {claim.lease for claim in claims})
        if claims:
            verdict = Release("its worker was lost; given back by upkeep")
            await self._engine.settle([Settlement(claim, verdict, claim.claimed_at_ms) for claim in claims])
            _log.info("%d jobs of lost workers given back", len(claims))
        if len(claims) >= batch:
            return 0.0
        return max(_MIN_PAUSE_S, self._settings.reclaim_interval_s) * self._random.uniform(0.6, 1.0)
