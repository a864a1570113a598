"""A broker inside of this process, for tests and local trials: it keeps nothing beyond the process.

It behaves as the port says, and on request badly: `down`, `lose_connections`, `refuse`. Brokers have names, so that a
trigger, an outbox and a test meet at the same one. Clients of one broker may live in different threads and loops.
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

#: So many messages of a topic are kept for groups that begin later.
_KEPT: Final = 100_000


class MemoryConfig(BaseModel):
    """Which of this process's brokers."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = "default"


@dataclass(slots=True)
class _Waiting:
    """A message as one group has it."""

    sequence: int
    message: OutgoingMessage
    written_at: datetime
    deliveries: int = 0


@dataclass(slots=True)
class _Group:
    #: In order of their sequence.
    ready: list[_Waiting] = field(default_factory=list)
    #: By delivery.
    held: dict[int, tuple[_Waiting, MemoryAdapter]] = field(default_factory=dict)


@dataclass(slots=True)
class _Topic:
    log: deque[_Waiting] = field(default_factory=lambda: deque(maxlen=_KEPT))
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryBroker:
    """Topics, their groups, and what tests may do to them."""

    _named: ClassVar[dict[str, MemoryBroker]] = {}

    def __init__(self) -> None:
        self._lock = RLock()
        self._topics: dict[str, _Topic] = {}
        self._numbers = count(1)
        self._members: set[MemoryAdapter] = set()
        self._down = False
        #: Messages of which it says yes are not written.
        self.refuse: Callable[[OutgoingMessage], bool] = lambda _: False

    @classmethod
    def named(cls, name: str = "default") -> Self:
        """The broker of this name, made when it is first asked for."""
        broker = cls._named.setdefault(name, cls())
        assert isinstance(broker, cls)
        return broker

    @classmethod
    def reset(cls, name: str = "default") -> None:
        """Who asks for this name from now on gets a new broker."""
        cls._named.pop(name, None)

    @property
    def down(self) -> bool:
        """Whether it answers nobody."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        self._wake()

    def lose_connections(self) -> None:
        """What consumers have in hand is theirs no longer, and is delivered again."""
        with self._lock:
            for topic in self._topics.values():
                for group in topic.groups.values():
                    for delivery in list(group.held):
                        self._give_back(group, delivery)
        self._wake()

    def write(self, topic: str, body: bytes | None, headers: Mapping[str, str] | None = None, key: str = "") -> str:
        """Publish one message, whatever state the broker is in; its id."""
        sequence = self._append(OutgoingMessage(topic, body, dict(headers or {}), key))
        return _message_id(topic, sequence)

    def messages(self, topic: str) -> list[OutgoingMessage]:
        """All that was ever written to a topic, consumed or not."""
        with self._lock:
            return [waiting.message for waiting in self._topic(topic).log]

    def publish(self, message: OutgoingMessage) -> None:
        """Write it, or raise `BrokerUnavailable`."""
        self.check()
        if self.refuse(message):
            raise BrokerUnavailable(f"the memory broker refuses a message for {message.topic!r}")
        self._append(message)

    def check(self) -> None:
        """Raise `BrokerUnavailable` if it is down."""
        if self._down:
            raise BrokerUnavailable("the memory broker is down")

    # For adapters ----------------------------------------------------------------------------------

    def join(self, adapter: MemoryAdapter) -> _Group:
        """The adapter's group, which begins with the topic's first message."""
        self.check()
        with self._lock:
            topic = self._topic(adapter.queue_name)
            self._members.add(adapter)
            group = topic.groups.get(adapter.consumer_group)
            if group is None:
                group = topic.groups[adapter.consumer_group] = _Group()
                group.ready = [_Waiting(past.sequence, past.message, past.written_at) for past in topic.log]
            return group

    def leave(self, adapter: MemoryAdapter, group: _Group) -> None:
        """Everything that the adapter has goes back to its group."""
        with self._lock:
            self._members.discard(adapter)
            for delivery in [delivery for delivery, (_, holder) in group.held.items() if holder is adapter]:
                self._give_back(group, delivery)
        self._wake()

    def next_message(self, adapter: MemoryAdapter, group: _Group) -> tuple[int, _Waiting] | None:
        """The next message and the number of this delivery. A key that another consumer has in hand is left to it."""
        if self._down:
            return None
        with self._lock:
            elsewhere = {waiting.message.key for waiting, holder in group.held.values() if holder is not adapter} - {""}
            for place, waiting in enumerate(group.ready):
                if waiting.message.key not in elsewhere:
                    del group.ready[place]
                    waiting.deliveries += 1
                    delivery = next(self._numbers)
                    group.held[delivery] = (waiting, adapter)
                    return delivery, waiting
        return None

    def ack(self, group: _Group, delivery: int) -> None:
        """Forget this delivery's message."""
        with self._lock:
            group.held.pop(delivery, None)
        # Another consumer may have waited for the key.
        self._wake()

    def requeue(self, group: _Group, delivery: int) -> None:
        """Deliver it again."""
        with self._lock:
            self._give_back(group, delivery)
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

    def _give_back(self, group: _Group, delivery: int) -> None:
        held = group.held.pop(delivery, None)
        if held is not None:
            insort(group.ready, held[0], key=lambda waiting: waiting.sequence)

    def _topic(self, name: str) -> _Topic:
        return self._topics.setdefault(name, _Topic())

    def _wake(self) -> None:
        for member in list(self._members):
            member.wake()


