"""The RabbitMQ client fulfils the broker contract, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aio_pika
import pytest
from aiormq import spec
from aiormq.abc import ChannelFrame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pydantic import ValidationError

from holdfast.brokers.port import UNREADABLE, OutgoingMessage, Publisher, QueueAdapter
from holdfast.brokers.rabbitmq import RabbitAdapter, RabbitPublisher
from holdfast.brokers.rabbitmq_connection import RabbitConfig
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.testing.contract.broker_harness import BrokerHarness, BrokerRig, equals, eventually
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract
from holdfast.triggers.envelope import MessageEnvelope, ParseError, parse_json
from holdfast.verification.chaos.servers import free_port
from tests.brokers.rabbitmq_server import PASSWORD, STRANGER, USER, RabbitServer
from tests.certificates import make_certificates
from tests.servers import find_server
from tools.servers import RABBITMQ

Client = TypeVar("Client", bound=QueueAdapter | Publisher)


def connection_to(server: RabbitServer, **settings: Any) -> RabbitConfig:
    defaults = {"host": "127.0.0.1", "port": server.port, "user": USER, "password": PASSWORD, "timeout_s": 5}
    return RabbitConfig.model_validate(defaults | settings)


class RabbitHarness(BrokerHarness):
    secret = PASSWORD

    def __init__(self, server: RabbitServer) -> None:
        self.server = server
        self.direct: aio_pika.abc.AbstractConnection | None = None
        self._queues: list[str] = []
        self._clients: list[QueueAdapter | Publisher] = []

    def _keep(self, client: Client) -> Client:
        self._clients.append(client)
        return client

    async def channel(self) -> aio_pika.abc.AbstractChannel:
        if self.direct is None:
            self.direct = await aio_pika.connect(self.server.url)
        return await self.direct.channel()

    async def new_queue(self) -> str:
        name = f"queue-{secrets.token_hex(6)}"
        await (await self.channel()).declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        self._queues.append(name)
        return name

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10) -> RabbitAdapter:
        return self._keep(RabbitAdapter(connection_to(self.server), queue, group, prefetch=prefetch))

    def publisher(self) -> RabbitPublisher:
        return self._keep(RabbitPublisher(connection_to(self.server)))

    def lost_adapter(self, queue: str) -> RabbitAdapter:
        return self._keep(RabbitAdapter(connection_to(self.server, port=free_port()), queue, "readers"))

    def lost_publisher(self) -> RabbitPublisher:
        return self._keep(RabbitPublisher(connection_to(self.server, port=free_port())))

    def refused_adapter(self, queue: str) -> RabbitAdapter:
        self.secret = "wrong-staple"
        return self._keep(RabbitAdapter(connection_to(self.server, password=self.secret), queue, "readers"))

    async def write_plain(self, queue: str, *bodies: bytes) -> None:
        """Write messages without ids, as some producers do."""
        channel = await self.channel()
        underlay = await channel.get_underlay_channel()
        for body in bodies:
            # aiormq would add an id: these are the frames that it sends, without the id.
            header = ContentHeader(0, len(body), spec.Basic.Properties())
            frames: list[Any] = [spec.Basic.Publish(routing_key=queue), header, ContentBody(body)]
            await underlay.connection.write_queue.put(ChannelFrame.marshall(underlay.number, frames))
        await channel.get_queue(queue)

    async def spoil_dead_letters(self, queue: str) -> bool:
        full: dict[str, Any] = {"x-max-length": 0, "x-overflow": "reject-publish"}
        await (await self.channel()).declare_queue(self.dead_letters(queue), durable=True, arguments=full)
        return True

    def impossible(self, topic: str, key: str) -> OutgoingMessage:
        return OutgoingMessage(topic, b"impossible", {"x" * 256: "too long a name"}, key, "event-impossible")

    async def kill_broker(self) -> None:
        for queue in self._queues:
            await asyncio.to_thread(self.server.wait_for_register, queue)
        self.server.kill()

    async def start_broker(self) -> None:
        # Not in another thread: the server ends with the thread that starts it.
        self.server.start()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self.direct is not None:
            await self.direct.close()


class TestContract(BrokerContract):
    @pytest.fixture
    async def harness(self, rabbitmq_server: RabbitServer) -> AsyncIterator[RabbitHarness]:
        harness = RabbitHarness(rabbitmq_server)
        yield harness
        await harness.close()


@pytest.fixture(scope="module")
def killable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A broker that the tests of this file kill and restart."""
    server = RabbitServer(find_server(RABBITMQ), tmp_path_factory.mktemp("mortal") / "node")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
