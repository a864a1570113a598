"""What event streams read from the engine's feeds: pages, stream events in the order of time, missed events."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final

import msgspec

from holdfast.core.states import OPERATOR_PREFIX
from holdfast.engine.port import InspectionPort
from holdfast.engine.port.feed import FeedEntry
from holdfast.http.subscribers import LastEvent, StreamEvent, parse_position

#: The most events that are read from the feeds for a returning subscriber.
HISTORY_LIMIT: Final = 10_000
#: A returning subscriber gets events from this long before its last one. This covers what is not published in the order
#: of time: events that are written while the feeds are read, new queues that are not listed yet, clocks that differ.
OVERLAP_MS: Final = 1_000
_PAGE: Final = 200

_event_at_ms: Final = attrgetter("event.at_ms")


class FeedPage(msgspec.Struct, frozen=True):
    """Entries of a feed after a position."""

    entries: list[FeedEntry]
    #: The feed may have more.
    is_full: bool
    #: The entry at the position is missing or another one: the feed was trimmed past it, or has forked.
    is_forked: bool

    @property
    def last_ms(self) -> int:
        """The latest time in the page. A clock that was set back makes it differ from that of the last entry."""
        return max(map(written_ms, self.entries), default=0)


async def read_page(engine: InspectionPort, queue: str, position: str, nonce: str) -> FeedPage:
    """Read the entries after the one with this position and nonce."""
    entries = await engine.read_feed(queue, position, _PAGE)
    is_full, is_forked = len(entries) == _PAGE, False
    if entries and nonce:
        is_forked = (entries[0].position, entries[0].nonce) != (position, nonce)
        entries = entries if is_forked else entries[1:]
    return FeedPage(entries, is_full, is_forked)


def written_ms(entry: FeedEntry) -> int:
    """Time of an entry by the engine's clock; 0 without events."""
    return entry.events[0].at_ms if entry.events else 0


def to_stream_events(queue: str, entry: FeedEntry) -> list[StreamEvent]:
    """The events of jobs in an entry. Audit entries are not events of a job."""
    numbers, events, counts = parse_position(entry.position)[:-1], list[StreamEvent](), dict[str, int]()
    for index, event in enumerate(entry.events):
        if not event.type.startswith(OPERATOR_PREFIX):
            number = counts[event.job_id] = counts.get(event.job_id, -1) + 1
            events.append(StreamEvent(queue, event, (*numbers, index), entry.nonce, number))
    return events


def merge_by_time(batches: Iterable[list[StreamEvent]]) -> list[StreamEvent]:
    """Merge events of several feeds. Those of one feed stay in its order."""
    found = [events for events in batches if events]
    return found[0] if len(found) == 1 else list(heapq.merge(*found, key=_event_at_ms))


class MissedEvents:
    """Reads what a returning subscriber has missed: in each queue from `OVERLAP_MS` before its last event to an end."""

    def __init__(self, engine: InspectionPort, last: LastEvent) -> None:
        self._engine = engine
        self._last = last
        self._start = ""
        self._count = 0
        self._has_last = not last.event_id
        #: Events may be missing: a feed was trimmed, the last event is not in its feed any more (or the feed was lost
        #: and is another one), or there are too many.
        self.has_gap = False

    async def read(self, ends: Mapping[str, str]) -> list[StreamEvent]:
        """Return the events up to these positions, by queue. In the queue of the last event only those after it."""
        if self._last.at_ms > await self._engine.now_ms() + OVERLAP_MS:
            self.has_gap = True
            return []
        self._start = await self._engine.seek_feeds(max(0, self._last.at_ms - OVERLAP_MS))
        # A feed without later entries has lost none: the last entry is never dropped.
        changed = await self._engine.wait_feed({queue: self._start for queue, end in ends.items() if end}, 0)
        found, unreachable = await self._engine.for_each_queue(changed, lambda queue: self._read(queue, ends[queue]))
        self.has_gap |= bool(unreachable) or not self._has_last
        return merge_by_time(found.values())

    async def _read(self, queue: str, end: str) -> list[StreamEvent]:
        events, position, until, has_last = list[StreamEvent](), self._start, parse_position(end), False
        while self._count < HISTORY_LIMIT:
            entries = await self._engine.read_feed(queue, position, _PAGE)
            for entry in entries:
                if (position == self._start or entry.position != position) and parse_position(entry.position) <= until:
                    events += to_stream_events(queue, entry)
                    self._count += len(entry.events)
            if last := next((number for number, each in enumerate(events, 1) if self._is_last(each)), 0):
                del events[:last]
                has_last = self._has_last = True
            if len(entries) < _PAGE or parse_position(entries[-1].position) >= until:
                # Checked after reading: what is dropped meanwhile counts.
                self.has_gap |= not (has_last or await self._engine.is_feed_whole(queue, self._start))
                return events
            position = entries[-1].position
        self.has_gap = True
        return events

    def _is_last(self, each: StreamEvent) -> bool:
        return each.event.at_ms == self._last.at_ms and each.event_id == self._last.event_id
