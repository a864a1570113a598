"""Event streams: one reader of the engine's feeds per process, and everybody who listens.

The hub tails the feeds while somebody listens, without registering as a reader: it holds nothing up. What has passed is
kept in a ring, and behind that the feeds themselves are read, so that a listener can go on where its connection broke,
in this process or another (`http.places`). Whatever may be missing is said as a `gap`, never passed over. Listeners
with the same wish share what is encoded for it. A listener that does not keep up is let go: the hub never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.core.backoff import Backoff
from holdfast.core.job import Event
from holdfast.core.states import FINAL, OPERATOR_PREFIX
from holdfast.engine.port import Engine, FeedEntry
from holdfast.errors import EngineUnavailable
from holdfast.http import places
from holdfast.http.places import NOWHERE, Position, parsed
from holdfast.http.wire import event_of_feed

_log: Final = logging.getLogger("holdfast.http")

#: Events kept for those who come back, and the most that are read for one of them.
RING: Final = 10_000
#: Chunks that wait for a listener; more and it is let go.
BACKLOG: Final = 256
_PAGE: Final = 200
_WAIT_MS: Final = 1_000
#: Events are told in groups, at most so often: with hundreds of listeners each group costs a wake-up for each of them.
_TURN_S: Final = 0.05
#: New queues are looked for this often.
_QUEUES_S: Final = 1.0
#: Names of tasks that are remembered, of jobs that are open.
_TASKS: Final = 50_000

#: The first event of every stream: from here on nothing is missed.
READY: Final = b"event: ready\ndata: {}\n\n"
GAP: Final = b'event: gap\ndata: {"detail":"events may be missing here; look the jobs up"}\n\n'


class Wish(msgspec.Struct, frozen=True):
    """What a listener wants to hear. Hashable: those with the same wish share what is encoded for it."""

    #: None: all tenants.
    tenants: frozenset[str] | None
    queues: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    job_id: str | None = None

    def wants(self, told: Told) -> bool:
        event = told.event
        return (
            (self.tenants is None or event.tenant_id in self.tenants)
            and (not self.queues or told.queue in self.queues)
            and (self.job_id is None or event.job_id == self.job_id)
            and (not self.types or event.type in self.types)
            and (not self.tasks or told.task in self.tasks)
        )


class Told:
    """An event at its place in the stream, encoded when somebody first wants it."""

    __slots__ = ("_encoded", "at", "event", "place", "queue", "task")

    def __init__(self, queue: str, event: Event, at: Position, place: str) -> None:
        self.queue = queue
        self.event = event
        self.at = at
        self.place = place
        self.task = ""
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        if self._encoded is None:
            self._encoded = encode(self.place, self.event.type, event_of_feed(self.queue, self.event))
        return self._encoded


def encode(place: str, kind: str, event: msgspec.Struct) -> bytes:
    """One event as it goes over the wire."""
    # JSON has no line breaks, and neither have ids; a foreign event's type might.
    name = " ".join(kind.split()).encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place.encode(), name, msgspec.json.encode(event))


class Listener:
    """One open stream."""

    __slots__ = ("_bell", "_chunks", "let_go", "over", "wish")

    def __init__(self, wish: Wish, let_go: Callable[[], None]) -> None:
        self.wish = wish
        #: Ends the connection, however stuck it is.
        self.let_go = let_go
        self.over = False
        self._chunks: deque[bytes] = deque()
        self._bell = asyncio.Event()

    def tell(self, chunk: bytes) -> None:
        if len(self._chunks) < BACKLOG:
            self._chunks.append(chunk)
            self._bell.set()
        elif not self.over:
            self.over = True
            _log.warning("an event stream is ended: its client does not read")
            self.let_go()

    def end(self) -> None:
        self.over = True
        self._bell.set()

    async def take(self, wait_s: float) -> bytes:
        """All that waits; nothing if nothing came for so long."""
        try:
            async with asyncio.timeout(wait_s):
                await self._bell.wait()
        except TimeoutError:
            return b""
        self._bell.clear()
        taken = b"".join(self._chunks)
        self._chunks.clear()
        return taken


class Hub:
    """Tails the feeds for all listeners of one process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: dict[Wish, set[Listener]] = {}
        #: Those who follow one job, by its id: hundreds of them must not each be asked about every event.
        self._followers: dict[str, set[Listener]] = {}
        self._ring: deque[Told] = deque()
        #: How far each feed was read, and the nonce of the entry there.
        self._at: dict[str, tuple[str, str]] = {}
        #: Where the ring begins for each queue: whoever has heard everything up to there finds the rest in it.
        self._floor: dict[str, Position] = {}
        self._tasks: dict[str, str] = {}
        self._tailing: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._look_at = 0.0

    @property
    def listeners(self) -> int:
        return len(self._all())

    def _all(self) -> list[Listener]:
        groups = (*self._listeners.values(), *self._followers.values())
        return [listener for group in groups for listener in group]

    async def close(self) -> None:
        """End all streams."""
        for listener in self._all():
            listener.end()
        await self._rest()

    async def join(self, listener: Listener, last_event_id: str | None) -> None:
        """Tell this listener everything from now on, and first what came after its last event."""
        place = places.from_text(last_event_id) if last_event_id else None
        lost = last_event_id is not None and place is None
        if self._tailing is None:
            self._ring.clear()
            self._at.clear()
            self._floor.clear()
            self._begun.clear()
            self._look_at = 0.0
            self._tailing = asyncio.create_task(self._tail(), name="holdfast-http-hub")
        await self._begun.wait()
        listener.tell(READY if place is not None else self._begin() + (GAP if lost else b""))
        if place is not None:
            await self._catch_up(listener, place)
        self._group(listener).add(listener)

    async def leave(self, listener: Listener) -> None:
        """Nothing more for this one. When nobody is left the hub rests."""
        group = self._group(listener)
        group.discard(listener)
        if not group:
            self._listeners.pop(listener.wish, None)
            self._followers.pop(listener.wish.job_id or "", None)
        if not self._listeners and not self._followers:
            await self._rest()

    def _group(self, listener: Listener) -> set[Listener]:
        wish = listener.wish
        if wish.job_id is not None:
            return self._followers.setdefault(wish.job_id, set())
        return self._listeners.setdefault(wish, set())

    def _begin(self) -> bytes:
        """Where a stream begins: whoever loses the connection before the first event can go on from here."""
        place = places.everywhere({name: at for name, (at, _) in self._at.items()})
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
            try:
                if loop.time() >= self._look_at:
                    await self._look_for_queues()
                    self._look_at = loop.time() + _QUEUES_S
                self._begun.set()
                told = [each for queue in list(self._at) for each in await self._read_on(queue)]
                if told:
                    await self._name(told)
                    self._publish(told)
                    await asyncio.sleep(_TURN_S)
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
                self._floor[queue] = NOWHERE
            else:
                end = await self._engine.survey(queue, [])
                self._at[queue] = (end.position, end.nonce)
                self._floor[queue] = parsed(end.position) if end.position else NOWHERE

    async def _wait(self) -> None:
        if self._at:
            await self._engine.wait_feed({queue: position for queue, (position, _) in self._at.items()}, _WAIT_MS)
        else:
            await asyncio.sleep(_TURN_S)

    async def _read_on(self, queue: str) -> list[Told]:
        position, nonce = self._at[queue]
        entries = await self._engine.feed(queue, position, _PAGE)
        if position and entries:
            if (entries[0].position, entries[0].nonce) == (position, nonce):
                entries = entries[1:]
            else:
                self._lose(queue, entries[0])
        told: list[Told] = []
        for entry in entries:
            told += self._told(queue, entry)
            self._at[queue] = (entry.position, entry.nonce)
        return told

    def _lose(self, queue: str, first: FeedEntry) -> None:
        """The feed does not go on where we were: it was cut, or is another one."""
        self._floor[queue] = places.before(first.position)
        self._ring = deque(told for told in self._ring if told.queue != queue)
        for listener in self._all():
            if not listener.wish.queues or queue in listener.wish.queues:
                listener.tell(GAP)

    def _told(self, queue: str, entry: FeedEntry) -> list[Told]:
        others = {name: at for name, (at, _) in self._at.items()}
        told = []
        for index, event in enumerate(entry.events):
            # The operators' log is not a job's story.
            if not event.type.startswith(OPERATOR_PREFIX):
                at = f"{entry.position}.{index}"
                told.append(Told(queue, event, parsed(at), places.as_text(queue, at, others)))
        return told

    async def _name(self, told: Sequence[Told]) -> None:
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

    async def _ask_names(self, told: Sequence[Told]) -> None:
        unnamed: dict[str, set[str]] = {}
        for each in told:
            if each.event.job_id not in self._tasks:
                unnamed.setdefault(each.queue, set()).add(each.event.job_id)
        for queue, job_ids in unnamed.items():
            for view in await self._engine.get(queue, sorted(job_ids)):
                if view is not None:
                    self._tasks[view.job_id] = view.task

    # Telling -----------------------------------------------------------------------------------------

    def _publish(self, told: Sequence[Told]) -> None:
        self._ring.extend(told)
        while len(self._ring) > RING:
            gone = self._ring.popleft()
            self._floor[gone.queue] = gone.at
        for wish, group in list(self._listeners.items()):
            chunk = b"".join([each.encoded for each in told if wish.wants(each)])
            if chunk:
                for listener in list(group):
                    listener.tell(chunk)
        if self._followers:
            for each in told:
                for listener in list(self._followers.get(each.event.job_id, ())):
                    if listener.wish.wants(each):
                        listener.tell(each.encoded)

    async def _catch_up(self, listener: Listener, place: Mapping[str, str]) -> None:
        """What came after the place: from the feeds up to where the ring begins, then from the ring."""
        wish = listener.wish
        older: list[Told] = []
        whole = True
        for queue, floor in list(self._floor.items()):
            seen = place.get(queue, "")
            if (parsed(seen) if seen else NOWHERE) < floor and (not wish.queues or queue in wish.queues):
                found, complete = await self._history(queue, seen, floor)
                older += found
                # The ring went on meanwhile; it must not have left what was read behind.
                whole = whole and complete and self._floor.get(queue) == floor
        await self._name(older)
        newer = [told for told in self._ring if told.at > _seen(place, told.queue)]
        if not whole:
            listener.tell(GAP)
        missed = b"".join([told.encoded for told in (*older, *newer) if wish.wants(told)])
        if missed:
            listener.tell(missed)

    async def _history(self, queue: str, seen: str, floor: Position) -> tuple[list[Told], bool]:
        """Events of a feed after `seen` and up to the floor, and whether these are all."""
        start, told = places.entry_of(seen), list[Told]()
        complete = True
        first = True
        after = parsed(seen) if seen else NOWHERE
        while len(told) <= RING:
            entries = await self._engine.feed(queue, start, _PAGE)
            if first and start and (not entries or entries[0].position != start):
                complete = False
            fresh = [each for entry in entries for each in self._told(queue, entry) if after < each.at <= floor]
            told += [each for each in fresh if not told or each.at > told[-1].at]
            if len(entries) < _PAGE or parsed(entries[-1].position) >= floor:
                return told, complete
            start, first = entries[-1].position, False
        return told[:RING], False


def _seen(place: Mapping[str, str], queue: str) -> Position:
    return parsed(place[queue]) if queue in place else NOWHERE