class MemoryAdapter(QueueAdapter):
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
        self._news = asyncio.Event()
        self._paused = False
        self._closed = False

    async def connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._group = self._broker.join(self)

    async def consume(self) -> AsyncIterator[RawMessage]:
        while not self._closed:
            self._news.clear()
            message = self._take()
            if message is None:
                await self._news.wait()
            else:
                yield message

    async def ack(self, message: RawMessage) -> None:
        delivery = self._ended(message)
        if delivery is not None:
            self._broker.ack(self._joined(), delivery)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        delivery = self._ended(message)
        if delivery is None:
            return
        if requeue:
            self._broker.requeue(self._joined(), delivery)
        else:
            self._broker.ack(self._joined(), delivery)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if not self.owns(message):
            return
        headers = dead_letter_headers(message, self.queue_name, reason, history)
        self._broker.publish(OutgoingMessage(self._dlq_name, message.body, headers, message.key))
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        return self._group is not None and self._deliveries.get(message) in self._group.held

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._news.set()

    async def lag(self) -> int | None:
        return None if self._broker.down or self._group is None else len(self._group.ready)

    async def health_check(self) -> bool:
        return self._group is not None and not self._closed and not self._broker.down

    async def close(self) -> None:
        self._closed = True
        self._news.set()
        if self._group is not None:
            self._broker.leave(self, self._group)

    def wake(self) -> None:
        """Something may have changed for this consumer; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def _take(self) -> RawMessage | None:
        group = self._joined()
        # What was lost with a connection is not in hand any more.
        self._deliveries = {known: number for known, number in self._deliveries.items() if number in group.held}
        if self._paused or len(self._deliveries) >= self._prefetch:
            return None
        taken = self._broker.next_message(self, group)
        if taken is None:
            return None
        delivery, waiting = taken
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

    def _ended(self, message: RawMessage) -> int | None:
        """The message's delivery, which is over now; None if it was not ours."""
        delivery = self._deliveries.pop(message, None)
        self._news.set()
        return delivery

    def _joined(self) -> _Group:
        if self._group is None:
            raise BrokerUnavailable("not connected yet: call connect() first")
        return self._group


class MemoryPublisher(Publisher):
    """Writes to a `MemoryBroker`."""

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
            line = (message.topic, message.key)
            answer = failed.get(line)
            if answer is None:
                answer = self._publish(message)
                if answer is not None and message.key:
                    failed[line] = answer
            answers.append(answer)
        return answers

    async def health_check(self) -> bool:
        return self._connected and not self._broker.down

    async def close(self) -> None:
        self._connected = False

    def _publish(self, message: OutgoingMessage) -> BrokerUnavailable | None:
        if not self._connected:
            return BrokerUnavailable("not connected: call connect() first")
        try:
            self._broker.publish(message)
        except BrokerUnavailable as exc:
            return exc
        return None


def _message_id(topic: str, sequence: int) -> str:
    return f"{topic}-{sequence}"
