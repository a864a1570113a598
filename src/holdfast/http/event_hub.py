"""Event streams: one tail of the engine's feeds per process, shared by all subscribers.

The hub tails the feeds that its subscribers' filters concern, while there are subscribers. It does not attach as a
reader, so that it never delays trimming. Subscribers with equal filters share encoded events. A subscriber that does
not keep up is disconnected: the hub never waits for one.

A returning subscriber names its last event by time (see `http.subscribers`), and gets what the feeds have from a second
before it (`http.feed_pages`). Nothing is missing, because events are published in the order of time over all feeds:
when a feed has more than was read, later events of the others wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.core.states import FINAL
from holdfast.engine.port import InspectionPort
from holdfast.engine.port.feed import EngineSnapshot
from holdfast.errors import EngineRefused, EngineUnavailable
from holdfast.http.feed_pages import FeedPage, MissedEvents, merge_by_time, read_page, to_stream_events, written_ms
from holdfast.http.subscribers import (
    GAP,
    HEARTBEAT,
    READY,
    START,
    EventBatch,
    LastEvent,
    Position,
    StreamEvent,
    StreamFilter,
    StreamSubscriber,
    format_time_id,
    parse_position,
)

_log: Final = logging.getLogger("holdfast.http")

_WAIT_MS: Final = 1_000
#: Events are published in batches. A batch wakes every subscriber, so that with hundreds of subscribers the interval
#: grows and batches become larger and fewer.
_ROUND_S: Final = 0.05
_WAKE_UP_S: Final = 0.001
_MAX_ROUND_S: Final = 0.5
#: Age at which the list of queues is read again, before events are published and without events.
_LIST_S: Final = 0.25
_IDLE_LIST_S: Final = 1.0
#: If reading the feeds takes longer, events later than its begin wait for the next round.
_READING_S: Final = 0.25
#: Open jobs whose task name is cached.
_TASKS: Final = 50_000


class EventHub:
    """Tails the feeds for all subscribers of one process."""

    def __init__(self, engine: InspectionPort) -> None:
        self._engine = engine
        self._subscribers: dict[StreamFilter, set[StreamSubscriber]] = {}
        #: Subscribers that follow one job, by job id, so that an event is not matched against all of them.
        self._followers: dict[str, set[StreamSubscriber]] = {}
        self._joining: set[StreamSubscriber] = set()
        #: Position up to which each feed was published, and the nonce of the entry there.
        self._at: dict[str, tuple[str, str]] = {}
        #: Whether all queues are tailed, because a subscriber's filter names none.
        self._tails_all = False
        #: Queues that did not answer when they were to be tailed.
        self._unreachable: set[str] = set()
        self._listed_at = 0.0
        #: Time of the engine's clock up to which everything was published.
        self._published_ms = 0
        self._tasks: dict[str, str] = {}
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()
        self._tailing: asyncio.Task[None] | None = None

    @property
    def subscriber_count(self) -> int:
        return len(self._all())

    def _all(self) -> list[StreamSubscriber]:
        groups = (*self._subscribers.values(), *self._followers.values())
        return [subscriber for group in groups for subscriber in group]

    async def close(self) -> None:
        """End all streams."""
        for subscriber in self._all():
            subscriber.end()
        await self._stop_tailing()

    async def subscribe(self, subscriber: StreamSubscriber, last_event_id: str | None) -> None:
        """Send the subscriber all events after `last_event_id`, or from now on without one.

        Raises `EngineUnavailable` if queues that no other subscriber follows cannot be read.
        """
        # A subscriber that leaves meanwhile must not stop the tail.
        self._joining.add(subscriber)
        try:
            await self._start(subscriber.event_filter)
            # Without a wait in between: events up to these positions are read from the feeds, later ones are published.
            ends = {queue: self._at[queue][0] for queue in self._concerned(subscriber.event_filter)}
            self._group(subscriber).add(subscriber)
        finally:
            self._joining.discard(subscriber)
            await self._stop_if_unused()
        if last_event_id is None:
            subscriber.send_first(self._opening())
            return
        try:
            subscriber.send_first(await self._read_missed(subscriber.event_filter, last_event_id, ends))
        except BaseException:
            await self.unsubscribe(subscriber)
            raise

    async def unsubscribe(self, subscriber: StreamSubscriber) -> None:
        """Remove a subscriber. Tailing stops with the last one."""
        group = self._group(subscriber)
        group.discard(subscriber)
        if not group:
            self._subscribers.pop(subscriber.event_filter, None)
            self._followers.pop(subscriber.event_filter.job_id or "", None)
        await self._stop_if_unused()

    def position(self, queue: str) -> Position:
        """Position up to which a feed has been read. Subscribers get every later event."""
        at, _ = self._at.get(queue, ("", ""))
        return parse_position(at) if at else START

    @property
    def heartbeat(self) -> bytes:
        """Comment for a stream without events, with an id from which its client can continue."""
        return b"%bid: %b\n\n" % (HEARTBEAT[:-1], format_time_id(self._published_ms).encode())

    def _opening(self) -> bytes:
        """First event of a stream. Its id lets a client continue that disconnects before the next event."""
        return b"id: %b\n%b" % (format_time_id(self._published_ms).encode(), READY)

    async def _read_missed(self, event_filter: StreamFilter, last_event_id: str, ends: dict[str, str]) -> bytes:
        last = LastEvent.parse(last_event_id)
        if last is None:
            return self._opening() + GAP
        missed = MissedEvents(self._engine, last)
        events = await missed.read(ends)
        await self._set_tasks(events)
        chunks = [each.encode() for each in events if event_filter.matches(each)]
        return b"".join((READY, GAP if missed.has_gap else b"", *chunks))

    def _group(self, subscriber: StreamSubscriber) -> set[StreamSubscriber]:
        event_filter = subscriber.event_filter
        if event_filter.job_id is not None:
            return self._followers.setdefault(event_filter.job_id, set())
        return self._subscribers.setdefault(event_filter, set())

    async def _stop_if_unused(self) -> None:
        if not self._subscribers and not self._followers and not self._joining:
            await self._stop_tailing()

    async def _stop_tailing(self) -> None:
        tailing, self._tailing = self._tailing, None
        self._at.clear()
        self._unreachable.clear()
        self._tails_all = False
        if tailing is not None:
            tailing.cancel()
            await asyncio.gather(tailing, return_exceptions=True)

    # Which queues ------------------------------------------------------------------------------------

    def _concerned(self, event_filter: StreamFilter) -> Collection[str]:
        """The queues that are tailed and that a filter concerns."""
        return [queue for queue in event_filter.queues if queue in self._at] if event_filter.queues else self._at

    async def _start(self, event_filter: StreamFilter) -> None:
        """Tail the queues that a filter concerns, from their ends."""
        async with self._starting:
            if self._tailing is None:
                self._published_ms = await self._engine.now_ms()
            queues: Collection[str] = event_filter.queues
            if not queues and self._tails_all:
                # A returning subscriber gets events of new queues with the others that it has missed.
                await self._find_new(_LIST_S)
            elif not queues:
                self._listed_at = asyncio.get_running_loop().time()
                queues = await self._engine.queues()
            await self._start_at_end([queue for queue in queues if queue not in self._at])
            self._tails_all |= not event_filter.queues
            if self._tailing is None:
                self._tailing = asyncio.create_task(self._tail(), name="holdfast-http-hub")

    async def _start_at_end(self, queues: Sequence[str]) -> list[str]:
        """Tail these queues from their ends; return those that answered."""

        async def read_end(queue: str) -> EngineSnapshot:
            return await self._engine.snapshot(queue, [])

        if not queues:
            return []
        ends, unreachable = await self._engine.for_each_queue(queues, read_end)
        self._at |= {queue: (end.position, end.nonce) for queue, end in ends.items() if queue not in self._at}
        self._unreachable.update(unreachable)
        self._started.set()
        return list(ends)

    async def _list_queues(self, max_age_s: float) -> list[str]:
        """Tail the queues that filters concern now, if that is not known for this time; return new ones."""
        if asyncio.get_running_loop().time() < self._listed_at + max_age_s:
            return []
        self._drop_unconcerned()
        for queue in await self._start_at_end(sorted(self._unreachable)):
            self._unreachable.discard(queue)
            self._send_gap(queue)
        return await self._find_new(max_age_s)

    async def _find_new(self, max_age_s: float) -> list[str]:
        """Tail queues that are new, from their beginning, and return them."""
        now = asyncio.get_running_loop().time()
        if now < self._listed_at + max_age_s:
            return []
        self._listed_at = now
        if not self._tails_all:
            return []
        new = [each for each in await self._engine.queues() if each not in self._at and each not in self._unreachable]
        self._at |= dict.fromkeys(new, ("", ""))
        if new:
            self._started.set()
        return new

    def _drop_unconcerned(self) -> None:
        """Tail only queues that a filter concerns."""
        filters = [each.event_filter for each in (*self._all(), *self._joining)]
        if all(each.queues for each in filters):
            concerned = frozenset[str]().union(*(each.queues for each in filters))
            self._tails_all = False
            self._unreachable &= concerned
            for queue in self._at.keys() - concerned:
                del self._at[queue]

    # Reading -----------------------------------------------------------------------------------------

    async def _tail(self) -> None:
        backoff = Backoff()
        while True:
            raise_if_cancelled()
            try:
                await self._run_round()
                backoff.reset()
            except EngineUnavailable as exc:
                _log.info("event streams cannot reach the engine, retrying: %s", exc)
                await asyncio.sleep(backoff.next_s())
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("event streams failed unexpectedly, retrying")
                await asyncio.sleep(backoff.next_s())

    async def _run_round(self) -> None:
        loop = asyncio.get_running_loop()
        begun_ms = await self._engine.now_ms()
        changed = await self._wait()
        if changed is None:
            return
        if not changed:
            self._published_ms = begun_ms
            await self._list_queues(_IDLE_LIST_S)
            return
        changed += await self._list_queues(_LIST_S)
        begun, reading_ms = loop.time(), await self._engine.now_ms()
        pages, _ = await self._engine.for_each_queue([each for each in changed if each in self._at], self._read)
        until_ms = [page.last_ms for page in pages.values() if page.is_full]
        is_behind = bool(until_ms)
        if loop.time() - begun > _READING_S:
            until_ms.append(reading_ms)
        accepted = {queue: _events_until(queue, page, until_ms) for queue, page in pages.items()}
        events = merge_by_time(events for events, _ in accepted.values())
        await self._set_tasks(events)
        # Without a wait in between: a subscriber that joins gets what is before a position from the feed.
        self._at |= {queue: at for queue, (_, at) in accepted.items() if at is not None}
        woken = self._publish(events)
        if not until_ms:
            self._published_ms = begun_ms
        if not is_behind:
            await asyncio.sleep(min(_ROUND_S + woken * _WAKE_UP_S, _MAX_ROUND_S))

    async def _wait(self) -> list[str] | None:
        """Wait for entries, and return the queues that have some; None if more queues are tailed now."""
        self._started.clear()
        if not self._at:
            await asyncio.sleep(_ROUND_S)
            return []
        positions = {queue: position for queue, (position, _) in self._at.items()}
        waiting = asyncio.ensure_future(self._engine.wait_feed(positions, _WAIT_MS))
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait({waiting, started}, return_when=asyncio.FIRST_COMPLETED)
            return await waiting if waiting.done() else None
        except EngineRefused:
            # One of the feeds is damaged. The others are read without waiting for them.
            await asyncio.sleep(_IDLE_LIST_S)
            return list(positions)
        finally:
            for task in (waiting, started):
                task.cancel()
            await asyncio.gather(waiting, started, return_exceptions=True)

    async def _read(self, queue: str) -> FeedPage:
        position, nonce = self._at[queue]
        page = await read_page(self._engine, queue, position, nonce)
        if page.is_forked:
            self._send_gap(queue)
            # Not sent again if its entries have to wait for another feed.
            self._at[queue] = (position, "")
        return page

    def _send_gap(self, queue: str) -> None:
        for subscriber in self._all():
            if not subscriber.event_filter.queues or queue in subscriber.event_filter.queues:
                subscriber.send(GAP)

    async def _set_tasks(self, events: Sequence[StreamEvent]) -> None:
        """Set the task of each event.

        Only a job's first event carries it. For other jobs it is read from the engine if a subscriber filters by task.
        """
        for each in events:
            data = each.event.data
            if each.event.from_state is None and data is not None and "task" in data:
                if len(self._tasks) >= _TASKS:
                    self._tasks.clear()
                self._tasks[each.event.job_id] = str(data["task"])
        if any(event_filter.tasks for event_filter in self._subscribers):
            await self._read_tasks(events)
        for each in events:
            job_id = each.event.job_id
            each.task = self._tasks.get(job_id, "")
            if each.event.to_state in FINAL:
                self._tasks.pop(job_id, None)

    async def _read_tasks(self, events: Sequence[StreamEvent]) -> None:
        unnamed: dict[str, set[str]] = {}
        for each in events:
            if each.event.job_id not in self._tasks:
                unnamed.setdefault(each.queue, set()).add(each.event.job_id)
        for queue, job_ids in unnamed.items():
            for view in await self._engine.get(queue, sorted(job_ids)):
                if view is not None:
                    self._tasks[view.job_id] = view.task

    # Publishing --------------------------------------------------------------------------------------

    def _publish(self, events: Sequence[StreamEvent]) -> int:
        """Send events to the subscribers that match; returns how many were woken."""
        batch, woken = EventBatch(events), 0
        for event_filter, group in list(self._subscribers.items()):
            if chunk := batch.encode_for(event_filter):
                woken += len(group)
                for subscriber in list(group):
                    subscriber.send(chunk)
        if self._followers:
            for each in events:
                for subscriber in list(self._followers.get(each.event.job_id, ())):
                    if subscriber.event_filter.matches(each):
                        woken += 1
                        subscriber.on_event(each)
        return woken


def _events_until(
    queue: str, page: FeedPage, until_ms: Sequence[int]
) -> tuple[list[StreamEvent], tuple[str, str] | None]:
    """The events of a page up to the earliest of these times, and the last entry's position and nonce."""
    events: list[StreamEvent] = []
    at, limit_ms = None, min(until_ms, default=None)
    for entry in page.entries:
        # The others are read again.
        if limit_ms is not None and written_ms(entry) > limit_ms:
            break
        events += to_stream_events(queue, entry)
        at = entry.position, entry.nonce
    return events, at
