"""A projector's state for one feed: position, entries read ahead, batch limits, failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core.retry import Backoff
from holdfast.engine.port.feed import FeedEntry, FeedReadPort
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.upkeep.loop import LogThrottle

_log: Final = logging.getLogger("holdfast.projector")

#: A batch of this many events is written without waiting for more …
ENOUGH_EVENTS: Final = 3_000
#: … and this is the limit of one transaction when there is a backlog.
MOST_EVENTS: Final = 10_000
MOST_BYTES: Final = 16 * 1024 * 1024
#: A batch that the ledger does not write in time is halved, down to this share of the limits above.
SMALLEST_SHARE: Final = 1 / 256
#: Entries read at a time: one has up to about 500 events, most have far fewer.
_FIRST_READ: Final = 20
_MOST_READ: Final = 500
#: A queue that cannot be projected is retried after this, doubling each time, up to …
_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 30.0
#: How often to check for jobs in the engine that wait for a confirmation, and how soon to check again if there are any:
#: jobs that wait at two checks in a row may be orphans.
ORPHAN_CHECK_S: Final = 30.0
ORPHAN_RECHECK_S: Final = 5.0


class FeedForked(Exception):
    """The feed is not the one that the position is in."""


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A batch to be written, the entries after it, and what the ledger has prepared for the batch."""

    batch: list[FeedEntry]
    rest: list[FeedEntry]
    prepared: Any = None

    @property
    def is_enough(self) -> bool:
        """Whether to write it without waiting for more entries."""
        return bool(self.rest) or is_enough(self.batch)

    @property
    def urgent(self) -> bool:
        return any(entry.urgent for entry in self.batch)


class FeedFailure:
    """Backoff and log of a queue that could not be projected."""

    def __init__(self) -> None:
        self._backoff = Backoff(base_s=_RETRY_S, cap_s=_MAX_RETRY_S)
        self.throttle = LogThrottle(_log)
        self.share = 1.0
        self.until = 0.0

    def again(self) -> None:
        self.until = time.monotonic() + self._backoff.next_s()


class FeedCursor:
    """One feed, while this projector has its lease."""

    def __init__(self, queue: str, at: FeedPosition, epoch: str, share: float = 1.0) -> None:
        self.queue = queue
        #: The epoch of the engine in which the feed is read.
        self.epoch = epoch
        #: Share of a full batch that may be written in one transaction.
        self.share = share
        #: The ledger's position.
        self.at = at
        #: Whether the position is not known to be in this feed: the feed is new, or has forked.
        self.detached = not at.position
        self.read_at = 0.0
        self.trimmed_at = 0.0
        self.trimmed_to = ""
        self.leased_until = 0.0
        #: Entries read, to be written in this pass.
        self.pending: PendingBatch | None = None
        self.ahead: asyncio.Task[PendingBatch] | None = None
        #: Average size of the entries read last.
        self.entry_size = 0
        #: The first check is immediate: a stale replica may have taken over.
        self.orphan_check_at = 0.0
        self.confirming: asyncio.Task[None] | None = None
        self.confirm_at = 0.0

    @property
    def most_events(self) -> int:
        return max(1, round(MOST_EVENTS * self.share))

    @property
    def most_bytes(self) -> int:
        return max(1, round(MOST_BYTES * self.share))

    def next_batch(self, entries: list[FeedEntry]) -> PendingBatch:
        """Split off what goes into one transaction, at least one entry."""
        events = size = 0
        for index, entry in enumerate(entries):
            events += len(entry.events)
            size += entry.size
            if (events > self.most_events or size > self.most_bytes) and index:
                return PendingBatch(entries[:index], entries[index:])
        return PendingBatch(entries, [])

    async def read(self, engine: FeedReadPort, start: str, nonce: str) -> list[FeedEntry]:
        """Entries after `start`. Raises `FeedForked` if the feed does not have the entry at `start`."""
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
            missing = min(
                max(0, self.most_events - events) * len(entries) // max(1, events),
                max(0, self.most_bytes - size) * len(entries) // max(1, size),
            )
            limit = min(_MOST_READ, missing + 2)
        return entries

    def defer_orphan_check(self, *, soon: bool) -> None:
        self.orphan_check_at = time.monotonic() + (ORPHAN_RECHECK_S if soon else ORPHAN_CHECK_S)

    def drop_ahead(self) -> None:
        self.pending = None
        if self.ahead is not None:
            self.ahead.cancel()
            self.ahead.add_done_callback(_discard_result)
            self.ahead = None


def is_enough(entries: Sequence[FeedEntry]) -> bool:
    """Whether entries are to be written without waiting for more: there are enough, or one is urgent."""
    return sum(len(entry.events) for entry in entries) >= ENOUGH_EVENTS or any(entry.urgent for entry in entries)


def _discard_result(task: asyncio.Task[PendingBatch]) -> None:
    """Retrieve the error of a dropped task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
