"""One feed as a projector follows it: what was read, what comes next, how much goes into a batch, and its troubles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.upkeep.loop import LogThrottle

_log: Final = logging.getLogger("holdfast.projector")

#: A batch of so many events waits for no company …
ENOUGH_EVENTS: Final = 3_000
#: … and no more than this goes into one transaction when there is a backlog.
MOST_EVENTS: Final = 10_000
MOST_BYTES: Final = 16 * 1024 * 1024
#: A batch that the ledger does not take in time is halved, down to this part of the above.
SMALLEST_SHARE: Final = 1 / 256
#: Entries read at a time: one holds up to some 500 events, most of them far fewer.
_FIRST_READ: Final = 20
_MOST_READ: Final = 500
#: A queue that cannot be projected is tried again after this, twice as long each time, up to …
_TROUBLE_S: Final = 0.1
_MOST_TROUBLE_S: Final = 30.0
#: How often to look for jobs in the engine that wait for a word of the ledger, and how soon again if there are any:
#: of those that wait at two looks in a row the ledger may have nothing to say.
ORPHAN_CHECK_S: Final = 30.0
ORPHAN_RECHECK_S: Final = 5.0


class FeedForked(Exception):
    """The feed is not the one that the position is in."""


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A batch to be written, what comes after it, and what the store has made of the batch in advance."""

    batch: list[FeedEntry]
    rest: list[FeedEntry]
    prepared: Any = None

    @property
    def is_enough(self) -> bool:
        """Not to wait for more."""
        return bool(self.rest) or is_enough(self.batch)

    @property
    def urgent(self) -> bool:
        return any(entry.urgent for entry in self.batch)


class FeedFailure:
    """A queue that could not be projected."""

    def __init__(self) -> None:
        self._backoff = Backoff(base_s=_TROUBLE_S, cap_s=_MOST_TROUBLE_S)
        self.complaint = LogThrottle(_log)
        self.share = 1.0
        self.until = 0.0

    def again(self) -> None:
        self.until = time.monotonic() + self._backoff.next_s()


class FeedCursor:
    """One feed, as this projector follows it while it has the lease."""

    def __init__(self, queue: str, at: FeedPosition, share: float = 1.0) -> None:
        self.queue = queue
        #: Which part of a full batch may be written at once.
        self.share = share
        #: Where the ledger is.
        self.at = at
        #: The position is not known to be in this feed: it is new, or has forked.
        self.astray = not at.position
        self.looked_at = 0.0
        self.trimmed_at = 0.0
        self.trimmed_to = ""
        self.leased_until = 0.0
        #: What was read and is to be written in this turn.
        self.pending: PendingBatch | None = None
        self.ahead: asyncio.Task[PendingBatch] | None = None
        #: How large its entries were, last time.
        self.entry_size = 0
        #: At once, at first: another engine may have taken over, as it was some time ago.
        self.strays_at = 0.0
        self.telling: asyncio.Task[None] | None = None
        self.tell_at = 0.0

    @property
    def most_events(self) -> int:
        return max(1, round(MOST_EVENTS * self.share))

    @property
    def most_bytes(self) -> int:
        return max(1, round(MOST_BYTES * self.share))

    def next_batch(self, entries: list[FeedEntry]) -> PendingBatch:
        """As many as go into one transaction, and the rest; at least one."""
        events = size = 0
        for place, entry in enumerate(entries):
            events += len(entry.events)
            size += entry.size
            if (events > self.most_events or size > self.most_bytes) and place:
                return PendingBatch(entries[:place], entries[place:])
        return PendingBatch(entries, [])

    async def read(self, engine: Engine, start: str, nonce: str) -> list[FeedEntry]:
        """Entries after `start`, which must still be there. Raises `Fork`."""
        entries: list[FeedEntry] = []
        events = size = 0
        limit = min(_FIRST_READ, self.most_bytes // max(1, self.entry_size) + 2)
        while events < self.most_events and size < self.most_bytes:
            page = await engine.read_feed(self.queue, start, limit)
            if start:
                if not page or (page[0].position, page[0].nonce) != (start, nonce):
                    raise FeedForked(self.queue)
                del page[0]
            if not page:
                break
            entries += page
            events += sum(len(entry.events) for entry in page)
            size += sum(entry.size for entry in page)
            self.entry_size = size // len(entries)
            start, nonce = entries[-1].position, entries[-1].nonce
            if len(page) < limit - 1:
                break
            wanted = min(
                max(0, self.most_events - events) * len(entries) // max(1, events),
                max(0, self.most_bytes - size) * len(entries) // max(1, size),
            )
            limit = min(_MOST_READ, wanted + 2)
        return entries

    def defer_orphan_check(self, *, soon: bool) -> None:
        self.strays_at = time.monotonic() + (ORPHAN_RECHECK_S if soon else ORPHAN_CHECK_S)

    def drop_ahead(self) -> None:
        self.pending = None
        if self.ahead is not None:
            self.ahead.cancel()
            self.ahead.add_done_callback(_look_at)
            self.ahead = None


def is_enough(entries: Sequence[FeedEntry]) -> bool:
    """Large enough to be written at once, or in a hurry."""
    return sum(len(entry.events) for entry in entries) >= ENOUGH_EVENTS or any(entry.urgent for entry in entries)


def _look_at(task: asyncio.Task[PendingBatch]) -> None:
    """Nobody wants its result any more, nor its error."""
    if not task.cancelled():
        task.exception()
