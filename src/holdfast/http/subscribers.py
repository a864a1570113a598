"""Subscribers of an event stream: their filters, encoded events and event ids.

An event id is a position in every feed, the same in every process: `queue=position;queue=position;…` with quoted queue
names, the event's own queue first, the event's number within its feed entry after a dot. A position consists of numbers
joined as the engine chooses.

Such an id reveals every queue and its progress. Subscribers restricted to some tenants get it encoded by
`EventIdCodec`, which makes it unreadable and rejects forged ids. Subscribers with equal filters share encoded
events. A subscriber that does not read is disconnected when `BACKLOG` or `BACKLOG_BYTES` is reached.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from holdfast.core.job import Event
from holdfast.http.wire import event_of_feed

#: Comparable: the entry's numbers, then the event's number within it.
Position = tuple[int, ...]
#: Before everything.
START: Final[Position] = ()
_WHOLE: Final = 1 << 62
_TAG: Final = 16
#: Texts are filled up to a multiple of it: their length must not count queues.
_BLOCK: Final = 96


def parse_position(position: str) -> Position:
    """A position as text, to be compared. Without a number within its entry it stands behind all of that."""
    entry, _, index = position.partition(".")
    return (*(int(number) for number in entry.split("-")), int(index) if index else _WHOLE)


def before(position: str) -> Position:
    """Just before an entry."""
    return (*parse_position(position)[:-1], -1)


def entry_of(position: str) -> str:
    """The position of the entry that an event is in."""
    return position.partition(".")[0]


def format_event_id(queue: str, position: str, others: Mapping[str, str]) -> str:
    """The id of an event at `position` of `queue`, when the other feeds had been told up to `others`."""
    rest = (f"{quote(name, safe='')}={at}" for name, at in others.items() if at and name != queue)
    return ";".join((f"{quote(queue, safe='')}={position}", *rest))


def end_event_id(positions: Mapping[str, str]) -> str:
    """The place behind all that has been told."""
    return ";".join(f"{quote(name, safe='')}={at}" for name, at in positions.items() if at)


def parse_event_id(text: str) -> dict[str, str] | None:
    """Queue → position; None for what is no event's id."""
    try:
        pairs = [part.split("=") for part in text.split(";")]
        place = {unquote(name, errors="strict"): position for name, position in pairs}
        for position in place.values():
            parse_position(position)
    except ValueError:
        return None
    return place


class EventIdCodec:
    """Makes a place unreadable for whoever gets it, and knows it again when it comes back, in every process that has
    the same key. What was made up, or changed, is not taken."""

    def __init__(self, key: bytes) -> None:
        self._tag_key = hmac.digest(key, b"holdfast.place.tag", "sha256")
        self._text_key = hmac.digest(key, b"holdfast.place.text", "sha256")

    def encode(self, place: str) -> str:
        """The place, covered; the same one always looks the same."""
        text = place.encode()
        text += b" " * (-len(text) % _BLOCK)
        tag = self._tag(text)
        return base64.urlsafe_b64encode(tag + self._turned(tag, text)).decode()

    def decode(self, covered: str) -> str | None:
        """The place; None if this is none that was covered with our key."""
        try:
            raw = base64.urlsafe_b64decode(covered.encode())
        except (binascii.Error, ValueError):
            return None
        tag, text = raw[:_TAG], self._turned(raw[:_TAG], raw[_TAG:])
        return text.decode().rstrip() if hmac.compare_digest(tag, self._tag(text)) else None

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._tag_key, text, "sha256")[:_TAG]

    def _turned(self, tag: bytes, text: bytes) -> bytes:
        """With a key stream of its own for every text, since its tag is one: there and back."""
        stream = hashlib.shake_256(self._text_key + tag).digest(len(text))
        return bytes(one ^ other for one, other in zip(text, stream, strict=True))


_log: Final = logging.getLogger("holdfast.http")

#: Chunks, and bytes, that wait for a listener; more and it is let go.
BACKLOG: Final = 256
BACKLOG_BYTES: Final = 4_000_000

