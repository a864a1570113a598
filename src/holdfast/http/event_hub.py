"""Event streams: one reader of the engine's feeds per process, and everybody who listens.

The hub tails the feeds while somebody listens, without registering as a reader: it holds nothing up. What has passed is
kept in a ring, and behind that the feeds themselves are read, so that a listener can go on where its connection broke,
in this process or another (`http.places`). Whatever may be missing is said as a `gap`, never passed over. Listeners
with the same wish share what is encoded for it. A listener that does not keep up is let go: the hub never waits.
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
from holdfast.engine.port import Engine
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

#: Events kept for those who come back, and the most that are read for one of them.
RING: Final = 10_000
_PAGE: Final = 200
_WAIT_MS: Final = 1_000
#: Events are told in groups, at most so often; with hundreds of listeners each group costs a wake-up for each of them,
#: so that groups then become larger and fewer.
_TURN_S: Final = 0.05
_WAKE_UP_S: Final = 0.001
_TURN_AT_MOST_S: Final = 0.5
#: New queues are looked for this often.
_QUEUES_S: Final = 1.0
#: Names of tasks that are remembered, of jobs that are open.
_TASKS: Final = 50_000


class EventHub:
    """Tails the feeds for all listeners of one process."""

    def __init__(self, engine: Engine, key: bytes = b"") -> None:
        """`key`: what places are covered with; processes with the same one know each other's."""
        self._engine = engine
        self._cover = EventIdCodec(key or secrets.token_bytes(32))
        self._listeners: dict[StreamFilter, set[StreamSubscriber]] = {}
        #: Those who follow one job, by its id: hundreds of them must not each be asked about every event.
        self._followers: dict[str, set[StreamSubscriber]] = {}
        self._ring: deque[StreamEvent] = deque()
        #: How far each feed was read, and the nonce of the entry there.
        self._at: dict[str, tuple[str, str]] = {}
        #: Where the ring begins for each queue: whoever has heard everything up to there finds the rest in it.
        self._floor: dict[str, Position] = {}
        self._tasks: dict[str, str] = {}
        #: How many are about to join.
        self._coming = 0
        self._tailing: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._look_at = 0.0

    @property
    def subscriber_count(self) -> int:
        return len(self._all())

    def _all(self) -> list[StreamSubscriber]:
        groups = (*self._listeners.values(), *self._followers.values())
        return [listener for group in groups for listener in group]

    async def close(self) -> None:
        """End all streams."""
        for listener in self._all():
            listener.end()
        await self._rest()

    async def subscribe(self, listener: StreamSubscriber, last_event_id: str | None) -> None:
        """Tell this listener everything from now on, and first what came after its last event."""
        cover = self._cover_for(listener.wish)
        text = cover.decode(last_event_id) if cover is not None and last_event_id else last_event_id
        place = subscribers.parse_event_id(text) if text else None
        lost = last_event_id is not None and place is None
        if self._tailing is None:
            self._ring.clear()
            self._at.clear()
            self._floor.clear()
            self._begun.clear()
            self._look_at = 0.0
            self._tailing = asyncio.create_task(self._tail(), name="holdfast-http-hub")
        # Whoever leaves meanwhile must not put the hub to rest.
        self._coming += 1
        try:
            await self._begun.wait()
            listener.send(READY if place is not None else self._begin(cover) + (GAP if lost else b""))
            if place is not None:
                await self._catch_up(listener, place)
            self._group(listener).add(listener)
        finally:
            self._coming -= 1
            await self._rest_if_alone()

    async def unsubscribe(self, listener: StreamSubscriber) -> None:
        """Nothing more for this one. When nobody is left the hub rests."""
        group = self._group(listener)
        group.discard(listener)
        if not group:
            self._listeners.pop(listener.wish, None)
            self._followers.pop(listener.wish.job_id or "", None)
        await self._rest_if_alone()

    async def _rest_if_alone(self) -> None:
        if not self._listeners and not self._followers and not self._coming:
            await self._rest()

    def _group(self, listener: StreamSubscriber) -> set[StreamSubscriber]:
        wish = listener.wish
        if wish.job_id is not None:
            return self._followers.setdefault(wish.job_id, set())
        return self._listeners.setdefault(wish, set())

    def position(self, queue: str) -> Position:
        """Up to where this feed has been read: whoever has joined hears of everything after it."""
        at, _ = self._at.get(queue, ("", ""))
        return parse_position(at) if at else START

    def _cover_for(self, wish: StreamFilter) -> EventIdCodec | None:
        return None if wish.tenants is None else self._cover

    def _begin(self, cover: EventIdCodec | None) -> bytes:
        """Where a stream begins: whoever loses the connection before the first event can go on from here."""
        place = subscribers.end_event_id({name: at for name, (at, _) in self._at.items()})
        if place and cover is not None:
            place = cover.encode(place)
        return (f"id: {place}\n".encode() if place else b"") + READY

    async def _rest(self) -> None:
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
                if loop.time() >= self._look_at:
                    await self._look_for_queues()
                    self._look_at = loop.time() + _QUEUES_S
                self._begun.set()
                read, _ = await self._engine.for_each_queue(list(self._at), self._read_on)
                told = [each for of_queue in read.values() for each in of_queue]
                if told:
                    await self._name(told)
                    woken = self._publish(told)
                    await asyncio.sleep(min(_TURN_S + woken * _WAKE_UP_S, _TURN_AT_MOST_S))
                else:
                    await self._wait()
                backoff.reset()
            except EngineUnavailable as exc:
                _log.info("event streams wait for the engine: %s", exc)
                await asyncio.sleep(backoff.next_s())
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("event streams failed in an unexpected way, trying again")
                await asyncio.sleep(backoff.next_s())

    async def _look_for_queues(self) -> None:
        """From now on: what was before is in the feeds for those who ask. A new queue is told from its start."""
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
            await asyncio.sleep(_TURN_S)

    async def _read_on(self, queue: str) -> list[StreamEvent]:
        position, nonce = self._at[queue]
        entries = await self._engine.read_feed(queue, position, _PAGE)
        if position and entries:
            if (entries[0].position, entries[0].nonce) == (position, nonce):
                entries = entries[1:]
            else:
                self._lose(queue, entries[0])
        told: list[StreamEvent] = []
        for entry in entries:
            told += self._told(queue, entry)
            self._at[queue] = (entry.position, entry.nonce)
        return told

    def _lose(self, queue: str, first: FeedEntry) -> None:
        """The feed does not go on where we were: it was cut, or is another one."""
        self._floor[queue] = subscribers.before(first.position)
        self._ring = deque(told for told in self._ring if told.queue != queue)
        for listener in self._all():
            if not listener.wish.queues or queue in listener.wish.queues:
                listener.send(GAP)

    def _told(self, queue: str, entry: FeedEntry) -> list[StreamEvent]:
        others = {name: at for name, (at, _) in self._at.items()}
        numbers = parse_position(entry.position)[:-1]
        return [
            StreamEvent(queue, event, (*numbers, index), entry.position, others)
            for index, event in enumerate(entry.events)
            # The operators' log is not a job's story.
            if not event.type.startswith(OPERATOR_PREFIX)
        ]

    async def _name(self, told: Sequence[StreamEvent]) -> None:
        """The task of each event, which only a job's first one tells; asked for only if somebody wants to know."""
        for each in told:
            data = each.event.data
            if each.event.from_state is None and data is not None and "task" in data:
                if len(self._tasks) >= _TASKS:
                    self._tasks.clear()
                self._tasks[each.event.job_id] = str(data["task"])
        if any(wish.tasks for wish in self._listeners):
            await self._ask_names(told)
        for each in told:
            job_id = each.event.job_id
            each.task = self._tasks.get(job_id, "")
            if each.event.to_state in FINAL:
                self._tasks.pop(job_id, None)

    async def _ask_names(self, told: Sequence[StreamEvent]) -> None:
        unnamed: dict[str, set[str]] = {}
        for each in told:
            if each.event.job_id not in self._tasks:
                unnamed.setdefault(each.queue, set()).add(each.event.job_id)
        for queue, job_ids in unnamed.items():
            for view in await self._engine.get(queue, sorted(job_ids)):
                if view is not None:
                    self._tasks[view.job_id] = view.task

    # Telling -----------------------------------------------------------------------------------------

    def _publish(self, told: Sequence[StreamEvent]) -> int:
        """Tell everybody who wants it; how many there were."""
        self._ring.extend(told)
        while len(self._ring) > RING:
            gone = self._ring.popleft()
            self._floor[gone.queue] = gone.at
        batch, woken = EventBatch(told), 0
        for wish, group in list(self._listeners.items()):
            if chunk := batch.encode_for(wish, self._cover_for(wish)):
                woken += len(group)
                for listener in list(group):
                    listener.send(chunk)
        if self._followers:
            for each in told:
                for listener in list(self._followers.get(each.event.job_id, ())):
                    if listener.wish.matches(each):
                        woken += 1
                        listener.on_event(each, self._cover_for(listener.wish))
        return woken

    async def _catch_up(self, listener: StreamSubscriber, place: Mapping[str, str]) -> None:
        """What came after the place: from the feeds up to where the ring begins, then from the ring."""
        wish = listener.wish
        older: list[StreamEvent] = []
        whole = True
        for queue, floor in list(self._floor.items()):
            seen = place.get(queue, "")
            if (parse_position(seen) if seen else START) < floor and (not wish.queues or queue in wish.queues):
                try:
                    found, complete = await self._history(queue, seen, floor)
                except InvalidOption:
                    # A position of another engine's: what came after it, nobody can say.
                    found, complete = [], False
                older += found
                # The ring went on meanwhile; it must not have left what was read behind.
                whole = whole and complete and self._floor.get(queue) == floor
        await self._name(older)
        newer = [told for told in self._ring if told.at > _seen(place, told.queue)]
        if not whole:
            listener.send(GAP)
        cover = self._cover_for(wish)
        missed = b"".join([told.encoded(cover) for told in (*older, *newer) if wish.matches(told)])
        if missed:
            listener.send(missed)

    async def _history(self, queue: str, seen: str, floor: Position) -> tuple[list[StreamEvent], bool]:
        """Events of a feed after `seen` and up to the floor, and whether these are all."""
        start, told = subscribers.entry_of(seen), list[StreamEvent]()
        complete = True
        first = True
        after = parse_position(seen) if seen else START
        while len(told) <= RING:
            entries = await self._engine.read_feed(queue, start, _PAGE)
            if first and start and (not entries or entries[0].position != start):
                complete = False
            fresh = [each for entry in entries for each in self._told(queue, entry) if after < each.at <= floor]
            told += [each for each in fresh if not told or each.at > told[-1].at]
            if len(entries) < _PAGE or parse_position(entries[-1].position) >= floor:
                return told, complete
            start, first = entries[-1].position, False
        return told[:RING], False


def _seen(place: Mapping[str, str], queue: str) -> Position:
    return parse_position(place[queue]) if queue in place else START
