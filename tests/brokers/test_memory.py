"""The in-memory broker fulfils the broker contract and simulates outages on request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Thread

import pytest

from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MemoryPublisher, MockQueueAdapter
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

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10) -> MockQueueAdapter:
        return MockQueueAdapter(MemoryConfig(name=self._name), queue, group, prefetch=prefetch)

    def publisher(self) -> MemoryPublisher:
        return MemoryPublisher(MemoryConfig(name=self._name))

    def lost_adapter(self, queue: str) -> MockQueueAdapter:
        return MockQueueAdapter(MemoryConfig(name=f"{self._name}-lost"), queue, "readers")

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

    def reset(self) -> None:
        MemoryBroker.reset(self._name)
        MemoryBroker.reset(f"{self._name}-lost")


@pytest.fixture
def harness(namespace: str) -> Iterator[MemoryHarness]:
    harness = MemoryHarness(namespace)
    yield harness
    harness.reset()


class TestMemory(BrokerContract):
    pass


class TestMemoryFaults(BrokerFaultContract):
    pass


@pytest.fixture
async def rig(harness: MemoryHarness) -> BrokerRig:
    return BrokerRig(harness, await harness.new_queue())


async def test_messages_of_a_lost_connection_are_redelivered_and_counted(
    rig: BrokerRig, harness: MemoryHarness
) -> None:
    await rig.publish(b"one")
    reader = await rig.reader()
    first = await reader.one()
    harness.broker.lose_connections()
    assert not reader.adapter.owns(first)
    redelivered = await reader.one()
    assert (redelivered.message_id, redelivered.deliveries) == (first.message_id, 2)
    await rig.close()


async def test_a_key_in_flight_is_not_delivered_to_another_consumer(rig: BrokerRig) -> None:
    for number in range(3):
        await rig.publish(b"%d" % number, key="k")
    first = await rig.reader(prefetch=1)
    await first.one()
    second = await rig.reader(prefetch=5)
    await second.quiet(0.1)
    await first.stop()
    assert [message.body for message in await second.handle(3)] == [b"0", b"1", b"2"]
    await rig.close()


async def test_every_group_gets_every_message(rig: BrokerRig, harness: MemoryHarness) -> None:
    harness.broker.write(rig.queue, b"one", {"X-Note": "n"})
    for group in ("a", "b"):
        message = (await (await rig.reader(group=group)).handle(1))[0]
        assert (message.body, message.headers) == (b"one", {"x-note": "n"})
    assert [message.body for message in harness.broker.messages(rig.queue)] == [b"one"]
    await rig.close()


async def test_a_message_from_another_thread_wakes_a_consumer(rig: BrokerRig, harness: MemoryHarness) -> None:
    reader = await rig.reader()
    await reader.quiet(0.01)
    thread = Thread(target=harness.broker.write, args=(rig.queue, b"from afar"))
    thread.start()
    assert (await reader.one()).body == b"from afar"
    await asyncio.to_thread(thread.join)
    await rig.close()


def test_a_name_identifies_one_broker() -> None:
    assert MemoryBroker.named("same") is MemoryBroker.named("same")
    MemoryBroker.reset("same")
