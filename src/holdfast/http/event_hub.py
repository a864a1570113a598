"""Event streams: one tail of the engine's feeds per process, shared by all subscribers.

The hub tails the feeds while there are subscribers. It does not attach as a reader, so that it never delays trimming.
Recent events are kept in a ring; older ones are read from the feeds. A subscriber can therefore continue after its last
event, in this process or another (see `http.subscribers`). If events may be missing, it gets a `gap`. Subscribers with
equal filters share encoded events. A subscriber that does not keep up is disconnected: the hub never waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.core.states import FINAL, OPERATOR_PREFIX
from holdfast.engine.port import InspectionPort
from holdfast.engine.port.feed import FeedEntry
from holdfast.errors import EngineUnavailable, InvalidOption
from holdfast.http import subscribers
from holdfast.http.subscribers import (
    GAP,
    READY,
    START,
    EventBatch,
    EventIdCodec,
    Position,
    StreamEvent,
    StreamFilter,
    StreamSubscriber,
    parse_position,
)

_log: Final = logging.getLogger("holdfast.http")

#: Events kept for returning subscribers, and the most that are read from the feeds for one of them.
BUFFER_SIZE: Final = 10_000
_PAGE: Final = 200
_WAIT_MS: Final = 1_000
#: Events are published in batches. A batch wakes every subscriber, so that with hundreds of subscribers the interval
#: grows and batches become larger and fewer.
_ROUND_S: Final = 0.05
_WAKE_UP_S: Final = 0.001
_MAX_ROUND_S: Final = 0.5
#: Interval of the search for new queues.
_QUEUES_S: Final = 1.0
#: Open jobs whose task name is cached.
_TASKS: Final = 50_000


class EventHub:
    """Tails the feeds for all subscribers of one process."""

    def __init__(self, engine: InspectionPort, key: bytes = b"") -> None:
        """`key`: encrypts event ids; processes with the same key accept each other's ids."""
        self._engine = engine
        self._codec = EventIdCodec(key or secrets.token_bytes(32))
        self._subscribers: dict[StreamFilter, set[StreamSubscriber]] = {}
        #: Subscribers that follow one job, by job id, so that an event is not matched against all of them.
        self._followers: dict[str, set[StreamSubscriber]] = {}
        self._buffer: deque[StreamEvent] = deque()
        #: Position up to which each feed was read, and the nonce of the entry there.
        self._at: dict[str, tuple[str, str]] = {}
        #: Start of the ring per queue: every later event of the queue is in the ring.
        self._floor: dict[str, Position] = {}
        self._tasks: dict[str, str] = {}
        #: Number of subscribers that are joining.
        self._joining = 0
        self._tailing: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._list_queues_at = 0.0

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
        """Send the subscriber all events after `last_event_id`, or from now on without one."""
        codec = self._codec_for(subscriber.event_filter)
        text = codec.decode(last_event_id) if codec is not None and last_event_id else last_event_id
        positions = subscribers.parse_event_id(text) if text else None
        invalid = last_event_id is not None and positions is None
        if self._tailing is None:
            self._buffer.clear()
            self._at.clear()
            self._floor.clear()
            self._begun.clear()
            self._list_queues_at = 0.0
            self._tailing = asyncio.create_task(self._tail(), name="holdfast-http-hub")
        # A subscriber that leaves meanwhile must not stop the tail.
        self._joining += 1
        try:
            await self._begun.wait()
            subscriber.send(READY if positions is not None else self._opening(codec) + (GAP if invalid else b""))
            if positions is not None:
                await self._catch_up(subscriber, positions)
            self._group(subscriber).add(subscriber)
        finally:
            self._joining -= 1
            await self._stop_if_unused()

    async def unsubscribe(self, subscriber: StreamSubscriber) -> None:
        """Remove a subscriber. Tailing stops with the last one."""
        group = self._group(subscriber)
        group.discard(subscriber)
        if not group:
            self._subscribers.pop(subscriber.event_filter, None)
            self._followers.pop(subscriber.event_filter.job_id or "", None)
        await self._stop_if_unused()

    async def _stop_if_unused(self) -> None:
        if not self._subscribers and not self._followers and not self._joining:
            await self._stop_tailing()

    def _group(self, subscriber: StreamSubscriber) -> set[StreamSubscriber]:
        event_filter = subscriber.event_filter
        if event_filter.job_id is not None:
            return self._followers.setdefault(event_filter.job_id, set())
        return self._subscribers.setdefault(event_filter, set())

    def position(self, queue: str) -> Position:
        """Position up to which a feed has been read. Subscribers get every later event."""
        at, _ = self._at.get(queue, ("", ""))
        return parse_position(at) if at else START

    def _codec_for(self, event_filter: StreamFilter) -> EventIdCodec | None:
        return None if event_filter.tenants is None else self._codec

    def _opening(self, codec: EventIdCodec | None) -> bytes:
        """First event of a stream. Its id lets a client continue that disconnects before the next event."""
        event_id = subscribers.end_event_id({name: at for name, (at, _) in self._at.items()})
        if event_id and codec is not None:
            event_id = codec.encode(event_id)
        return (f"id: {event_id}\n".encode() if event_id else b"") + READY

    async def _stop_tailing(self) -> None:
        tailing, self._tailing = self._tailing, None
        if tailing is not None:
            tailing.cancel()
            await asyncio.gather(tailing, return_exceptions=True)

    # Reading -----------------------------------------------------------------------------------------

    async def _tail(self) -> None:
        backoff, loop = Backoff(), asyncio.get_running_loop()
        while True:
            raise_if_cancelled()
            try:
                if loop.time() >= self._list_queues_at:
                    await self._find_queues()
                    self._list_queues_at = loop.time() + _QUEUES_S
                self._begun.set()
                read, _ = await self._engine.for_each_queue(list(self._at), self._read_next)
                events = [each for of_queue in read.values() for each in of_queue]
                if events:
                    await self._set_tasks(events)
                    woken = self._publish(events)
                    await asyncio.sleep(min(_ROUND_S + woken * _WAKE_UP_S, _MAX_ROUND_S))
                else:
                    await self._wait()
                backoff.reset()
            except EngineUnavailable as exc:
                _log.info("event streams cannot reach the engine, retrying: %s", exc)
                await asyncio.sleep(backoff.next_s())
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("event streams failed unexpectedly, retrying")
                await asyncio.sleep(backoff.next_s())

    async def _find_queues(self) -> None:
        """Add new queues. At start they are tailed from their end, later from their beginning."""
        for queue in await self._engine.queues():
            if queue in self._at:
                continue
            if self._begun.is_set():
                self._at[queue] = ("", "")
                self._floor[queue] = START
            else:
                end = await self._engine.snapshot(queue, [])
                self._at[queue] = (end.position, end.nonce)
                self._floor[queue] = parse_position(end.position) if end.position else START

    async def _wait(self) -> None:
        if self._at:
            await self._engine.wait_feed({queue: position for queue, (position, _) in self._at.items()}, _WAIT_MS)
        else:
            await asyncio.sleep(_ROUND_S)

    async def _read_next(self, queue: str) -> list[StreamEvent]:
        position, nonce = self._at[queue]
        entries = await self._engine.read_feed(queue, position, _PAGE)
        if position and entries:
            if (entries[0].position, entries[0].nonce) == (position, nonce):
                entries = entries[1:]
            else:
                self._handle_gap(queue, entries[0])
        events: list[StreamEvent] = []
        for entry in entries:
            events += self._to_stream_events(queue, entry)
            self._at[queue] = (entry.position, entry.nonce)
        return events

    def _handle_gap(self, queue: str, first: FeedEntry) -> None:
        """Restart a queue's ring and send a gap: the feed was trimmed past the position, or has forked."""
        self._floor[queue] = subscribers.position_before(first.position)
        self._buffer = deque(each for each in self._buffer if each.queue != queue)
        for subscriber in self._all():
            if not subscriber.event_filter.queues or queue in subscriber.event_filter.queues:
                subscriber.send(GAP)

    def _to_stream_events(self, queue: str, entry: FeedEntry) -> list[StreamEvent]:
        others = {name: at for name, (at, _) in self._at.items()}
        numbers = parse_position(entry.position)[:-1]
        return [
            StreamEvent(queue, event, (*numbers, index), entry.position, others)
            for index, event in enumerate(entry.events)
            # Audit entries are not events of a job.
            if not event.type.startswith(OPERATOR_PREFIX)
        ]

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
        self._buffer.extend(events)
        while len(self._buffer) > BUFFER_SIZE:
            dropped = self._buffer.popleft()
            self._floor[dropped.queue] = dropped.at
        batch, woken = EventBatch(events), 0
        for event_filter, group in list(self._subscribers.items()):
            if chunk := batch.encode_for(event_filter, self._codec_for(event_filter)):
                woken += len(group)
                for subscriber in list(group):
                    subscriber.send(chunk)
        if self._followers:
            for each in events:
                for subscriber in list(self._followers.get(each.event.job_id, ())):
                    if subscriber.event_filter.matches(each):
                        woken += 1
                        subscriber.on_event(each, self._codec_for(subscriber.event_filter))
        return woken

    async def _catch_up(self, subscriber: StreamSubscriber, positions: Mapping[str, str]) -> None:
        """Send events after `positions`: from the feeds up to the start of the ring, then from the ring."""
        event_filter = subscriber.event_filter
        older: list[StreamEvent] = []
        whole = True
        for queue, floor in list(self._floor.items()):
            position = positions.get(queue, "")
            in_filter = not event_filter.queues or queue in event_filter.queues
            if (parse_position(position) if position else START) < floor and in_filter:
                try:
                    found, complete = await self._history(queue, position, floor)
                except InvalidOption:
                    # The id has another engine's position: which events follow it is unknown.
                    found, complete = [], False
                older += found
                # If the start of the ring moved meanwhile, events in between are missing.
                whole = whole and complete and self._floor.get(queue) == floor
        await self._set_tasks(older)
        newer = [each for each in self._buffer if each.at > _position_in(positions, each.queue)]
        if not whole:
            subscriber.send(GAP)
        codec = self._codec_for(event_filter)
        missed = b"".join([each.encode(codec) for each in (*older, *newer) if event_filter.matches(each)])
        if missed:
            subscriber.send(missed)

    async def _history(self, queue: str, position: str, floor: Position) -> tuple[list[StreamEvent], bool]:
        """Read events of a feed after `position` up to `floor`, and whether these are all."""
        start, events = subscribers.entry_of(position), list[StreamEvent]()
        complete = True
        first = True
        after = parse_position(position) if position else START
        while len(events) <= BUFFER_SIZE:
            entries = await self._engine.read_feed(queue, start, _PAGE)
            if first and start and (not entries or entries[0].position != start):
                complete = False
            read = [each for entry in entries for each in self._to_stream_events(queue, entry)]
            fresh = [each for each in read if after < each.at <= floor]
            events += [each for each in fresh if not events or each.at > events[-1].at]
            if len(entries) < _PAGE or parse_position(entries[-1].position) >= floor:
                return events, complete
            start, first = entries[-1].position, False
        return events[:BUFFER_SIZE], False


def _position_in(positions: Mapping[str, str], queue: str) -> Position:
    return parse_position(positions[queue]) if queue in positions else START
