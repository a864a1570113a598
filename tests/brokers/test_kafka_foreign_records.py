"""Records that no client library writes: the broker stores any bytes as the name of a header, and any timestamp.

They are written with the wire protocol itself, because librdkafka refuses such names.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Final

import pytest

from holdfast.brokers.port import UNREADABLE
from holdfast.testing.contract.broker_harness import BrokerRig
from tests.brokers.kafka_server import KafkaServer
from tests.brokers.test_kafka import KafkaHarness

#: API key and version of a Produce request.
_PRODUCE: Final = (0, 3)
_TIMEOUT_S: Final = 60
_POLYNOMIAL: Final = 0x82F63B78


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


@pytest.mark.parametrize("name", [b"\xff\xfe-x", b"\xed\xa0\x80", b"a\xc3"])
async def test_a_header_name_that_is_not_text_does_not_stop_the_consumer(
    harness: KafkaHarness, rig: BrokerRig, name: bytes
) -> None:
    """Neither the first time nor later, when Python has optimised the function that reads headers."""
    for _ in range(10):
        for body, headers in ((b"one", []), (b"two", [(name, b"1")]), (b"three", [(b"good", b"1")])):
            await asyncio.to_thread(_produce, harness.server.port, rig.queue, body, headers)
    reader = await rig.reader()
    messages = await reader.handle(30)
    assert [message.body for message in messages] == [b"one", b"two", b"three"] * 10
    assert [UNREADABLE in message.headers for message in messages] == [False, True, False] * 10
    assert messages[2].headers == {"good": "1"}


@pytest.mark.parametrize("at_ms", [2**62, -(2**62), 253_402_300_800_000])
async def test_an_impossible_timestamp_does_not_stop_the_consumer(
    harness: KafkaHarness, rig: BrokerRig, at_ms: int
) -> None:
    await asyncio.to_thread(_produce, harness.server.port, rig.queue, b"one", [], at_ms)
    reader = await rig.reader()
    (message,) = await reader.handle(1)
    assert message.body == b"one"
    assert 2000 < message.timestamp.year < 3000


def _produce(port: int, topic: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], at_ms: int = 0) -> None:
    """Write one record to partition 0."""
    batch = _batch(_record(body, headers), at_ms)
    request = (
        struct.pack(">hhih4shhii", *_PRODUCE, 1, 4, b"test", -1, -1, _TIMEOUT_S * 1000, 1)
        + struct.pack(">h", len(topic))
        + topic.encode()
        + struct.pack(">iii", 1, 0, len(batch))
        + batch
    )
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as replies:
            (size,) = struct.unpack(">i", replies.read(4))
            reply = replies.read(size)
    # Correlation id, number of topics, topic, number of partitions, partition, error.
    (error,) = struct.unpack_from(">h", reply, 4 + 4 + 2 + len(topic) + 4 + 4)
    assert error == 0, f"Kafka error {error}"


def _record(body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    parts = [b"\0", _varint(0), _varint(0), _varint(-1), _varint(len(body)), body, _varint(len(headers))]
    for name, value in headers:
        parts += [_varint(len(name)), name, _varint(len(value)), value]
    record = b"".join(parts)
    return _varint(len(record)) + record


def _batch(record: bytes, at_ms: int) -> bytes:
    """A record batch of format 2 with one record."""
    content = struct.pack(">hiqqqhii", 0, 0, at_ms, at_ms, -1, -1, -1, 1) + record
    head = struct.pack(">ibI", -1, 2, _crc32c(content))
    return struct.pack(">qi", 0, len(head) + len(content)) + head + content


def _varint(number: int) -> bytes:
    rest, encoded = (number << 1) ^ (number >> 63), bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*encoded, rest])


def _crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
