"""Subscribers of an event stream: their filters, encoded events and event ids.

An event id is the event's time and a digest, `1790000000000-k3J9xQ2mZpAb`: the same in every process, also when the
event is sent again, and different from the id of any other event. It reveals nothing that its subscriber does not get
with the event: the time is the event's own, and the digest is that of a random number of the feed entry and of the job.
A client that got no event yet has the time alone, `1790000000000-0`. Ids need no secret: a forged one only chooses the
time from which the stream continues, and the stream never has more than the subscriber may see.

Subscribers with equal filters share encoded events. A subscriber that does not read is disconnected when `BACKLOG` or
`BACKLOG_BYTES` is reached.
"""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from holdfast.core.job import Event
from holdfast.http.wire import event_of_feed

#: Comparable: the numbers of the entry's position, then the event's index within the entry.
Position = tuple[int, ...]
#: Before every event.
START: Final[Position] = ()
_WHOLE: Final = 1 << 62


def parse_position(position: str) -> Position:
    """Parse a position into a comparable value. Without an index it sorts after all events of its entry."""
    entry, _, index = position.partition(".")
    return (*(int(number) for number in entry.split("-")), int(index) if index else _WHOLE)


#: Bytes of an event's digest: a multiple of 3, which Base64 does not pad.
_DIGEST: Final = 9
#: Instead of a digest: a time alone.
_NO_EVENT: Final = "0"
_EVENT_ID: Final = re.compile(r"([0-9]{1,15})-(0|[A-Za-z0-9_-]{12})")


def format_time_id(at_ms: int) -> str:
    """Id for a client that has all events up to this time of the engine's clock."""
    return f"{at_ms}-{_NO_EVENT}"


class LastEvent(msgspec.Struct, frozen=True):
    """What a returning client has: everything up to a time, and the event with this id."""

    at_ms: int
    #: Empty if the id was a time alone.
    event_id: str

    @classmethod
    def parse(cls, text: str) -> LastEvent | None:
        """Parse an event id; None if it is another text, for example an id of an earlier release."""
        match = _EVENT_ID.fullmatch(text)
        if match is None:
            return None
        return cls(int(match[1]), "" if match[2] == _NO_EVENT else text)


_log: Final = logging.getLogger("holdfast.http")

#: Unsent chunks and bytes at which a subscriber is disconnected.
BACKLOG: Final = 256
BACKLOG_BYTES: Final = 4_000_000

#: First event of every stream; no later event is missed.
READY: Final = b"event: ready\ndata: {}\n\n"
#: Comment that keeps proxies from closing the connection and detects disconnected clients.
HEARTBEAT: Final = b": still here\n\n"
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

    def encode_for(self, event_filter: StreamFilter) -> bytes:
        """Encode the events that match a filter."""
        if (
            (event_filter.tenants is not None and event_filter.tenants.isdisjoint(self._tenants))
            or (event_filter.queues and event_filter.queues.isdisjoint(self._queues))
            or (event_filter.types and event_filter.types.isdisjoint(self._types))
            or (event_filter.tasks and event_filter.tasks.isdisjoint(self._tasks))
        ):
            return b""
        return b"".join([each.encode() for each in self._events if event_filter.matches(each)])


class StreamEvent:
    """An event at its position in the stream, encoded on first use."""

    __slots__ = ("_encoded", "_nonce", "_number", "at", "event", "queue", "task")

    def __init__(self, queue: str, event: Event, at: Position, nonce: str, number: int = 0) -> None:
        """`nonce` of its feed entry; `number` of the event among those of its job in the entry."""
        self.queue = queue
        self.event = event
        self.at = at
        self.task = ""
        self._nonce = nonce
        self._number = number
        self._encoded: bytes | None = None

    @property
    def event_id(self) -> str:
        # The nonce is random, so that the digest does not reveal where in the feed the event is. A script that writes
        # two entries gives both the same, but their events of a job have different types.
        text = f"{self._nonce} {self._number} {self.event.type} {self.event.job_id}"
        digest = blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST).digest()
        return f"{self.event.at_ms}-{urlsafe_b64encode(digest).decode()}"

    def encode(self) -> bytes:
        """Encode the event."""
        if self._encoded is None:
            self._encoded = encode(self.event_id, self.event.type, event_of_feed(self.queue, self.event))
        return self._encoded


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

    def send_first(self, chunk: bytes) -> None:
        """Send a chunk before all pending ones. It does not count towards the limits."""
        self._chunks.appendleft(chunk)
        self.wake()

    def on_event(self, stream_event: StreamEvent) -> None:
        """Handle an event of the job that this subscriber follows."""
        self.send(stream_event.encode())

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
