"""Kafka's transactions on a real broker: markers and aborted messages are passed, and never a message in flight."""

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
async def bench(harness: KafkaHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(harness, await harness.new_queue(partitions=1))
    yield bench
    await bench.close()


async def test_the_committed_offset_passes_the_marker_of_a_transaction(harness: KafkaHarness, bench: BrokerRig) -> None:
    """External monitors compute lag as log end minus committed offset."""
    reader = await bench.reader()
    await _transaction(harness, bench.queue, [b"one", b"two"])
    assert [message.body for message in await reader.handle(2)] == [b"one", b"two"]
    assert await _log_end(harness, bench.queue) == 3
    await eventually(partial(_is_committed, harness, bench.queue, 3))


async def test_the_committed_offset_passes_an_aborted_transaction(harness: KafkaHarness, bench: BrokerRig) -> None:
    reader = await bench.reader()
    await _transaction(harness, bench.queue, [b"kept"])
    await reader.handle(1)
    await _transaction(harness, bench.queue, [b"aborted", b"aborted, too"], commit=False)
    assert await _log_end(harness, bench.queue) == 5
    await eventually(partial(_is_committed, harness, bench.queue, 5))
    await reader.quiet()


async def test_a_marker_is_not_passed_before_the_message_in_front_of_it(
    harness: KafkaHarness, bench: BrokerRig
) -> None:
    reader = await bench.reader()
    await _transaction(harness, bench.queue, [b"in flight", b"done"])
    in_flight, done = await reader.receive(2)
    await reader.adapter.ack(done)
    # The next transaction has been read when its message has come.
    await _transaction(harness, bench.queue, [b"later"])
    await reader.handle(1)
    await reader.stop()
    assert await _committed(harness, bench.queue) in (None, 0)
    again = await bench.reader()
    assert [message.body for message in await again.handle(3)] == [b"in flight", b"done", b"later"]
    await eventually(partial(_is_committed, harness, bench.queue, 5))
    assert in_flight.body == b"in flight"


async def test_a_marker_that_is_all_that_is_left_is_passed(harness: KafkaHarness, bench: BrokerRig) -> None:
    """As an earlier version left it: the committed offset points to the marker, and no message follows."""
    await _transaction(harness, bench.queue, [b"one"])
    await _commit(harness, bench.queue, 1)
    reader = await bench.reader()
    await eventually(partial(_is_committed, harness, bench.queue, 2))
    await reader.quiet()


async def test_a_partition_that_comes_back_is_committed_from_where_it_is(
    harness: KafkaHarness, bench: BrokerRig
) -> None:
    """The client may remember how far it was before: that position is not this assignment's."""
    await _transaction(harness, bench.queue, [b"one", b"two"])
    reader = await bench.reader()
    await reader.receive(2)
    # The only partition goes to the member that stays, unsettled messages and all.
    await reader.stop()
    again = await bench.reader()
    (first,) = await again.receive(1)
    assert first.body == b"one"
    await again.stop()
    assert await _committed(harness, bench.queue) in (None, 0)


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
    def ask() -> int:
        consumer = Consumer({"bootstrap.servers": harness.server.address, "group.id": "monitor"})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(queue, 0), timeout=SOON_S)[1])
        finally:
            consumer.close()

    return await asyncio.to_thread(ask)


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
