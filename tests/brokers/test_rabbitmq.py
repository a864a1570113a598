"""RabbitMQ behaves as the port says, on a real broker."""

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

from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter
from holdfast.brokers.rabbitmq import RabbitAdapter, RabbitPublisher
from holdfast.brokers.rabbitmq_connection import RabbitConfig
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.testing.contract.broker_harness import BrokerHarness, BrokerRig, equals, eventually
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract
from holdfast.verification.chaos.servers import free_port
from tests.brokers.rabbitmq_server import PASSWORD, STRANGER, USER, RabbitServer
from tests.certificates import make_certificates
from tests.servers import find_server
from tools.servers import RABBITMQ

Client = TypeVar("Client", bound=QueueAdapter | Publisher)


def connection_to(server: RabbitServer, **settings: Any) -> RabbitConfig:
    known = {"host": "127.0.0.1", "port": server.port, "user": USER, "password": PASSWORD, "timeout_s": 5}
    return RabbitConfig.model_validate(known | settings)


class RabbitHarness(BrokerHarness):
    secret = PASSWORD

    def __init__(self, server: RabbitServer) -> None:
        self.server = server
        self.direct: aio_pika.abc.AbstractConnection | None = None
        self._queues: list[str] = []
        self._clients: list[QueueAdapter | Publisher] = []

    def _made(self, client: Client) -> Client:
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
        return self._made(RabbitAdapter(connection_to(self.server), queue, group, prefetch=prefetch))

    def publisher(self) -> RabbitPublisher:
        return self._made(RabbitPublisher(connection_to(self.server)))

    def lost_adapter(self, queue: str) -> RabbitAdapter:
        return self._made(RabbitAdapter(connection_to(self.server, port=free_port()), queue, "readers"))

    def lost_publisher(self) -> RabbitPublisher:
        return self._made(RabbitPublisher(connection_to(self.server, port=free_port())))

    def refused_adapter(self, queue: str) -> RabbitAdapter:
        self.secret = "wrong-staple"
        return self._made(RabbitAdapter(connection_to(self.server, password=self.secret), queue, "readers"))

    async def write_plain(self, queue: str, *bodies: bytes) -> None:
        """As a writer does that gives no ids."""
        channel = await self.channel()
        underlay = await channel.get_underlay_channel()
        for body in bodies:
            # aiormq would invent an id: this is what it sends, without.
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
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A broker that this file's tests kill and bring back, one after the other."""
    server = RabbitServer(find_server(RABBITMQ), tmp_path_factory.mktemp("mortal") / "node")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
async def mortal(mortal_server: RabbitServer) -> AsyncIterator[RabbitHarness]:
    harness = RabbitHarness(mortal_server)
    yield harness
    await harness.close()


@pytest.fixture
async def harness(rabbitmq_server: RabbitServer) -> AsyncIterator[RabbitHarness]:
    harness = RabbitHarness(rabbitmq_server)
    yield harness
    await harness.close()


