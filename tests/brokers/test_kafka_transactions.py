"""Kafka transactions: the committed offset passes markers and aborted messages, never a message in flight."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from holdfast.testing.contract.broker_harness import SOON_S, BrokerRig, eventually
from tests.brokers.kafka_server import KafkaServer
from tests.brokers.test_kafka import KafkaHarness


@pytest.fixture
async def harness(kafka_server: KafkaServer) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.close()


@pytest.fixture
async def rig(harness: KafkaHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(harness, await harness.new_queue(partitions=1))
    yield rig
    await rig.close()


async def test_the_committed_offset_passes_the_marker_of_a_transaction(harness: KafkaHarness, rig: BrokerRig) -> None:
    """External monitors compute lag as log end minus committed offset."""
    reader = await rig.reader()
    await _transaction(harness, rig.queue, [b"one", b"two"])
    assert [message.body for message in await reader.handle(2)] == [b"one", b"two"]
    assert await _log_end(harness, rig.queue) == 3
    await eventually(partial(_is_committed, harness, rig.queue, 3))


async def test_the_committed_offset_passes_an_aborted_transaction(harness: KafkaHarness, rig: BrokerRig) -> None:
    reader = await rig.reader()
    await _transaction(harness, rig.queue, [b"kept"])
    await reader.handle(1)
    await _transaction(harness, rig.queue, [b"aborted", b"aborted, too"], commit=False)
    assert await _log_end(harness, rig.queue) == 5
    await eventually(partial(_is_committed, harness, rig.queue, 5))
    await reader.quiet()


async def test_a_marker_is_not_passed_before_the_message_in_front_of_it(harness: KafkaHarness, rig: BrokerRig) -> None:
    reader = await rig.reader()
    await _transaction(harness, rig.queue, [b"in flight", b"done"])
    in_flight, done = await reader.receive(2)
    await reader.adapter.ack(done)
    # Once the message arrives, the consumer has read the next transaction.
    await _transaction(harness, rig.queue, [b"later"])
    await reader.handle(1)
    await reader.stop()
    assert await _committed(harness, rig.queue) in (None, 0)
    successor = await rig.reader()
    assert [message.body for message in await successor.handle(3)] == [b"in flight", b"done", b"later"]
    await eventually(partial(_is_committed, harness, rig.queue, 5))
    assert in_flight.body == b"in flight"


async def test_a_marker_without_a_message_behind_it_is_passed(harness: KafkaHarness, rig: BrokerRig) -> None:
    """State left by an earlier version: the committed offset points to the marker, and no message follows."""
    await _transaction(harness, rig.queue, [b"one"])
    await _commit(harness, rig.queue, 1)
    reader = await rig.reader()
    await eventually(partial(_is_committed, harness, rig.queue, 2))
    await reader.quiet()


async def test_a_reassigned_partition_is_committed_from_its_new_position(harness: KafkaHarness, rig: BrokerRig) -> None:
    """The client may still have its earlier position, which does not belong to the new assignment."""
    await _transaction(harness, rig.queue, [b"one", b"two"])
    reader = await rig.reader()
    await reader.receive(2)
    # The next member gets the only partition, including the unsettled messages.
    await reader.stop()
    successor = await rig.reader()
    (first,) = await successor.receive(1)
    assert first.body == b"one"
    await successor.stop()
    assert await _committed(harness, rig.queue) in (None, 0)


async def _transaction(harness: KafkaHarness, queue: str, bodies: Sequence[bytes], *, commit: bool = True) -> None:
    def write() -> None:
        settings = {"bootstrap.servers": harness.server.address, "transactional.id": secrets.token_hex(6)}
        producer = Producer(settings)
        producer.init_transactions(SOON_S)
        producer.begin_transaction()
        for body in bodies:
            producer.produce(queue, body, partition=0)
        assert producer.flush(SOON_S) == 0
        (producer.commit_transaction if commit else producer.abort_transaction)(SOON_S)

    await asyncio.to_thread(write)


async def _log_end(harness: KafkaHarness, queue: str) -> int:
    def read() -> int:
        consumer = Consumer({"bootstrap.servers": harness.server.address, "group.id": "monitor"})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(queue, 0), timeout=SOON_S)[1])
        finally:
            consumer.close()

    return await asyncio.to_thread(read)


async def _commit(harness: KafkaHarness, queue: str, offset: int) -> None:
    def commit() -> None:
        consumer = Consumer({"bootstrap.servers": harness.server.address, "group.id": f"{queue}-readers"})
        try:
            consumer.commit(offsets=[TopicPartition(queue, 0, offset)], asynchronous=False)
        finally:
            consumer.close()

    await asyncio.to_thread(commit)


async def _committed(harness: KafkaHarness, queue: str) -> int | None:
    return (await asyncio.to_thread(harness.committed, queue)).get(0)


async def _is_committed(harness: KafkaHarness, queue: str, offset: int) -> bool:
    return await _committed(harness, queue) == offset
