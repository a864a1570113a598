"""Leases of a relay on outbox lanes: which lanes it holds, until when, and for how many destinations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from holdfast.core.publishing import LANES
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.messages import OutboxStore, PublishResult
from holdfast.settings import Settings

_log: Final = logging.getLogger("holdfast.outbox")

#: Lanes per flight, limited so that several relays share the work.
_LANES_AT_ONCE: Final = LANES // 4


class HeldLanes(NamedTuple):
    """Leased lanes, each with a number that changes when its lease is interrupted."""

    lanes: tuple[int, ...]
    times: tuple[int, ...]


class LaneLeases:
    """Lanes leased by this relay for all destinations. A lane is released when no destination uses it."""

    def __init__(self, store: OutboxStore, relay: str, settings: Settings) -> None:
        self._store = store
        self._relay = relay
        self._lease_s = settings.outbox_lease_s
        self._dead_blocks = settings.outbox_dead_blocks
        self._users: Counter[int] = Counter()
        #: By lane: lease deadline by the local clock, and how often it was acquired when no lease was valid.
        self._until: dict[int, float] = {}
        self._times: Counter[int] = Counter()
        #: Serialises acquire and release: a lane being released must not count as acquired.
        self._changing = asyncio.Lock()

    async def acquire(self, destinations: Sequence[str], busy: Collection[int]) -> HeldLanes:
        """Acquire lanes that have due events and are not busy. Leases of busy lanes are extended."""
        async with self._changing:
            began = time.monotonic()
            acquired = await self._store.acquire_lanes(
                self._relay,
                destinations,
                _LANES_AT_ONCE,
                round(self._lease_s * 1000),
                dead_blocks=self._dead_blocks,
            )
            for lane in acquired:
                if time.monotonic() >= self._until.get(lane, 0.0):
                    # Another relay may have leased it in between: events read before are stale.
                    self._times[lane] += 1
                self._until[lane] = began + self._lease_s
            fresh = tuple(lane for lane in acquired if lane not in busy)
            self._users.update(fresh)
            return HeldLanes(fresh, tuple(self._times[lane] for lane in fresh))

    def remaining_s(self, leased: HeldLanes) -> float:
        """Time until the first lease expires. At 0 or less, another relay may hold a lane."""
        if any(self._times[lane] != number for lane, number in zip(*leased, strict=True)):
            return 0.0
        return min(self._until[lane] for lane in leased.lanes) - time.monotonic()

    async def record_results(self, leased: HeldLanes, marks: Sequence[PublishResult]) -> bool:
        """Write results and extend the leases, if the lanes are still leased. Returns whether they were."""
        began = time.monotonic()
        if self.remaining_s(leased) <= 0 or not await self._store.record_results(self._relay, leased.lanes, marks):
            return False
        self._until.update(dict.fromkeys(leased.lanes, began + self._lease_s))
        return True

    async def release(self, lanes: Sequence[int]) -> None:
        """End one use of these lanes and release those without another.

        If the store is unreachable, they become free when their lease expires.
        """
        async with self._changing:
            self._users.subtract(lanes)
            free = [lane for lane in lanes if self._users[lane] <= 0]
            if free:
                for lane in free:
                    self._until.pop(lane, None)
                try:
                    await self._store.release_lanes(self._relay, free)
                except LedgerUnavailable as exc:
                    _log.debug("lanes not released, their leases will expire: %s", exc)
