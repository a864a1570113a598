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

#: Comparable: the numbers of the entry's position, then the event's index within the entry.
Position = tuple[int, ...]
#: Before every event.
START: Final[Position] = ()
_WHOLE: Final = 1 << 62
_TAG: Final = 16
#: Ids are padded to a multiple of this, so that their length does not reveal the number of queues.
_BLOCK: Final = 96


def parse_position(position: str) -> Position:
    """Parse a position into a comparable value. Without an index it sorts after all events of its entry."""
    entry, _, index = position.partition(".")
    return (*(int(number) for number in entry.split("-")), int(index) if index else _WHOLE)


def position_before(position: str) -> Position:
    """Position before the first event of an entry."""
    return (*parse_position(position)[:-1], -1)


def entry_of(position: str) -> str:
    """Position of the entry that contains an event."""
    return position.partition(".")[0]


def format_event_id(queue: str, position: str, others: Mapping[str, str]) -> str:
    """Id of the event at `position` of `queue`, when the other feeds had been sent up to `others`."""
    rest = (f"{quote(name, safe='')}={at}" for name, at in others.items() if at and name != queue)
    return ";".join((f"{quote(queue, safe='')}={position}", *rest))


def end_event_id(positions: Mapping[str, str]) -> str:
    """Event id after everything that was sent."""
    return ";".join(f"{quote(name, safe='')}={at}" for name, at in positions.items() if at)


def parse_event_id(text: str) -> dict[str, str] | None:
    """Parse an event id into queue → position; None if it is not an event id."""
    try:
        pairs = [part.split("=") for part in text.split(";")]
        positions = {unquote(name, errors="strict"): position for name, position in pairs}
        for position in positions.values():
            parse_position(position)
    except ValueError:
        return None
    return positions


class EventIdCodec:
    """Encrypts event ids.

    Every process with the same key can decode them. Forged or changed ids are rejected.
    """

    def __init__(self, key: bytes) -> None:
        self._tag_key = hmac.digest(key, b"holdfast.place.tag", "sha256")
        self._text_key = hmac.digest(key, b"holdfast.place.text", "sha256")

    def encode(self, event_id: str) -> str:
        """Encode an event id. Deterministic: equal ids have equal encodings."""
        text = event_id.encode()
        text += b" " * (-len(text) % _BLOCK)
        tag = self._tag(text)
        return base64.urlsafe_b64encode(tag + self._xor(tag, text)).decode()

    def decode(self, encoded: str) -> str | None:
        """Decode an event id; None if it was not encoded with this key."""
        try:
            raw = base64.urlsafe_b64decode(encoded.encode())
        except (binascii.Error, ValueError):
            return None
        tag, text = raw[:_TAG], self._xor(raw[:_TAG], raw[_TAG:])
        return text.decode().rstrip() if hmac.compare_digest(tag, self._tag(text)) else None

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._tag_key, text, "sha256")[:_TAG]

    def _xor(self, tag: bytes, text: bytes) -> bytes:
        """Encrypt or decrypt by XOR.

        The tag is derived from the text, so that each text has its own key stream.
        """
        stream = hashlib.shake_256(self._text_key + tag).digest(len(text))
        return bytes(one ^ other for one, other in zip(text, stream, strict=True))


_log: Final = logging.getLogger("holdfast.http")

#: Unsent chunks and bytes at which a subscriber is disconnected.
BACKLOG: Final = 256
BACKLOG_BYTES: Final = 4_000_000

#: First event of every stream; no later event is missed.
READY: Final = b"event: ready\ndata: {}\n\n"
GAP: Final = b'event: gap\ndata: {"detail":"events may be missing; read the affected jobs"}\n\n'


class StreamFilter(msgspec.Struct, frozen=True):
    """Which events a subscriber receives. Hashable: subscribers with equal filters share encoded events."""

    #: None: all tenants.
    tenants: frozenset[str] | None
    queues: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    job_id: str | None = None

    def matches(self, stream_event: StreamEvent) -> bool:
        event = stream_event.event
        return (
            (self.tenants is None or event.tenant_id in self.tenants)
            and (not self.queues or stream_event.queue in self.queues)
            and (self.job_id is None or event.job_id == self.job_id)
            and (not self.types or event.type in self.types)
            and (not self.tasks or stream_event.task in self.tasks)
        )


