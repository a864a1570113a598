"""In-process broker for tests and local trials. Messages are lost when the process ends.

Follows the port and can inject faults: `down`, `lose_connections`, `refuse`. A trigger, an outbox and a test share a
broker by its name. Clients of one broker may run in different threads and event loops.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from threading import RLock
from typing import ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict

from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage, dead_letter_headers
from holdfast.errors import BrokerUnavailable

#: Messages retained per topic for groups that join later.
_MAX_RETAINED: Final = 100_000


class MemoryConfig(BaseModel):
    """Name of the in-process broker."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = "default"


@dataclass(slots=True)
class _Waiting:
    """A message in one group, with the group's delivery count."""

    sequence: int
    message: OutgoingMessage
    written_at: datetime
    deliveries: int = 0


@dataclass(slots=True)
class _Group:
    #: Ordered by sequence.
    ready: list[_Waiting] = field(default_factory=list)
    #: In flight, by delivery number.
    in_flight: dict[int, tuple[_Waiting, MockQueueAdapter]] = field(default_factory=dict)


@dataclass(slots=True)
class _Topic:
    log: deque[_Waiting] = field(default_factory=lambda: deque(maxlen=_MAX_RETAINED))
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryBroker:
    """Topics, their groups, and fault injection for tests."""

    _named: ClassVar[dict[str, MemoryBroker]] = {}

    def __init__(self) -> None:
        self._lock = RLock()
        self._topics: dict[str, _Topic] = {}
        self._numbers = count(1)
        self._members: set[MockQueueAdapter] = set()
        self._down = False
        #: Messages for which it returns True are refused.
        self.refuse: Callable[[OutgoingMessage], bool] = lambda _: False

    @classmethod
    def named(cls, name: str = "default") -> Self:
        """Get the broker with this name, creating it on first use."""
        broker = cls._named.setdefault(name, cls())
        assert isinstance(broker, cls)
        return broker

    @classmethod
    def reset(cls, name: str = "default") -> None:
        """Drop the broker with this name; the next `named` creates a new one."""
        cls._named.pop(name, None)

    @property
    def down(self) -> bool:
        """Whether the broker is unreachable."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        self._wake()

    def lose_connections(self) -> None:
        """Take all messages in flight from their consumers and deliver them again."""
        with self._lock:
            for topic in self._topics.values():
                for group in topic.groups.values():
                    for delivery in list(group.in_flight):
                        self._return_to_group(group, delivery)
        self._wake()

    def write(self, topic: str, body: bytes | None, headers: Mapping[str, str] | None = None, key: str = "") -> str:
        """Write a message even if the broker is down. Returns its id."""
        sequence = self._append(OutgoingMessage(topic, body, dict(headers or {}), key))
        return _message_id(topic, sequence)

    def messages(self, topic: str) -> list[OutgoingMessage]:
        """All messages written to a topic, consumed or not (at most the last 100 000)."""
        with self._lock:
            return [waiting.message for waiting in self._topic(topic).log]

    def publish(self, message: OutgoingMessage) -> None:
        """Write a message, or raise `BrokerUnavailable`."""
        self.check()
        if self.refuse(message):
            raise BrokerUnavailable(f"memory broker refused a message for {message.topic!r}")
        self._append(message)

    def check(self) -> None:
        """Raise `BrokerUnavailable` if the broker is down."""
        if self._down:
            raise BrokerUnavailable("memory broker is down")

    # For adapters ----------------------------------------------------------------------------------

    def join(self, adapter: MockQueueAdapter) -> _Group:
        """Add the adapter to its group. A new group starts at the first message of the topic."""
        self.check()
        with self._lock:
            topic = self._topic(adapter.queue_name)
            self._members.add(adapter)
            group = topic.groups.get(adapter.consumer_group)
            if group is None:
                group = topic.groups[adapter.consumer_group] = _Group()
                group.ready = [_Waiting(past.sequence, past.message, past.written_at) for past in topic.log]
            return group

    def remove(self, adapter: MockQueueAdapter, group: _Group) -> None:
        """Return all messages in flight of the adapter to its group."""
        with self._lock:
            self._members.discard(adapter)
            for delivery in [delivery for delivery, (_, holder) in group.in_flight.items() if holder is adapter]:
                self._return_to_group(group, delivery)
        self._wake()

    def next_message(self, adapter: MockQueueAdapter, group: _Group) -> tuple[int, _Waiting] | None:
        """The next message with its delivery number. Skips keys that are in flight at another consumer."""
        if self._down:
            return None
        with self._lock:
            elsewhere = {
                waiting.message.key for waiting, holder in group.in_flight.values() if holder is not adapter
            } - {""}
            for index, waiting in enumerate(group.ready):
                if waiting.message.key not in elsewhere:
                    del group.ready[index]
                    waiting.deliveries += 1
                    delivery = next(self._numbers)
                    group.in_flight[delivery] = (waiting, adapter)
                    return delivery, waiting
        return None

    def ack(self, group: _Group, delivery: int) -> None:
        """Remove the message of this delivery."""
        with self._lock:
            group.in_flight.pop(delivery, None)
        # Another consumer may be waiting for the key.
        self._wake()

    def requeue(self, group: _Group, delivery: int) -> None:
        """Return the message of this delivery to the group."""
        with self._lock:
            self._return_to_group(group, delivery)
        self._wake()

    def _append(self, message: OutgoingMessage) -> int:
        with self._lock:
            topic = self._topic(message.topic)
            sequence = next(self._numbers)
            now = datetime.now(UTC)
            topic.log.append(_Waiting(sequence, message, now))
            for group in topic.groups.values():
                group.ready.append(_Waiting(sequence, message, now))
        self._wake()
        return sequence

    def _return_to_group(self, group: _Group, delivery: int) -> None:
        in_flight = group.in_flight.pop(delivery, None)
        if in_flight is not None:
            insort(group.ready, in_flight[0], key=lambda waiting: waiting.sequence)

    def _topic(self, name: str) -> _Topic:
        return self._topics.setdefault(name, _Topic())

    def _wake(self) -> None:
        for member in list(self._members):
            member.wake()


class MockQueueAdapter(QueueAdapter):
    """A consumer of one topic of a `MemoryBroker`."""

    def __init__(
        self,
        connection: MemoryConfig,
        queue_name: str,
        consumer_group: str,
        *,
        prefetch: int = 100,
        dlq_name: str | None = None,
    ) -> None:
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self._broker = MemoryBroker.named(connection.name)
        self._prefetch = prefetch
        self._dlq_name = dlq_name or f"{queue_name}.dlq"
        self._group: _Group | None = None
        self._deliveries: dict[RawMessage, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = asyncio.Event()
        self._paused = False
        self._closed = False

    async def connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._group = self._broker.join(self)

    async def consume(self) -> AsyncIterator[RawMessage]:
        while not self._closed:
            self._wakeup.clear()
            message = self._next()
            if message is None:
                await self._wakeup.wait()
            else:
                yield message

    async def ack(self, message: RawMessage) -> None:
        delivery = self._pop_delivery(message)
        if delivery is not None:
            self._broker.ack(self._require_group(), delivery)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        delivery = self._pop_delivery(message)
        if delivery is None:
            return
        if requeue:
            self._broker.requeue(self._require_group(), delivery)
        else:
            self._broker.ack(self._require_group(), delivery)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if not self.owns(message):
            return
        headers = dead_letter_headers(message, self.queue_name, reason, history)
        self._broker.publish(OutgoingMessage(self._dlq_name, message.body, headers, message.key))
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        return self._group is not None and self._deliveries.get(message) in self._group.in_flight

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wakeup.set()

    async def lag(self) -> int | None:
        return None if self._broker.down or self._group is None else len(self._group.ready)

    async def health_check(self) -> bool:
        return self._group is not None and not self._closed and not self._broker.down

    async def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        if self._group is not None:
            self._broker.remove(self, self._group)

    def wake(self) -> None:
        """Make `consume` check for messages. Callable from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wakeup.set)

    def _next(self) -> RawMessage | None:
        group = self._require_group()
        # Messages lost with a connection are no longer in flight.
        self._deliveries = {known: number for known, number in self._deliveries.items() if number in group.in_flight}
        if self._paused or len(self._deliveries) >= self._prefetch:
            return None
        found = self._broker.next_message(self, group)
        if found is None:
            return None
        delivery, waiting = found
        message = RawMessage(
            _message_id(self.queue_name, waiting.sequence),
            waiting.message.body,
            {name.lower(): value for name, value in waiting.message.headers.items()},
            waiting.written_at,
            {"topic": self.queue_name, "sequence": waiting.sequence},
            waiting.message.key,
            waiting.deliveries,
        )
        self._deliveries[message] = delivery
        return message

    def _pop_delivery(self, message: RawMessage) -> int | None:
        """Remove and return the delivery number of the message; None if it is not in flight here."""
        delivery = self._deliveries.pop(message, None)
        self._wakeup.set()
        return delivery

    def _require_group(self) -> _Group:
        if self._group is None:
            raise BrokerUnavailable("not connected; call connect() first")
        return self._group


class MemoryPublisher(Publisher):
    """Publisher to a `MemoryBroker`."""

    def __init__(self, connection: MemoryConfig) -> None:
        self._broker = MemoryBroker.named(connection.name)
        self._connected = False

    async def connect(self) -> None:
        self._broker.check()
        self._connected = True

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        failed: dict[tuple[str, str], BrokerUnavailable] = {}
        answers: list[BrokerUnavailable | None] = []
        for message in messages:
            ordered_by = (message.topic, message.key)
            answer = failed.get(ordered_by)
            if answer is None:
                answer = self._publish(message)
                if answer is not None and message.key:
                    failed[ordered_by] = answer
            answers.append(answer)
        return answers

    async def health_check(self) -> bool:
        return self._connected and not self._broker.down

    async def close(self) -> None:
        self._connected = False

    def _publish(self, message: OutgoingMessage) -> BrokerUnavailable | None:
        if not self._connected:
            return BrokerUnavailable("not connected; call connect() first")
        try:
            self._broker.publish(message)
        except BrokerUnavailable as exc:
            return exc
        return None


def _message_id(topic: str, sequence: int) -> str:
    return f"{topic}-{sequence}"
