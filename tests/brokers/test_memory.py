"""The broker inside of the process behaves as the port says, and badly on request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Thread

import pytest

from holdfast.brokers.memory import MemoryAdapter, MemoryBroker, MemoryConfig, MemoryPublisher
from holdfast.brokers.port import OutgoingMessage
from holdfast.testing.contract.broker_harness import BrokerHarness, BrokerRig
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract


class MemoryHarness(BrokerHarness):
    tombstones = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues = 0
        self.broker = MemoryBroker.named(name)
        MemoryBroker.named(f"{name}-lost").down = True

    async def new_queue(self) -> str:
        self._queues += 1
        return f"queue-{self._queues}"

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10) -> MemoryAdapter:
        return MemoryAdapter(MemoryConfig(name=self._name), queue, group, prefetch=prefetch)

    def publisher(self) -> MemoryPublisher:
        return MemoryPublisher(MemoryConfig(name=self._name))

    def lost_adapter(self, queue: str) -> MemoryAdapter:
        return MemoryAdapter(MemoryConfig(name=f"{self._name}-lost"), queue, "readers")

    def lost_publisher(self) -> MemoryPublisher:
        return MemoryPublisher(MemoryConfig(name=f"{self._name}-lost"))

    async def spoil_dead_letters(self, queue: str) -> bool:
        self.broker.refuse = lambda message: message.topic == self.dead_letters(queue)
        return True

    def impossible(self, topic: str, key: str) -> OutgoingMessage:
        self.broker.refuse = lambda message: message.body == b"impossible"
        return OutgoingMessage(topic, b"impossible", {}, key)

    async def kill_broker(self) -> None:
        self.broker.down = True
        self.broker.lose_connections()

    async def start_broker(self) -> None:
        self.broker.down = False

    def forget(self) -> None:
        MemoryBroker.reset(self._name)
        MemoryBroker.reset(f"{self._name}-lost")


@pytest.fixture
def harness(namespace: str) -> Iterator[MemoryHarness]:
    harness = MemoryHarness(namespace)
    yield harness
    harness.forget()


class TestMemory(BrokerContract):
    pass


class TestMemoryFaults(BrokerFaultContract):
    pass


@pytest.fixture
async def bench(harness: MemoryHarness) -> BrokerRig:
    return BrokerRig(harness, await harness.new_queue())


async def test_what_a_lost_connection_had_is_delivered_again_and_counted(
    bench: BrokerRig, harness: MemoryHarness
) -> None:
    await bench.publish(b"one")
    reader = await bench.reader()
    first = await reader.one()
    harness.broker.lose_connections()
    assert not reader.adapter.owns(first)
    again = await reader.one()
    assert (again.message_id, again.deliveries) == (first.message_id, 2)
    await bench.close()


async def test_a_key_in_hand_is_left_to_its_consumer(bench: BrokerRig) -> None:
    for number in range(3):
        await bench.publish(b"%d" % number, key="k")
    first = await bench.reader(prefetch=1)
    await first.one()
    second = await bench.reader(prefetch=5)
    await second.quiet(0.1)
    await first.stop()
    assert [message.body for message in await second.handle(3)] == [b"0", b"1", b"2"]
    await bench.close()


async def test_every_group_gets_every_message(bench: BrokerRig, harness: MemoryHarness) -> None:
    harness.broker.write(bench.queue, b"one", {"X-Note": "n"})
    for group in ("a", "b"):
        message = (await (await bench.reader(group=group)).handle(1))[0]
        assert (message.body, message.headers) == (b"one", {"x-note": "n"})
    assert [message.body for message in harness.broker.messages(bench.queue)] == [b"one"]
    await bench.close()


async def test_a_message_from_another_thread_wakes_a_consumer(bench: BrokerRig, harness: MemoryHarness) -> None:
    reader = await bench.reader()
    await reader.quiet(0.01)
    thread = Thread(target=harness.broker.write, args=(bench.queue, b"from afar"))
    thread.start()
    assert (await reader.one()).body == b"from afar"
    await asyncio.to_thread(thread.join)
    await bench.close()


def test_a_name_is_one_broker() -> None:
    assert MemoryBroker.named("same") is MemoryBroker.named("same")
    MemoryBroker.reset("same")
