"""Background duties on the engine: promote due jobs, reclaim expired leases, prune.

- `Promoter` makes delayed jobs and retries ready when they are due. It sleeps until the next due time that the engine
  reported, and checks once a second in any case, since a notice may be lost. The engine's clock decides what is due;
  the local clock only measures the sleep.
- `Reclaimer` reclaims expired leases of jobs that had not started, where no worker runs, and releases the jobs so that
  a worker may claim them. A worker does that by itself. Suspects wait for a worker (`lost_leases`).
- `EnginePruner` deletes what has expired (old results, finished records, dead consumers), and ends jobs that wait for
  a ledger which the engine no longer has.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Final

from holdfast.core.job import MAX_BATCH
from holdfast.core.verdict import Release, Settlement
from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import JobPort
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.upkeep.dead_letters import OrphanedDeadLetters
from holdfast.upkeep.loop import QueueSelection, next_part, run_forever
from holdfast.upkeep.lost_leases import HasStarted, LostLeases, assume_started

_CHECK_S: Final = 1.0
#: Queues with a notice that are promoted at a time. Few enough that the engine reads each.
_NOTICED: Final = 50


class Promoter:
    """Promotes until cancelled."""

    def __init__(self, engine: JobPort, queues: QueueSelection, random: Random | None = None) -> None:
        self._engine = engine
        self._queues = queues
        self._random = random or Random()
        self._wake = asyncio.Event()
        self._next_at = 0.0
        self._offset_s = 0.0
        #: Queues with a notice since the last pass: of many queues, the engine does not read idle ones in every pass.
        self._noticed: set[str] = set()

    async def run(self) -> None:
        """Promote due jobs repeatedly until cancelled."""
        await run_forever("promoter", self._run_once, self._wake)

    def due(self, queue: str, at_ms: int) -> None:
        """Note a job that is due at this time of the engine's clock, and wake up for it."""
        self._noticed.add(queue)
        at = at_ms / 1000 - self._offset_s
        if at < self._next_at:
            self._next_at = at
            self._wake.set()

    async def _run_once(self) -> float:
        left_s = self._next_at - time.monotonic()
        if self._wake.is_set() and left_s > 0:
            # Woken for a job that is due sooner than expected, but not yet.
            self._wake.clear()
            return left_s
        self._wake.clear()
        wait_s = await self._promote()
        self._next_at = time.monotonic() + wait_s
        return wait_s

    async def _promote(self) -> float:
        queues = await self._queues.names()
        noticed = sorted(self._noticed.intersection(queues))
        self._noticed.clear()
        for start in range(0, len(noticed), _NOTICED):
            await self._engine.promote(noticed[start : start + _NOTICED], MAX_BATCH)
        while True:
            promotion = await self._engine.promote(queues, MAX_BATCH)
            if promotion.count < MAX_BATCH:
                break
        self._offset_s = promotion.now_ms / 1000 - time.monotonic()
        check_s = _CHECK_S * self._random.uniform(1.0, 1.2)
        if not promotion.next_due_at_ms:
            return check_s
        return min(check_s, max(0.001, (promotion.next_due_at_ms - promotion.now_ms) / 1000))


_MIN_PAUSE_S: Final = 0.02


class Reclaimer:
    """Reclaims until cancelled, under its own incarnation."""

    def __init__(
        self,
        engine: JobPort,
        queues: QueueSelection,
        settings: Settings,
        incarnation: str,
        has_started: HasStarted = assume_started,
        random: Random | None = None,
    ) -> None:
        self._engine = engine
        self._queues = queues
        self._settings = settings
        self._incarnation = incarnation
        self._lost = LostLeases(engine, incarnation, has_started)
        self._random = random or Random()
        #: Whether the last pass may have reclaimed jobs that it could not release.
        self._in_doubt = True
        self._wake = asyncio.Event()

    def reclaim_soon(self) -> None:
        """Reclaim now, because leases have expired."""
        self._wake.set()

    async def run(self) -> None:
        """Reclaim and release repeatedly until cancelled."""
        await run_forever("reclaimer", self._run_once, self._wake)

    async def close(self) -> None:
        """Deregister from the engine."""
        await self._engine.deregister_worker(self._incarnation, await self._queues.names())

    async def _run_once(self) -> float:
        self._wake.clear()
        queues = await self._queues.names()
        batch = self._settings.reclaim_batch
        in_doubt, self._in_doubt = self._in_doubt, True
        try:
            claims = await self._lost.reclaim(queues, batch)
        except EngineUnavailable:
            self._engine.counters.reclaim_errors += 1
            raise
        if in_doubt:
            # Claims that an earlier pass reclaimed but could not release, because the engine became unreachable.
            claims += await self._engine.recover_claims(self._incarnation, queues, {claim.lease for claim in claims})
        if claims:
            verdict = Release("released by upkeep")
            await self._engine.settle([Settlement(claim, verdict, claim.claimed_at_ms) for claim in claims])
        self._in_doubt = False
        if self._lost.found >= batch:
            return 0.0
        return max(_MIN_PAUSE_S, self._settings.reclaim_interval_s) * self._random.uniform(0.6, 1.0)


_PAUSE_S: Final = 30.0
#: Queues of one pass.
_PRUNED: Final = 200


class EnginePruner:
    """Prunes about every 30 s until cancelled. Of many queues, each pass prunes the next `_PRUNED` by name."""

    def __init__(self, engine: Engine, queues: QueueSelection, random: Random | None = None) -> None:
        self._engine = engine
        self._queues = queues
        self._orphans = OrphanedDeadLetters(engine)
        self._last = ""
        self._random = random or Random()

    async def run(self) -> None:
        """Prune repeatedly until cancelled."""
        await run_forever("pruner", self._run_once)

    async def _run_once(self) -> float:
        queues = next_part(await self._queues.names(), self._last, _PRUNED)
        self._last = queues[-1] if queues else ""
        await self._engine.prune(queues)
        await self._engine.for_each_queue(queues, self._orphans.finish)
        return _PAUSE_S * self._random.uniform(0.8, 1.2)
