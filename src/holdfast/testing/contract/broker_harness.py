"""The behaviour that every broker's adapter and publisher must show, sentence by sentence of `brokers/port.py`.

    from holdfast.testing.contract.brokers import BrokerContract, BrokerHarness

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        async def harness(self): ...        # a `BrokerHarness`

`BrokerFaultContract` is the part that takes the broker down; its harness starts a server that no other test uses.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage

#: How long a test waits for something that should happen at once, before it is called a failure.
SOON_S: Final = 60.0
#: For so long nothing may come, where nothing should.
QUIET_S: Final = 0.4
_LOOK_S: Final = 0.02

EVERY_BYTE: Final = bytes(range(256))


class BrokerHarness:
    """Makes clients of one broker for one test. Subclass it; what it made it closes when the test is over."""

    #: A body that the broker must take.
    large_body = 1_000_000
    #: So many messages make a stream whose order is looked at.
    many = 200
    #: A member of a group that is silent for so long would have been given up by the broker.
    silence_s = 1.0
    #: Whether it carries messages without a value.
    tombstones = False
    #: Never to be seen in a log, an error or a `repr`; None: this broker asks for no password.
    secret: str | None = None

    async def new_queue(self) -> str:
        """The name of a queue (topic, stream) that is there, is empty, and is known to no other test."""
        raise NotImplementedError

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10) -> QueueAdapter:
        """A consumer that is not connected yet, one more at each call."""
        raise NotImplementedError

    def publisher(self) -> Publisher:
        """A publisher that is not connected yet, one more at each call."""
        raise NotImplementedError

    def lost_adapter(self, queue: str) -> QueueAdapter:
        """A consumer whose connection names a port where nobody listens."""
        raise NotImplementedError

    def lost_publisher(self) -> Publisher:
        """A publisher whose connection names a port where nobody listens."""
        raise NotImplementedError

    def refused_adapter(self, queue: str) -> QueueAdapter | None:
        """A consumer with a wrong password; None: this broker asks for none."""
        return None

    def dead_letters(self, queue: str) -> str:
        """The queue of this queue's dead letters."""
        return f"{queue}.dlq"

    async def spoil_dead_letters(self, queue: str) -> bool:
        """From now on nothing can be written to the queue's dead letters. False: that cannot be arranged."""
        return False

    def impossible(self, topic: str, key: str) -> OutgoingMessage | None:
        """A message that the broker or its client refuses, where others of topic and key pass. None: there is none."""
        return None

    async def kill_broker(self) -> None:
        """End the server at once; what it has confirmed it has on disk."""
        raise NotImplementedError

    async def start_broker(self) -> None:
        """Bring it back, under the same address and with its data."""
        raise NotImplementedError


class MessageReader:
    """A consumer at work: keeps what comes until a test asks for it."""

    def __init__(self, adapter: QueueAdapter) -> None:
        self.adapter = adapter
        self._came: asyncio.Queue[RawMessage] = asyncio.Queue()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.adapter.consume():
            self._came.put_nowait(message)

    async def one(self) -> RawMessage:
        """The next message. If the consumer fails, so does the test."""
        asking = asyncio.create_task(self._came.get())
        await asyncio.wait({asking, self.task}, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        if self.task.done():
            self.task.result()
            raise AssertionError("consume() has ended by itself")
        raise AssertionError(f"no message within {SOON_S} s")

    async def take(self, count: int) -> list[RawMessage]:
        return [await self.one() for _ in range(count)]

    async def handle(self, count: int) -> list[RawMessage]:
        """The next so many, each acknowledged."""
        taken = []
        for _ in range(count):
            message = await self.one()
            await self.adapter.ack(message)
            taken.append(message)
        return taken

    def waiting(self) -> list[RawMessage]:
        """What has come and was not asked for yet."""
        return [self._came.get_nowait() for _ in range(self._came.qsize())]

    async def quiet(self, for_s: float = QUIET_S) -> None:
        """Nothing comes."""
        with suppress(TimeoutError):
            message = await asyncio.wait_for(self._came.get(), for_s)
            raise AssertionError(f"nothing should come, but did: {message}")

    async def stop(self) -> None:
        """Close the consumer; `consume` ends."""
        await self.adapter.close()
        await asyncio.wait_for(self.task, SOON_S)


class BrokerRig:
    """One queue, and whoever writes to it and reads from it."""

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
        """One message for each number, of a key of its own."""
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
    """The bodies of each key, as they came."""
    came: defaultdict[str, list[bytes | None]] = defaultdict(list)
    for message in messages:
        came[message.key].append(message.body)
    return dict(came)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Come back once it holds; fail if it does not do so soon."""
    async with asyncio.timeout(SOON_S):
        while not await holds():  # noqa: ASYNC110  (what is asked for has no event)
            await asyncio.sleep(_LOOK_S)


async def equals(ask: Callable[[], Awaitable[Any]], value: Any) -> bool:
    return bool(await ask() == value)