#: The first event of every stream: from here on nothing is missed.
READY: Final = b"event: ready\ndata: {}\n\n"
GAP: Final = b'event: gap\ndata: {"detail":"events may be missing here; look the jobs up"}\n\n'


class StreamFilter(msgspec.Struct, frozen=True):
    """What a listener wants to hear. Hashable: those with the same wish share what is encoded for it."""

    #: None: all tenants.
    tenants: frozenset[str] | None
    queues: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    job_id: str | None = None

    def matches(self, told: StreamEvent) -> bool:
        event = told.event
        return (
            (self.tenants is None or event.tenant_id in self.tenants)
            and (not self.queues or told.queue in self.queues)
            and (self.job_id is None or event.job_id == self.job_id)
            and (not self.types or event.type in self.types)
            and (not self.tasks or told.task in self.tasks)
        )


class EventBatch:
    """Events that are told at once, and what there is among them: most wishes need not look at each."""

    def __init__(self, told: Sequence[StreamEvent]) -> None:
        self._told = told
        self._tenants = {each.event.tenant_id for each in told}
        self._queues = {each.queue for each in told}
        self._types = {each.event.type for each in told}
        self._tasks = {each.task for each in told}

    def encode_for(self, wish: StreamFilter, cover: EventIdCodec | None) -> bytes:
        """What this wish gets, encoded."""
        if (
            (wish.tenants is not None and wish.tenants.isdisjoint(self._tenants))
            or (wish.queues and wish.queues.isdisjoint(self._queues))
            or (wish.types and wish.types.isdisjoint(self._types))
            or (wish.tasks and wish.tasks.isdisjoint(self._tasks))
        ):
            return b""
        return b"".join([each.encoded(cover) for each in self._told if wish.matches(each)])


class StreamEvent:
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

    def encoded(self, cover: EventIdCodec | None) -> bytes:
        """As it goes over the wire, its place under a cover for those who may not know of every queue."""
        if cover is not None:
            if self._covered is None:
                self._covered = self._encode(cover.encode(self._place))
            return self._covered
        if self._encoded is None:
            self._encoded = self._encode(self._place)
        return self._encoded

    @property
    def _place(self) -> str:
        return format_event_id(self.queue, f"{self._entry}.{self.at[-1]}", self._others)

    def _encode(self, place: str) -> bytes:
        return encode(place, self.event.type, event_of_feed(self.queue, self.event))


def encode(place: str, kind: str, event: msgspec.Struct) -> bytes:
    """One event as it goes over the wire."""
    # JSON has no line breaks, and neither have ids; a foreign event's type might.
    name = " ".join(kind.split()).encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place.encode(), name, msgspec.json.encode(event))


class StreamSubscriber:
    """One open stream."""

    __slots__ = ("_bell", "_chunks", "_waiting", "disconnect", "over", "wish")

    def __init__(self, wish: StreamFilter, let_go: Callable[[], None]) -> None:
        self.wish = wish
        #: Ends the connection, however stuck it is.
        self.disconnect = let_go
        self.over = False
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._bell = asyncio.Event()

    def send(self, chunk: bytes) -> None:
        # Before it is added: one who comes back may have missed more than that, and is told at once.
        if len(self._chunks) < BACKLOG and self._waiting < BACKLOG_BYTES:
            self._chunks.append(chunk)
            self._waiting += len(chunk)
            self.wake()
        elif not self.over:
            self.over = True
            _log.warning("an event stream is ended: its client does not read")
            self.disconnect()

    def on_event(self, told: StreamEvent, cover: EventIdCodec | None) -> None:
        """An event of the one job that this one follows."""
        self.send(told.encoded(cover))

    def wake(self) -> None:
        """There is something to take, or to look for."""
        self._bell.set()

    async def wait(self, wait_s: float) -> bool:
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
        self.wake()

    async def next_chunk(self, wait_s: float) -> bytes:
        """All that waits; nothing if nothing came for so long."""
        if not await self.wait(wait_s):
            return b""
        taken = b"".join(self._chunks)
        self._chunks.clear()
        self._waiting = 0
        return taken
