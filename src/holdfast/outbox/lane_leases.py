"""The lanes that a relay holds: which are surely its own, for how long, and for which of its destinations."""

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

#: Lanes of one flight, so that several relays share the work.
_LANES_AT_ONCE: Final = LANES // 4


class HeldLanes(NamedTuple):
    """Lanes, and which time we have held each of them without a break."""

    lanes: tuple[int, ...]
    times: tuple[int, ...]


class LaneLeases:
    """The lanes that this relay holds, for all of its destinations: a lane is given back when none of them uses it."""

    def __init__(self, store: OutboxStore, relay: str, settings: Settings) -> None:
        self._store = store
        self._relay = relay
        self._lease_s = settings.outbox_lease_s
        self._dead_blocks = settings.outbox_dead_blocks
        self._users: Counter[int] = Counter()
        #: Until when they are surely ours, by this machine's clock; and how often that began anew.
        self._until: dict[int, float] = {}
        self._times: Counter[int] = Counter()
        #: A lane that is being given back must not be taken for ours in the same moment.
        self._changing = asyncio.Lock()

    async def acquire(self, destinations: Sequence[str], busy: Collection[int]) -> HeldLanes:
        """Lanes with something due that are not busy. Those that are busy are ours for longer."""
        async with self._changing:
            began = time.monotonic()
            taken = await self._store.acquire_lanes(
                self._relay,
                destinations,
                _LANES_AT_ONCE,
                round(self._lease_s * 1000),
                dead_blocks=self._dead_blocks,
            )
            for lane in taken:
                if time.monotonic() >= self._until.get(lane, 0.0):
                    # Somebody else may have had it in between: what was read of it before is worth nothing.
                    self._times[lane] += 1
                self._until[lane] = began + self._lease_s
            fresh = tuple(lane for lane in taken if lane not in busy)
            self._users.update(fresh)
            return HeldLanes(fresh, tuple(self._times[lane] for lane in fresh))

    def remaining_s(self, held: HeldLanes) -> float:
        """How long they are surely ours without a word to the store; 0 or less: they may be somebody else's."""
        if any(self._times[lane] != number for lane, number in zip(*held, strict=True)):
            return 0.0
        return min(self._until[lane] for lane in held.lanes) - time.monotonic()

    async def record_results(self, held: HeldLanes, marks: Sequence[PublishResult]) -> bool:
        """Whether it is written down; the lanes are ours for one more lease then."""
        began = time.monotonic()
        if self.remaining_s(held) <= 0 or not await self._store.record_results(self._relay, held.lanes, marks):
            return False
        self._until.update(dict.fromkeys(held.lanes, began + self._lease_s))
        return True

    async def release(self, lanes: Sequence[int]) -> None:
        """One user less. If the store does not hear of it, they are free when their lease is over."""
        async with self._changing:
            self._users.subtract(lanes)
            free = [lane for lane in lanes if self._users[lane] <= 0]
            if free:
                for lane in free:
                    self._until.pop(lane, None)
                try:
                    await self._store.release_lanes(self._relay, free)
                except LedgerUnavailable as exc:
                    _log.debug("lanes were not given back: %s", exc)
