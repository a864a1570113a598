"""Harness of the broker contract: what an implementation provides, and helpers for its tests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage

#: How long a test waits for something that should happen at once.
SOON_S: Final = 60.0
#: How long a test checks that no message arrives.
QUIET_S: Final = 0.4
_POLL_S: Final = 0.02

EVERY_BYTE: Final = bytes(range(256))


class BrokerHarness:
    """Creates clients of one broker for one test. Subclasses close them when the test ends."""

    #: Size in bytes of a body that the broker must accept.
    large_body = 1_000_000
    #: Number of messages in tests of order.
    many = 200
    #: After this silence the broker would remove a member from its group.
    silence_s = 1.0
    #: Whether the broker supports messages without a value.
    tombstones = False
    #: The password, which must not appear in a log, an error or a `repr`; None: the broker has none.
    secret: str | None = None

    async def new_queue(self) -> str:
        """Create an empty queue (topic, stream) for this test and return its name."""
        raise NotImplementedError

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10) -> QueueAdapter:
        """Return a new consumer that is not connected."""
        raise NotImplementedError

    def publisher(self) -> Publisher:
        """Return a new publisher that is not connected."""
        raise NotImplementedError

    def lost_adapter(self, queue: str) -> QueueAdapter:
        """Return a consumer whose connection names a closed port."""
        raise NotImplementedError

    def lost_publisher(self) -> Publisher:
        """Return a publisher whose connection names a closed port."""
        raise NotImplementedError

    def refused_adapter(self, queue: str) -> QueueAdapter | None:
        """Return a consumer with a wrong password; None: the broker has no password."""
        return None

    def dead_letters(self, queue: str) -> str:
        """Return the name of this queue's dead-letter queue."""
        return f"{queue}.dlq"

    async def spoil_dead_letters(self, queue: str) -> bool:
        """Make writes to the dead-letter queue fail from now on. Return False if that is not possible."""
        return False

    def impossible(self, topic: str, key: str) -> OutgoingMessage | None:
        """Return a message that the broker refuses while it accepts others of this topic and key.

        None: there is no such message.
        """
        return None

    async def kill_broker(self) -> None:
        """Kill the server. What it has confirmed is on disk."""
        raise NotImplementedError

    async def start_broker(self) -> None:
        """Start the server again with the same address and data."""
        raise NotImplementedError


class MessageReader:
    """A running consumer that keeps its messages until a test asks for them."""

    def __init__(self, adapter: QueueAdapter) -> None:
        self.adapter = adapter
        self._received: asyncio.Queue[RawMessage] = asyncio.Queue()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.adapter.consume():
            self._received.put_nowait(message)

    async def one(self) -> RawMessage:
        """Wait for the next message. Fails if the consumer fails."""
        receiving = asyncio.create_task(self._received.get())
        await asyncio.wait({receiving, self.task}, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        receiving.cancel()
        if self.task.done():
            self.task.result()
            raise AssertionError("consume() ended before close()")
        raise AssertionError(f"no message within {SOON_S} s")

    async def receive(self, count: int) -> list[RawMessage]:
        return [await self.one() for _ in range(count)]

    async def handle(self, count: int) -> list[RawMessage]:
        """Wait for the next `count` messages and acknowledge each."""
        messages = []
        for _ in range(count):
            message = await self.one()
            await self.adapter.ack(message)
            messages.append(message)
        return messages

    def waiting(self) -> list[RawMessage]:
        """Remove and return the messages received so far."""
        return [self._received.get_nowait() for _ in range(self._received.qsize())]

    async def quiet(self, for_s: float = QUIET_S) -> None:
        """Check that no message arrives."""
        with suppress(TimeoutError):
            message = await asyncio.wait_for(self._received.get(), for_s)
            raise AssertionError(f"unexpected message: {message}")

    async def stop(self) -> None:
        """Close the consumer and wait until `consume` ends."""
        await self.adapter.close()
        await asyncio.wait_for(self.task, SOON_S)


class BrokerRig:
    """One queue with its publisher and consumers."""

    def __init__(self, harness: BrokerHarness, queue: str) -> None:
        self.harness = harness
        self.queue = queue
        self._publisher: Publisher | None = None
        self._readers: list[MessageReader] = []

    async def adapter(self, **options: Any) -> QueueAdapter:
        adapter = self.harness.adapter(self.queue, **options)
        await adapter.connect()
        return adapter

    async def reader(self, **options: Any) -> MessageReader:
        return self.read(await self.adapter(**options))

    def read(self, adapter: QueueAdapter) -> MessageReader:
        reader = MessageReader(adapter)
        self._readers.append(reader)
        return reader

    async def dead_letters(self) -> MessageReader:
        adapter = self.harness.adapter(self.harness.dead_letters(self.queue))
        await adapter.connect()
        return self.read(adapter)

    async def publisher(self) -> Publisher:
        if self._publisher is None:
            self._publisher = self.harness.publisher()
            await self._publisher.connect()
        return self._publisher

    async def publish(self, *bodies: bytes, key: str = "", **headers: str) -> None:
        messages = [self.outgoing(body, key=key, **headers) for body in bodies]
        answers = await (await self.publisher()).publish(messages)
        assert answers == [None] * len(messages)

    async def publish_each(self, numbers: Iterable[int]) -> None:
        """Publish one message per number, each with its own key."""
        messages = [self.outgoing(b"%d" % number, key=f"key-{number}") for number in numbers]
        assert await (await self.publisher()).publish(messages) == [None] * len(messages)

    def outgoing(self, body: bytes | None, key: str = "", **headers: str) -> OutgoingMessage:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return OutgoingMessage(self.queue, body, named, key, f"event-{(body or b'')[:20].hex()}")

    async def close(self) -> None:
        for reader in self._readers:
            await reader.adapter.close()
        for reader in self._readers:
            await asyncio.wait_for(reader.task, SOON_S)
        if self._publisher is not None:
            await self._publisher.close()


def by_key(messages: Iterable[RawMessage]) -> dict[str, list[bytes | None]]:
    """Group the bodies by key, in the order of arrival."""
    bodies: defaultdict[str, list[bytes | None]] = defaultdict(list)
    for message in messages:
        bodies[message.key].append(message.body)
    return dict(bodies)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; fail after `SOON_S`."""
    async with asyncio.timeout(SOON_S):
        while not await holds():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(_POLL_S)


async def equals(get: Callable[[], Awaitable[Any]], value: Any) -> bool:
    return bool(await get() == value)
