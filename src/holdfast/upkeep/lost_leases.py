"""Reclaim expired leases: release the jobs whose code had not begun, and leave suspects where they are.

A job whose code ran when its lease was lost may be what ended its worker. It is a suspect: it runs again only while no
other job runs in the same process (requirement Q7). Until a worker takes it (`claim_suspect`), its expired lease stays
in the name of the worker that lost it, and keeps its delivery count. A job that had not started, because its worker
had only prefetched it, is released: that uses up no attempt, and it counts as never lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from holdfast.core.job import Claim, Lease
from holdfast.core.verdict import Release, Settlement
from holdfast.engine.port.jobs import JobPort

_log: Final = logging.getLogger("holdfast.upkeep")

#: Whether the code of this job may have begun in this worker. True if that is not known.
HasStarted = Callable[[str, str], bool]


def assume_started(worker: str, job_id: str) -> bool:
    """Nothing is known about that worker: all its jobs may have started."""
    return True


class LostLeases:
    """Expired leases, as one worker or upkeep process reclaims them."""

    def __init__(self, engine: JobPort, worker: str, has_started: HasStarted = assume_started) -> None:
        self._engine = engine
        self._worker = worker
        self._has_started = has_started
        #: Suspects that the last pass left, and leases that it reclaimed.
        self.suspects = 0
        self.found = 0

    async def reclaim(
        self,
        queues: Sequence[str],
        limit: int,
        retries: int | None = None,
        *,
        in_flight: Collection[Lease] = (),
        release: bool = True,
    ) -> list[Claim]:
        """Release jobs that had not started; return up to `retries` due retries of the pending list, which may run.

        Leases in flight are left to the renewer of this worker: their jobs would run twice in one process. Without
        `release`, another process releases jobs, and this one only counts the suspects.
        """
        suspects = 0

        def is_released(lease: Lease) -> bool:
            nonlocal suspects
            if lease in in_flight:
                return False
            if self._has_started(lease.worker, lease.job_id):
                suspects += 1
                return False
            return release

        claims = await self._engine.reclaim(self._worker, queues, limit, is_released, retries)
        self.suspects, self.found = suspects, len(claims)
        return await self.release_lost(claims)

    async def claim_suspect(self, queues: Sequence[str]) -> list[Claim]:
        """Claim a suspect, which must run alone; empty if there is none."""
        return await self._engine.reclaim(self._worker, queues, 1, self._is_suspect, 0)

    async def release_lost(self, claims: Sequence[Claim]) -> list[Claim]:
        """Release those of the claims whose lease was lost; return the others."""
        if lost := [claim for claim in claims if claim.is_suspect]:
            verdict = Release("its worker was lost before it started")
            await self._engine.settle([Settlement(claim, verdict, claim.claimed_at_ms) for claim in lost])
            _log.info("released %d jobs of lost workers that had not started", len(lost))
        return [claim for claim in claims if not claim.is_suspect]

    def _is_suspect(self, lease: Lease) -> bool:
        return self._has_started(lease.worker, lease.job_id)