class EventBatch:
    """Events published together, with summaries that let most filters skip the whole batch."""

    def __init__(self, events: Sequence[StreamEvent]) -> None:
        self._events = events
        self._tenants = {each.event.tenant_id for each in events}
        self._queues = {each.queue for each in events}
        self._types = {each.event.type for each in events}
        self._tasks = {each.task for each in events}

    def encode_for(self, event_filter: StreamFilter, codec: EventIdCodec | None) -> bytes:
        """Encode the events that match a filter."""
        if (
            (event_filter.tenants is not None and event_filter.tenants.isdisjoint(self._tenants))
            or (event_filter.queues and event_filter.queues.isdisjoint(self._queues))
            or (event_filter.types and event_filter.types.isdisjoint(self._types))
            or (event_filter.tasks and event_filter.tasks.isdisjoint(self._tasks))
        ):
            return b""
        return b"".join([each.encode(codec) for each in self._events if event_filter.matches(each)])


class StreamEvent:
    """An event at its position in the stream, encoded on first use."""

    __slots__ = ("_encoded", "_encoded_for_tenants", "_entry", "_others", "at", "event", "queue", "task")

    def __init__(self, queue: str, event: Event, at: Position, entry: str, others: Mapping[str, str]) -> None:
        self.queue = queue
        self.event = event
        self.at = at
        self.task = ""
        self._entry = entry
        self._others = others
        self._encoded: bytes | None = None
        self._encoded_for_tenants: bytes | None = None

    def encode(self, codec: EventIdCodec | None) -> bytes:
        """Encode the event.

        A codec hides the other queues in its id from subscribers restricted to some tenants.
        """
        if codec is not None:
            if self._encoded_for_tenants is None:
                self._encoded_for_tenants = self._encode(codec.encode(self._event_id))
            return self._encoded_for_tenants
        if self._encoded is None:
            self._encoded = self._encode(self._event_id)
        return self._encoded

    @property
    def _event_id(self) -> str:
        return format_event_id(self.queue, f"{self._entry}.{self.at[-1]}", self._others)

    def _encode(self, event_id: str) -> bytes:
        return encode(event_id, self.event.type, event_of_feed(self.queue, self.event))


def encode(event_id: str, kind: str, event: msgspec.Struct) -> bytes:
    """Encode one server-sent event."""
    # JSON and ids contain no line breaks; the type of a foreign event may.
    name = " ".join(kind.split()).encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), name, msgspec.json.encode(event))


class StreamSubscriber:
    """One open stream."""

    __slots__ = ("_chunks", "_waiting", "_woken", "disconnect", "event_filter", "over")

    def __init__(self, event_filter: StreamFilter, disconnect: Callable[[], None]) -> None:
        self.event_filter = event_filter
        #: Ends the connection, even if a write is blocked.
        self.disconnect = disconnect
        self.over = False
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._woken = asyncio.Event()

    def send(self, chunk: bytes) -> None:
        # Checked before adding: what a returning subscriber missed is one chunk and may exceed the limit.
        if len(self._chunks) < BACKLOG and self._waiting < BACKLOG_BYTES:
            self._chunks.append(chunk)
            self._waiting += len(chunk)
            self.wake()
        elif not self.over:
            self.over = True
            _log.warning("event stream closed: its client does not read")
            self.disconnect()

    def on_event(self, stream_event: StreamEvent, codec: EventIdCodec | None) -> None:
        """Handle an event of the job that this subscriber follows."""
        self.send(stream_event.encode(codec))

    def wake(self) -> None:
        """Wake the stream: chunks are ready, or the ledger may have new events."""
        self._woken.set()

    async def wait(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds to be woken; whether it was."""
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    def end(self) -> None:
        self.over = True
        self.wake()

    async def next_chunk(self, wait_s: float) -> bytes:
        """Return all pending chunks; empty if there were none within `wait_s` seconds."""
        if not await self.wait(wait_s):
            return b""
        pending = b"".join(self._chunks)
        self._chunks.clear()
        self._waiting = 0
        return pending
