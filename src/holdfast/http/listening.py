"""Who listens to an event stream, what each wants to hear, and events as they go over the wire."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.core.job import Event
from holdfast.http import places
from holdfast.http.places import Cover, Position
from holdfast.http.wire import event_of_feed

_log: Final = logging.getLogger("holdfast.http")

#: Chunks, and bytes, that wait for a listener; more and it is let go.
BACKLOG: Final = 256
BACKLOG_BYTES: Final = 4_000_000

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


class Batch:
    """Events that are told at once, and what there is among them: most wishes need not look at each."""

    def __init__(self, told: Sequence[Told]) -> None:
        self._told = told
        self._tenants = {each.event.tenant_id for each in told}
        self._queues = {each.queue for each in told}
        self._types = {each.event.type for each in told}
        self._tasks = {each.task for each in told}

    def wanted(self, wish: Wish, cover: Cover | None) -> bytes:
        """What this wish gets, encoded."""
        if (
            (wish.tenants is not None and wish.tenants.isdisjoint(self._tenants))
            or (wish.queues and wish.queues.isdisjoint(self._queues))
            or (wish.types and wish.types.isdisjoint(self._types))
            or (wish.tasks and wish.tasks.isdisjoint(self._tasks))
        ):
            return b""
        return b"".join([each.encoded(cover) for each in self._told if wish.wants(each)])


class Told:
    """An event at its place in the stream, encoded when somebody first wants it."""

    __slots__ = ("_covered", "_encoded", "_entry", "_others", "at", "event", "queue", "task")

    def __init__(self, queue: str, event: Event, at: Position, entry: str, others: Mapping[str, str]) -> None:
        self.queue = queue
        self.event = event
        self.at = at
        self.task = ""
        self._entry = entry
        self._others = others
        self._encoded: bytes | None = None
        self._covered: bytes | None = None

    def encoded(self, cover: Cover | None) -> bytes:
        """As it goes over the wire, its place under a cover for those who may not know of every queue."""
        if cover is not None:
            if self._covered is None:
                self._covered = self._encode(cover.hide(self._place))
            return self._covered
        if self._encoded is None:
            self._encoded = self._encode(self._place)
        return self._encoded

    @property
    def _place(self) -> str:
        return places.as_text(self.queue, f"{self._entry}.{self.at[-1]}", self._others)

    def _encode(self, place: str) -> bytes:
        return encode(place, self.event.type, event_of_feed(self.queue, self.event))


def encode(place: str, kind: str, event: msgspec.Struct) -> bytes:
    """One event as it goes over the wire."""
    # JSON has no line breaks, and neither have ids; a foreign event's type might.
    name = " ".join(kind.split()).encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place.encode(), name, msgspec.json.encode(event))


class Listener:
    """One open stream."""

    __slots__ = ("_bell", "_chunks", "_waiting", "let_go", "over", "wish")

    def __init__(self, wish: Wish, let_go: Callable[[], None]) -> None:
        self.wish = wish
        #: Ends the connection, however stuck it is.
        self.let_go = let_go
        self.over = False
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._bell = asyncio.Event()

    def tell(self, chunk: bytes) -> None:
        # Before it is added: one who comes back may have missed more than that, and is told at once.
        if len(self._chunks) < BACKLOG and self._waiting < BACKLOG_BYTES:
            self._chunks.append(chunk)
            self._waiting += len(chunk)
            self.ring()
        elif not self.over:
            self.over = True
            _log.warning("an event stream is ended: its client does not read")
            self.let_go()

    def hear(self, told: Told, cover: Cover | None) -> None:
        """An event of the one job that this one follows."""
        self.tell(told.encoded(cover))

    def ring(self) -> None:
        """There is something to take, or to look for."""
        self._bell.set()

    async def rung(self, wait_s: float) -> bool:
        """Whether it rang, now or within so long."""
        try:
            async with asyncio.timeout(wait_s):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        return True

    def end(self) -> None:
        self.over = True
        self.ring()

    async def take(self, wait_s: float) -> bytes:
        """All that waits; nothing if nothing came for so long."""
        if not await self.rung(wait_s):
            return b""
        taken = b"".join(self._chunks)
        self._chunks.clear()
        self._waiting = 0
        return taken