@pytest.fixture
async def bench(harness: RabbitHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(harness, await harness.new_queue())
    yield bench
    await bench.close()


class TestFaultContract(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, mortal: RabbitHarness) -> RabbitHarness:
        return mortal


@pytest.mark.faults
async def test_a_broker_killed_in_mid_batch_loses_nothing_that_it_confirmed(mortal: RabbitHarness) -> None:
    bench = BrokerRig(mortal, await mortal.new_queue())
    publisher = await bench.publisher()
    reader = await bench.reader(prefetch=50)
    confirmed: set[bytes | None] = set()
    handled: set[bytes | None] = set()
    half_way = asyncio.Event()

    async def write() -> None:
        for start in range(0, 2000, 100):
            batch = [bench.outgoing(b"%d" % number, key=f"key-{number % 20}") for number in range(start, start + 100)]
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
        await mortal.kill_broker()
        await mortal.start_broker()
    assert handled == confirmed == {b"%d" % number for number in range(2000)}
    await bench.close()


@pytest.mark.faults
async def test_publishing_to_a_broker_that_stands_still_comes_back_in_time(mortal: RabbitHarness) -> None:
    queue = await mortal.new_queue()
    publisher = RabbitPublisher(connection_to(mortal.server, timeout_s=1))
    await publisher.connect()
    mortal.server.pause()
    try:
        answers = await asyncio.wait_for(
            publisher.publish([OutgoingMessage(queue, b"1", {}), OutgoingMessage(queue, b"2", {})]), 5
        )
        assert [type(answer) for answer in answers] == [BrokerUnavailable] * 2
        assert not await publisher.health_check()
    finally:
        mortal.server.resume()
    assert await publisher.publish([OutgoingMessage(queue, b"3", {})]) == [None]
    await publisher.close()


async def test_tls_with_an_authority_of_ones_own(harness: RabbitHarness, tmp_path: Path) -> None:
    server = harness.server
    assert server.tls is not None
    queue = await harness.new_queue()
    secure = {"port": server.tls_port, "tls": True}
    trusting = connection_to(server, **secure, ca_file=str(server.tls.ca))
    publisher, adapter = RabbitPublisher(trusting), RabbitAdapter(trusting, queue, "readers")
    await publisher.connect()
    await adapter.connect()
    assert await publisher.publish([OutgoingMessage(queue, b"safe", {})]) == [None]
    assert (await anext(aiter(adapter.consume()))).body == b"safe"
    await publisher.close()
    await adapter.close()

    stranger = make_certificates(tmp_path)
    for settings in (secure, {**secure, "ca_file": str(stranger.ca)}, {**secure, "ca_file": "/no/such/file"}):
        with pytest.raises(BrokerRefused, match=r"ca_file|/no/such/file"):
            await RabbitPublisher(connection_to(server, **settings)).connect()
    careless = RabbitPublisher(connection_to(server, **secure, verify=False))
    await careless.connect()
    await careless.close()
    by_url = RabbitConfig.model_validate(
        {"url": f"amqps://{USER}:{PASSWORD}@localhost:{server.tls_port}/", "ca_file": str(server.tls.ca)}
    )
    named = RabbitPublisher(by_url)
    await named.connect()
    await named.close()


@pytest.mark.parametrize("how", ["url", "parts", "virtual host"])
async def test_wrong_credentials_are_told_and_never_shown(
    harness: RabbitHarness, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in list(logging.Logger.manager.loggerDict):
        caplog.set_level(logging.DEBUG, logger=name)
    secret = "pa:ss/w@rd wr%ng"
    port = harness.server.port
    ways: dict[str, dict[str, Any]] = {
        "url": {"url": f"amqp://{USER}:{quote(secret, safe='')}@127.0.0.1:{port}/"},
        "parts": {"host": "127.0.0.1", "port": port, "user": USER, "password": secret},
        "virtual host": {"host": "127.0.0.1", "port": port, "user": USER, "password": PASSWORD, "virtual_host": "no"},
    }
    connection = RabbitConfig.model_validate(ways[how])
    seen = [repr(connection), str(connection)]
    for client in (RabbitAdapter(connection, "queue", "readers"), RabbitPublisher(connection)):
        with pytest.raises(BrokerRefused) as caught:
            await client.connect()
        seen += [repr(client), "".join(traceback.format_exception(caught.value))]
        await client.close()
    text = "\n".join([*seen, caplog.text])
    assert f"127.0.0.1:{port}" in text
    for hidden in (secret, quote(secret, safe=""), quote(secret), PASSWORD):
        assert hidden not in text


async def test_who_has_no_right_to_the_queue_is_refused(harness: RabbitHarness) -> None:
    connection = connection_to(harness.server, user=STRANGER)
    adapter = RabbitAdapter(connection, await harness.new_queue(), "readers")
    await adapter.connect()
    with pytest.raises(BrokerRefused, match="access to queue"):
        await anext(aiter(adapter.consume()))
    await adapter.close()


async def test_a_missing_queue_is_made_unless_that_is_not_wanted(harness: RabbitHarness, namespace: str) -> None:
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
        # As it is there now, it is taken as it is.
        other = "classic" if queue_type == "quorum" else "quorum"
        adapter = RabbitAdapter(connection_to(harness.server, queue_type=other), name, "readers")
        await adapter.connect()
        await adapter.close()


async def test_deliveries_are_counted_by_a_quorum_queue(bench: BrokerRig) -> None:
    await bench.publish(b"one")
    reader = await bench.reader()
    for count in (1, 2, 3):
        message = await reader.one()
        assert (message.deliveries, message.metadata["redelivered"]) == (count, count > 1)
        await reader.adapter.nack(message, requeue=True)
    await reader.one()
    await reader.stop()
    again = await (await bench.reader()).one()
    assert again.deliveries == 5
    assert "x-delivery-count" not in again.headers


async def test_what_no_queue_takes_is_refused_and_the_rest_is_written(bench: BrokerRig, namespace: str) -> None:
    publisher = await bench.publisher()
    messages = [
        OutgoingMessage(namespace, b"nowhere", {}, "k", "same-id"),
        OutgoingMessage(namespace, b"nowhere either", {}, "k", "id-2"),
        # Another message with the id of one that comes back: the two are not mixed up.
        OutgoingMessage(bench.queue, b"somewhere", {}, "k", "same-id"),
        OutgoingMessage(namespace, b"nowhere, without key", {}),
    ]
    answers = await publisher.publish(messages)
    assert [type(answer) for answer in answers] == [BrokerRefused, BrokerRefused, type(None), BrokerRefused]
    assert namespace in str(answers[0])
    assert (await (await bench.reader()).one()).body == b"somewhere"


async def test_an_exchange_takes_the_topic_as_routing_key(
    bench: BrokerRig, harness: RabbitHarness, namespace: str
) -> None:
    channel = await harness.channel()
    exchange = await channel.declare_exchange(namespace, aio_pika.ExchangeType.TOPIC)
    await (await channel.get_queue(bench.queue)).bind(exchange, "orders.*")
    publisher = RabbitPublisher(connection_to(harness.server, exchange=namespace))
    await publisher.connect()
    answers = await publisher.publish(
        [OutgoingMessage("orders.paid", b"yes", {}), OutgoingMessage("letters", b"no", {})]
    )
    assert [type(answer) for answer in answers] == [type(None), BrokerRefused]
    message = await (await bench.reader()).one()
    assert (message.body, message.metadata["routing_key"]) == (b"yes", "orders.paid")
    await publisher.close()


async def test_what_the_protocol_cannot_carry_costs_nobody_a_connection(bench: BrokerRig) -> None:
    publisher = await bench.publisher()
    channel = publisher._channel  # type: ignore[attr-defined]
    bad = [
        OutgoingMessage(bench.queue, b"", {"x" * 256: "1"}),
        OutgoingMessage(bench.queue, b"", {"x": "1" * 200_000}),
        OutgoingMessage("q" * 256, b"", {}),
        OutgoingMessage(bench.queue, b"", {}, message_id="i" * 256),
        OutgoingMessage(bench.queue, bytes(17 * 1024 * 1024), {}),
    ]
    answers = await publisher.publish([*bad, bench.outgoing(b"good")])
    assert [type(answer) for answer in answers] == [BrokerRefused] * len(bad) + [type(None)]
    assert publisher._channel is channel  # type: ignore[attr-defined]


async def test_messages_of_other_writers_come_whatever_is_in_them(bench: BrokerRig, harness: RabbitHarness) -> None:
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
    await exchange.publish(aio_pika.Message(b"odd", headers=odd, content_type="text/plain"), bench.queue)
    message = await (await bench.reader()).one()
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


async def test_equal_messages_without_id_are_two_messages(bench: BrokerRig, harness: RabbitHarness) -> None:
    await harness.write_plain(bench.queue, b"tick", b"tick")
    reader = await bench.reader(prefetch=2)
    first = await reader.receive(2)
    assert len({message.message_id for message in first}) == 2
    for message in first:
        await reader.adapter.nack(message, requeue=True)
    # Nothing says which of the two it is: each delivery is a message of its own.
    again = await reader.receive(2)
    assert len({message.message_id for message in first + again}) == 4
    assert [message.deliveries for message in again] == [2, 2]


async def test_a_message_without_id_can_be_known_by_what_is_in_it(bench: BrokerRig, harness: RabbitHarness) -> None:
    await harness.write_plain(bench.queue, b"one", b"two", b"two")
    adapter = RabbitAdapter(connection_to(harness.server, without_id="digest"), bench.queue, "readers")
    await adapter.connect()
    reader = bench.read(adapter)
    one, two, equal = first = await reader.receive(3)
    assert one.message_id != two.message_id == equal.message_id
    for message in first:
        await adapter.nack(message, requeue=True)
    again = await reader.receive(3)
    assert sorted(message.message_id for message in again) == sorted(message.message_id for message in first)


async def test_the_key_may_have_another_header(bench: BrokerRig, harness: RabbitHarness) -> None:
    await bench.publish(b"one", Order_Id="7")
    adapter = RabbitAdapter(connection_to(harness.server, key_header="Order-Id"), bench.queue, "readers")
    await adapter.connect()
    assert (await bench.read(adapter).one()).key == "7"


async def test_a_queue_that_is_deleted_is_made_again(bench: BrokerRig, harness: RabbitHarness) -> None:
    reader = await bench.reader()
    await bench.publish(b"old")
    old = await reader.one()
    await (await harness.channel()).queue_delete(bench.queue)
    # Unroutable until the consumer has made the queue again.
    publisher = await bench.publisher()
    await eventually(lambda: equals(lambda: publisher.publish([bench.outgoing(b"new")]), [None]))
    assert (await reader.handle(1))[0].body == b"new"
    assert not reader.adapter.owns(old)
    await reader.adapter.ack(old)
    assert await reader.adapter.health_check()


async def test_a_paused_consumer_stays_connected_and_is_no_consumer(bench: BrokerRig, harness: RabbitHarness) -> None:
    reader = await bench.reader()
    await bench.publish(b"one")
    await reader.handle(1)
    await reader.adapter.pause()
    channel = await harness.channel()

    async def consumers() -> int | None:
        return (await channel.declare_queue(bench.queue, passive=True)).declaration_result.consumer_count

    # A quorum queue forgets a consumer once its acknowledgements are in.
    await eventually(lambda: equals(consumers, 0))
    assert await reader.adapter.health_check()
    await reader.adapter.resume()
    await eventually(lambda: equals(consumers, 1))


async def test_a_single_active_consumer_is_had_by_setting(harness: RabbitHarness, namespace: str) -> None:
    connection = connection_to(harness.server, single_active_consumer=True)
    bench = BrokerRig(harness, namespace)
    adapters = [RabbitAdapter(connection, namespace, "readers") for _ in range(2)]
    for adapter in adapters:
        await adapter.connect()
    first = bench.read(adapters[0])
    await bench.publish(b"one")
    await first.handle(1)
    second = bench.read(adapters[1])
    await bench.publish(b"two", b"three")
    await first.handle(2)
    await second.quiet()
    await bench.close()


def test_a_connection_says_what_is_wrong_with_it() -> None:
    for settings, wrong in (
        ({"url": "amqp://localhost", "host": "other"}, "remove host"),
        ({"url": "http://localhost"}, "amqp://user:password@host"),
        ({"key_file": "key.pem"}, "needs its cert_file"),
        ({"port": 0}, "port"),
        ({"hosts": "a"}, "hosts"),
    ):
        with pytest.raises(ValidationError, match=wrong):
            RabbitConfig.model_validate(settings)


async def test_a_message_that_may_be_no_larger_becomes_a_dead_letter(bench: BrokerRig, harness: RabbitHarness) -> None:
    """Even if it is larger than what we may publish, or has no room for its story."""
    channel = await harness.channel()
    large = aio_pika.Message(b"x" * 2_000, headers={"x-long": "h" * 99_000}, message_id="m")
    await channel.default_exchange.publish(large, bench.queue)
    adapter = harness._made(RabbitAdapter(connection_to(harness.server, max_message_bytes=1_000), bench.queue, "g"))
    await adapter.connect()
    await adapter.send_to_dlq(await bench.read(adapter).one(), "too bad", ["try 1"] * 100)
    letter = await (await bench.dead_letters()).one()
    assert (letter.body, letter.headers["x-long"]) == (b"x" * 2_000, "h" * 99_000)


@pytest.mark.parametrize("failure", [Exception(), asyncio.CancelledError()], ids=["bare", "cancelled"])
async def test_whatever_ends_a_reconnection_another_one_is_tried(
    bench: BrokerRig, harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """aiormq ends calls that are under way with either, when a connection goes."""
    reader = await bench.reader()
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
    await bench.publish(b"after")
    assert (await reader.one()).body == b"after"
    assert not failures