async def killable(killable_server: RabbitServer) -> AsyncIterator[RabbitHarness]:
    harness = RabbitHarness(killable_server)
    yield harness
    await harness.close()


@pytest.fixture
async def harness(rabbitmq_server: RabbitServer) -> AsyncIterator[RabbitHarness]:
    harness = RabbitHarness(rabbitmq_server)
    yield harness
    await harness.close()


@pytest.fixture
async def rig(harness: RabbitHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(harness, await harness.new_queue())
    yield rig
    await rig.close()


class TestFaultContract(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, killable: RabbitHarness) -> RabbitHarness:
        return killable


@pytest.mark.faults
async def test_a_broker_killed_during_a_batch_loses_no_confirmed_message(killable: RabbitHarness) -> None:
    rig = BrokerRig(killable, await killable.new_queue())
    publisher = await rig.publisher()
    reader = await rig.reader(prefetch=50)
    confirmed: set[bytes | None] = set()
    handled: set[bytes | None] = set()
    half_way = asyncio.Event()

    async def write() -> None:
        for start in range(0, 2000, 100):
            batch = [rig.outgoing(b"%d" % number, key=f"key-{number % 20}") for number in range(start, start + 100)]
            while batch:
                answers = await publisher.publish(batch)
                confirmed.update(message.body for message, answer in zip(batch, answers, strict=True) if answer is None)
                batch = [message for message, answer in zip(batch, answers, strict=True) if answer is not None]

    async def read() -> None:
        while len(handled) < 2000:
            message = await reader.one()
            if reader.adapter.owns(message):
                handled.add(message.body)
                await reader.adapter.ack(message)
            if len(handled) >= 700:
                half_way.set()

    async with asyncio.timeout(45), asyncio.TaskGroup() as work:
        work.create_task(write())
        work.create_task(read())
        await half_way.wait()
        await killable.kill_broker()
        await killable.start_broker()
    assert handled == confirmed == {b"%d" % number for number in range(2000)}
    await rig.close()


@pytest.mark.faults
async def test_publishing_to_a_paused_broker_times_out(killable: RabbitHarness) -> None:
    queue = await killable.new_queue()
    publisher = RabbitPublisher(connection_to(killable.server, timeout_s=1))
    await publisher.connect()
    killable.server.pause()
    try:
        answers = await asyncio.wait_for(
            publisher.publish([OutgoingMessage(queue, b"1", {}), OutgoingMessage(queue, b"2", {})]), 5
        )
        assert [type(answer) for answer in answers] == [BrokerUnavailable] * 2
        assert not await publisher.health_check()
    finally:
        killable.server.resume()
    assert await publisher.publish([OutgoingMessage(queue, b"3", {})]) == [None]
    await publisher.close()


async def test_tls_with_a_private_certificate_authority(harness: RabbitHarness, tmp_path: Path) -> None:
    server = harness.server
    assert server.tls is not None
    queue = await harness.new_queue()
    secure = {"port": server.tls_port, "tls": True}
    trusted = connection_to(server, **secure, ca_file=str(server.tls.ca))
    publisher, adapter = RabbitPublisher(trusted), RabbitAdapter(trusted, queue, "readers")
    await publisher.connect()
    await adapter.connect()
    assert await publisher.publish([OutgoingMessage(queue, b"safe", {})]) == [None]
    assert (await anext(aiter(adapter.consume()))).body == b"safe"
    await publisher.close()
    await adapter.close()

    foreign = make_certificates(tmp_path)
    for settings in (secure, {**secure, "ca_file": str(foreign.ca)}, {**secure, "ca_file": "/no/such/file"}):
        with pytest.raises(BrokerRefused, match=r"ca_file|/no/such/file"):
            await RabbitPublisher(connection_to(server, **settings)).connect()
    unverified = RabbitPublisher(connection_to(server, **secure, verify=False))
    await unverified.connect()
    await unverified.close()
    by_url = RabbitConfig.model_validate(
        {"url": f"amqps://{USER}:{PASSWORD}@localhost:{server.tls_port}/", "ca_file": str(server.tls.ca)}
    )
    named = RabbitPublisher(by_url)
    await named.connect()
    await named.close()


@pytest.mark.parametrize("kind", ["url", "parts", "virtual host"])
async def test_wrong_credentials_are_refused_and_never_shown(
    harness: RabbitHarness, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in list(logging.Logger.manager.loggerDict):
        caplog.set_level(logging.DEBUG, logger=name)
    secret = "pa:ss/w@rd wr%ng"
    port = harness.server.port
    settings_by_kind: dict[str, dict[str, Any]] = {
        "url": {"url": f"amqp://{USER}:{quote(secret, safe='')}@127.0.0.1:{port}/"},
        "parts": {"host": "127.0.0.1", "port": port, "user": USER, "password": secret},
        "virtual host": {"host": "127.0.0.1", "port": port, "user": USER, "password": PASSWORD, "virtual_host": "no"},
    }
    connection = RabbitConfig.model_validate(settings_by_kind[kind])
    shown = [repr(connection), str(connection)]
    for client in (RabbitAdapter(connection, "queue", "readers"), RabbitPublisher(connection)):
        with pytest.raises(BrokerRefused) as caught:
            await client.connect()
        shown += [repr(client), "".join(traceback.format_exception(caught.value))]
        await client.close()
    text = "\n".join([*shown, caplog.text])
    assert f"127.0.0.1:{port}" in text
    for hidden in (secret, quote(secret, safe=""), quote(secret), PASSWORD):
        assert hidden not in text


async def test_a_user_without_permission_for_the_queue_is_refused(harness: RabbitHarness) -> None:
    connection = connection_to(harness.server, user=STRANGER)
    adapter = RabbitAdapter(connection, await harness.new_queue(), "readers")
    await adapter.connect()
    with pytest.raises(BrokerRefused, match="access to queue"):
        await anext(aiter(adapter.consume()))
    await adapter.close()


async def test_a_missing_queue_is_declared_unless_disabled(harness: RabbitHarness, namespace: str) -> None:
    for queue_type in ("quorum", "classic"):
        name = f"{namespace}-{queue_type}"
        adapter = RabbitAdapter(connection_to(harness.server, declare=False), name, "readers")
        with pytest.raises(BrokerRefused, match=name):
            await adapter.connect()
        adapter = RabbitAdapter(connection_to(harness.server, queue_type=queue_type), name, "readers")
        await adapter.connect()
        await adapter.close()
        # The broker refuses to declare it as anything else.
        await (await harness.channel()).declare_queue(name, durable=True, arguments={"x-queue-type": queue_type})
        # An existing queue is used as it is.
        other = "classic" if queue_type == "quorum" else "quorum"
        adapter = RabbitAdapter(connection_to(harness.server, queue_type=other), name, "readers")
        await adapter.connect()
        await adapter.close()


async def test_deliveries_are_counted_by_a_quorum_queue(rig: BrokerRig) -> None:
    await rig.publish(b"one")
    reader = await rig.reader()
    for count in (1, 2, 3):
        message = await reader.one()
        assert (message.deliveries, message.metadata["redelivered"]) == (count, count > 1)
        await reader.adapter.nack(message, requeue=True)
    await reader.one()
    await reader.stop()
    redelivered = await (await rig.reader()).one()
    assert redelivered.deliveries == 5
    assert "x-delivery-count" not in redelivered.headers


async def test_unroutable_messages_are_refused_and_the_others_are_written(rig: BrokerRig, namespace: str) -> None:
    publisher = await rig.publisher()
    messages = [
        OutgoingMessage(namespace, b"nowhere", {}, "k", "same-id"),
        OutgoingMessage(namespace, b"nowhere either", {}, "k", "id-2"),
        # The same id as a returned message: the two must not be confused.
        OutgoingMessage(rig.queue, b"somewhere", {}, "k", "same-id"),
        OutgoingMessage(namespace, b"nowhere, without key", {}),
    ]
    answers = await publisher.publish(messages)
    assert [type(answer) for answer in answers] == [BrokerRefused, BrokerRefused, type(None), BrokerRefused]
    assert namespace in str(answers[0])
    assert (await (await rig.reader()).one()).body == b"somewhere"


async def test_an_exchange_takes_the_topic_as_routing_key(
    rig: BrokerRig, harness: RabbitHarness, namespace: str
) -> None:
    channel = await harness.channel()
    exchange = await channel.declare_exchange(namespace, aio_pika.ExchangeType.TOPIC)
    await (await channel.get_queue(rig.queue)).bind(exchange, "orders.*")
    publisher = RabbitPublisher(connection_to(harness.server, exchange=namespace))
    await publisher.connect()
    answers = await publisher.publish([OutgoingMessage("orders.paid", b"yes", {}), OutgoingMessage("other", b"no", {})])
    assert [type(answer) for answer in answers] == [type(None), BrokerRefused]
    message = await (await rig.reader()).one()
    assert (message.body, message.metadata["routing_key"]) == (b"yes", "orders.paid")
    await publisher.close()


async def test_messages_that_amqp_cannot_encode_do_not_close_the_connection(rig: BrokerRig) -> None:
    publisher = await rig.publisher()
    channel = publisher._channel  # type: ignore[attr-defined]
    bad = [
        OutgoingMessage(rig.queue, b"", {"x" * 256: "1"}),
        OutgoingMessage(rig.queue, b"", {"x": "1" * 200_000}),
        OutgoingMessage("q" * 256, b"", {}),
        OutgoingMessage(rig.queue, b"", {}, message_id="i" * 256),
        OutgoingMessage(rig.queue, bytes(17 * 1024 * 1024), {}),
    ]
    answers = await publisher.publish([*bad, rig.outgoing(b"good")])
    assert [type(answer) for answer in answers] == [BrokerRefused] * len(bad) + [type(None)]
    assert publisher._channel is channel  # type: ignore[attr-defined]


async def test_unusual_headers_of_other_producers_are_converted(rig: BrokerRig, harness: RabbitHarness) -> None:
    odd: dict[str, Any] = {
        "Number": 7,
        "truth": True,
        "none": None,
        "bytes": bytearray(b"\xff\x00"),
        "list": [1, "zwei"],
        "table": {"a": 1},
        "when": datetime(2026, 1, 2, tzinfo=UTC),
    }
    exchange = (await harness.channel()).default_exchange
    await exchange.publish(aio_pika.Message(b"odd", headers=odd, content_type="text/plain"), rig.queue)
    message = await (await rig.reader()).one()
    assert message.headers == {
        "number": "7",
        "truth": "true",
        "none": "null",
        "bytes": "\ufffd\0",
        "list": '[1, "zwei"]',
        "table": '{"a": 1}',
        "when": "2026-01-02T00:00:00+00:00",
        "content-type": "text/plain",
    }
    assert (message.body, message.key, message.deliveries) == (b"odd", "", 1)


async def test_equal_messages_without_id_are_two_messages(rig: BrokerRig, harness: RabbitHarness) -> None:
    await harness.write_plain(rig.queue, b"tick", b"tick")
    reader = await rig.reader(prefetch=2)
    first = await reader.receive(2)
    assert len({message.message_id for message in first}) == 2
    for message in first:
        await reader.adapter.nack(message, requeue=True)
    # Nothing identifies the two: each delivery is a separate message.
    redelivered = await reader.receive(2)
    assert len({message.message_id for message in first + redelivered}) == 4
    assert [message.deliveries for message in redelivered] == [2, 2]


async def test_a_message_without_id_can_be_identified_by_its_digest(rig: BrokerRig, harness: RabbitHarness) -> None:
    await harness.write_plain(rig.queue, b"one", b"two", b"two")
    adapter = RabbitAdapter(connection_to(harness.server, without_id="digest"), rig.queue, "readers")
    await adapter.connect()
    reader = rig.read(adapter)
    one, two, equal = first = await reader.receive(3)
    assert one.message_id != two.message_id == equal.message_id
    for message in first:
        await adapter.nack(message, requeue=True)
    redelivered = await reader.receive(3)
    assert sorted(message.message_id for message in redelivered) == sorted(message.message_id for message in first)


async def test_the_key_header_is_configurable(rig: BrokerRig, harness: RabbitHarness) -> None:
    await rig.publish(b"one", Order_Id="7")
    adapter = RabbitAdapter(connection_to(harness.server, key_header="Order-Id"), rig.queue, "readers")
    await adapter.connect()
    assert (await rig.read(adapter).one()).key == "7"


async def test_a_deleted_queue_is_declared_again(rig: BrokerRig, harness: RabbitHarness) -> None:
    reader = await rig.reader()
    await rig.publish(b"old")
    old = await reader.one()
    await (await harness.channel()).queue_delete(rig.queue)
    # Unroutable until the consumer has declared the queue again.
    publisher = await rig.publisher()
    await eventually(lambda: equals(lambda: publisher.publish([rig.outgoing(b"new")]), [None]))
    assert (await reader.handle(1))[0].body == b"new"
    assert not reader.adapter.owns(old)
    await reader.adapter.ack(old)
    assert await reader.adapter.health_check()


async def test_a_paused_consumer_is_cancelled_and_stays_connected(rig: BrokerRig, harness: RabbitHarness) -> None:
    reader = await rig.reader()
    await rig.publish(b"one")
    await reader.handle(1)
    await reader.adapter.pause()
    channel = await harness.channel()

    async def consumers() -> int | None:
        return (await channel.declare_queue(rig.queue, passive=True)).declaration_result.consumer_count

    # A quorum queue removes a consumer once its acknowledgements have arrived.
    await eventually(lambda: equals(consumers, 0))
    assert await reader.adapter.health_check()
    await reader.adapter.resume()
    await eventually(lambda: equals(consumers, 1))


async def test_single_active_consumer_is_a_setting(harness: RabbitHarness, namespace: str) -> None:
    connection = connection_to(harness.server, single_active_consumer=True)
    rig = BrokerRig(harness, namespace)
    adapters = [RabbitAdapter(connection, namespace, "readers") for _ in range(2)]
    for adapter in adapters:
        await adapter.connect()
    first = rig.read(adapters[0])
    await rig.publish(b"one")
    await first.handle(1)
    second = rig.read(adapters[1])
    await rig.publish(b"two", b"three")
    await first.handle(2)
    await second.quiet()
    await rig.close()


def test_invalid_connection_settings_are_named() -> None:
    for settings, message in (
        ({"url": "amqp://localhost", "host": "other"}, "remove host"),
        ({"url": "http://localhost"}, "amqp://user:password@host"),
        ({"key_file": "key.pem"}, "needs its cert_file"),
        ({"port": 0}, "port"),
        ({"hosts": "a"}, "hosts"),
    ):
        with pytest.raises(ValidationError, match=message):
            RabbitConfig.model_validate(settings)


async def test_a_message_at_the_size_limit_becomes_a_dead_letter(rig: BrokerRig, harness: RabbitHarness) -> None:
    """Even if it is larger than the publish limit, or its history does not fit."""
    channel = await harness.channel()
    large = aio_pika.Message(b"x" * 2_000, headers={"x-long": "h" * 99_000}, message_id="m")
    await channel.default_exchange.publish(large, rig.queue)
    adapter = harness._keep(RabbitAdapter(connection_to(harness.server, max_message_bytes=1_000), rig.queue, "g"))
    await adapter.connect()
    await adapter.send_to_dlq(await rig.read(adapter).one(), "too bad", ["try 1"] * 100)
    dead_letter = await (await rig.dead_letters()).one()
    assert (dead_letter.body, dead_letter.headers["x-long"]) == (b"x" * 2_000, "h" * 99_000)


@pytest.mark.parametrize("failure", [Exception(), asyncio.CancelledError()], ids=["bare", "cancelled"])
async def test_a_reconnection_that_fails_is_repeated(
    rig: BrokerRig, harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """aiormq ends pending calls with either when a connection is lost."""
    reader = await rig.reader()
    adapter = reader.adapter
    assert isinstance(adapter, RabbitAdapter)
    assert adapter._link is not None
    find, failures = adapter._find, [failure]

    async def flaky(*args: Any) -> None:
        if failures:
            raise failures.pop()
        await find(*args)

    monkeypatch.setattr(adapter, "_find", flaky)
    adapter._link.fail(ConnectionError("gone"))
    await rig.publish(b"after")
    assert (await reader.one()).body == b"after"
    assert not failures


class _RawProperties(spec.Basic.Properties):
    """Properties as another client encodes them."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self.encoded = encoded

    def marshal(self) -> bytes:
        return self.encoded


#: Flags, then values: a timestamp beyond the calendar, and a header whose name is not UTF-8.
UNREADABLE_PROPERTIES = {
    "timestamp": b"\x00\x40" + b"\xff" * 8,
    "header name": b"\x20\x00" + b"\x00\x00\x00\x04" + b"\x02\xff\xfeV",
}


@pytest.mark.parametrize("encoded", UNREADABLE_PROPERTIES.values(), ids=UNREADABLE_PROPERTIES.keys())
async def test_properties_that_cannot_be_decoded_do_not_stop_the_consumer(
    harness: RabbitHarness, encoded: bytes
) -> None:
    """The message is delivered once, marked; it is not delivered again after each reconnection."""
    queue = await harness.new_queue()
    adapter = harness.adapter(queue)
    await adapter.connect()
    channel = await harness.channel()
    underlay = await channel.get_underlay_channel()
    await underlay.basic_publish(b"1", routing_key=queue, properties=_RawProperties(encoded))
    await underlay.basic_publish(b"2", routing_key=queue, properties=spec.Basic.Properties(message_id="good"))
    received = []
    async with asyncio.timeout(20):
        async for message in adapter.consume():
            await adapter.ack(message)
            received.append(message)
            if len(received) == 2:
                break
    assert [message.body for message in received] == [b"1", b"2"]
    assert [UNREADABLE in message.headers for message in received] == [True, False]
    assert [message.deliveries for message in received] == [1, 1]
    with pytest.raises(ParseError, match="cannot be decoded"):
        MessageEnvelope.from_raw(received[0], queue, parse_json)
