"""The Kafka client on a real broker: the broker contract, and behaviour specific to Kafka."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pydantic import ValidationError

from holdfast.brokers.factory import build_adapter, build_publisher
from holdfast.brokers.kafka import KafkaAdapter, KafkaConfig, KafkaPublisher
from holdfast.brokers.port import OutgoingMessage, RawMessage
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.testing.contract.broker_harness import SOON_S, BrokerHarness, BrokerRig, MessageReader, by_key, eventually
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract
from holdfast.verification.chaos.servers import free_port
from tests.brokers.kafka_server import SASL_PASSWORD, SASL_USER, KafkaServer
from tests.servers import find_server
from tools.servers import KAFKA

Client = TypeVar("Client", KafkaAdapter, KafkaPublisher)


class KafkaHarness(BrokerHarness):
    silence_s = 1.0
    tombstones = True
    secret = SASL_PASSWORD

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self._admin = AdminClient({"bootstrap.servers": server.address}, logger=logging.getLogger("test.kafka"))
        #: Timeouts of adapters created from now on.
        self.timeouts: dict[str, float] = {"session_timeout_s": 6.0}
        self._clients: list[KafkaAdapter | KafkaPublisher] = []

    def connection(self, **fields: Any) -> KafkaConfig:
        """Return a connection of the user with a password."""
        settings = {
            "bootstrap_servers": self.server.sasl_address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": SASL_USER,
            "sasl_password": SASL_PASSWORD,
            **self.timeouts,
            "publish_timeout_s": 3.0,
        }
        return KafkaConfig.model_validate(settings | fields)

    async def new_queue(self, partitions: int = 2, **options: str) -> str:
        name = f"topic-{secrets.token_hex(6)}"
        await self.create(name, partitions, **options)
        return name

    async def create(self, name: str, partitions: int = 1, **options: str) -> None:
        config = {key.replace("_", "."): value for key, value in options.items()}
        made = self._admin.create_topics([NewTopic(name, partitions, 1, config=config)])
        await asyncio.to_thread(made[name].result)

    def adapter(
        self, queue: str, *, group: str = "readers", prefetch: int = 10, connection: KafkaConfig | None = None
    ) -> KafkaAdapter:
        return self._keep(KafkaAdapter(connection or self.connection(), queue, f"{queue}-{group}", prefetch=prefetch))

    def publisher(self, connection: KafkaConfig | None = None) -> KafkaPublisher:
        return self._keep(KafkaPublisher(connection or self.connection()))

    def lost_adapter(self, queue: str) -> KafkaAdapter:
        return self.adapter(queue, connection=self._lost())

    def lost_publisher(self) -> KafkaPublisher:
        return self.publisher(self._lost())

    def refused_adapter(self, queue: str) -> KafkaAdapter:
        return self.adapter(queue, connection=self.connection(sasl_password=f"not-{SASL_PASSWORD}"))

    async def spoil_dead_letters(self, queue: str) -> bool:
        await self.create(self.dead_letters(queue), max_message_bytes="10")
        return True

    def impossible(self, topic: str, key: str) -> OutgoingMessage:
        return OutgoingMessage(topic, b"x" * 2_000_000, {}, key)

    async def kill_broker(self) -> None:
        """Wait for the commit of acknowledged offsets, which happens twice a second, then kill the server."""
        for adapter in self._clients:
            if isinstance(adapter, KafkaAdapter):
                await eventually(partial(self._has_committed, adapter))
        self.server.kill()

    async def _has_committed(self, adapter: KafkaAdapter) -> bool:
        done = adapter._offsets.done_up_to()
        committed_offsets = await asyncio.to_thread(self.committed, adapter._topic)
        return all(committed_offsets.get(partition) == offset for partition, offset in done.items())

    async def start_broker(self) -> None:
        # Not in a thread: the server ends with the thread that started it.
        self.server.start()

    async def write(self, queue: str, body: bytes | None, **fields: Any) -> None:
        """Write a message as another program does."""
        producer = Producer({"bootstrap.servers": self.server.address})
        producer.produce(queue, body, **fields)
        assert await asyncio.to_thread(producer.flush, SOON_S) == 0

    def topics(self) -> set[str]:
        return set(self._admin.list_topics(timeout=SOON_S).topics)

    def committed(self, queue: str, group: str = "readers") -> dict[int, int]:
        """Return the committed offsets of the group by partition."""
        consumer = Consumer({"bootstrap.servers": self.server.address, "group.id": f"{queue}-{group}"})
        try:
            positions = consumer.committed([TopicPartition(queue, number) for number in range(8)], timeout=SOON_S)
            return {position.partition: position.offset for position in positions if position.offset >= 0}
        finally:
            consumer.close()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def _lost(self) -> KafkaConfig:
        unused_address = f"127.0.0.1:{free_port()}"
        return self.connection(bootstrap_servers=unused_address, connect_timeout_s=1.0, publish_timeout_s=1.0)

    def _keep(self, client: Client) -> Client:
        self._clients.append(client)
        return client


@pytest.fixture
async def harness(kafka_server: KafkaServer) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.close()


@pytest.fixture
async def rig(harness: KafkaHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(harness, await harness.new_queue())
    yield rig
    await rig.close()


class TestKafka(BrokerContract):
    async def test_a_paused_consumer_keeps_its_messages(self, bench: BrokerRig) -> None:
        """With one partition: otherwise the group would assign one to the second consumer."""
        harness = bench.harness
        assert isinstance(harness, KafkaHarness)
        harness.timeouts = {"session_timeout_s": 2.0, "max_poll_interval_s": 2.0}
        bench.queue = await harness.new_queue(partitions=1)
        await super().test_a_paused_consumer_keeps_its_messages(bench)


# Offsets ------------------------------------------------------------------------------------------------


async def test_a_commit_never_passes_a_message_in_flight(harness: KafkaHarness) -> None:
    rig = BrokerRig(harness, await harness.new_queue(partitions=1))
    await rig.publish(*[b"%d" % number for number in range(10)])
    first = await rig.reader()
    delivered = await first.receive(10)
    for message in delivered:
        if message.body != b"3":
            await first.adapter.ack(message)
    await eventually(lambda: _is_committed(harness, rig.queue, {0: 3}))
    await first.stop()
    assert await _is_committed(harness, rig.queue, {0: 3})
    second = await rig.reader()
    redelivered = await second.receive(7)
    assert [message.body for message in redelivered] == [b"%d" % number for number in range(3, 10)]
    for message in reversed(redelivered):
        await second.adapter.ack(message)
    await eventually(lambda: _is_committed(harness, rig.queue, {0: 10}))
    await rig.close()


async def test_requeued_messages_are_delivered_in_order_before_all_others(harness: KafkaHarness) -> None:
    rig = BrokerRig(harness, await harness.new_queue(partitions=1))
    reader = await rig.reader(prefetch=5)
    await reader.adapter.pause()
    await rig.publish(*[b"%d" % number for number in range(6)], key="k")
    await reader.adapter.resume()
    delivered = await reader.receive(5)
    await reader.adapter.pause()
    await reader.adapter.nack(delivered[2], requeue=True)
    await reader.adapter.nack(delivered[1], requeue=True)
    await reader.adapter.ack(delivered[0])
    await reader.adapter.resume()
    redelivered = await reader.receive(3)
    assert [message.body for message in redelivered] == [b"1", b"2", b"5"]
    assert [message.deliveries for message in redelivered] == [2, 2, 1]
    # An acknowledgement of the first delivery has no effect.
    await reader.adapter.ack(delivered[1])
    assert reader.adapter.owns(redelivered[0])
    await rig.close()


# Rebalances ---------------------------------------------------------------------------------------------


class Handler:
    """Handles messages as a trigger does: in order per key, different keys concurrently."""

    def __init__(self, adapter: KafkaAdapter, handled: list[RawMessage]) -> None:
        self.adapter = adapter
        self.handled_count = 0
        self._handled = handled
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.adapter.consume():
            task = asyncio.create_task(self._handle(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: RawMessage) -> None:
        async with self._locks[message.key]:
            if self.adapter.owns(message):
                await asyncio.sleep(0.005)
                self._handled.append(message)
                self.handled_count += 1
                await self.adapter.ack(message)

    async def stop(self) -> None:
        """Stop as a trigger does: receive nothing new, finish messages in flight, then close."""
        await self.adapter.pause()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.adapter.close()
        await self._task


@pytest.mark.parametrize("assignment", ["cooperative-sticky", "range"])
async def test_rebalances_lose_and_repeat_no_message(harness: KafkaHarness, assignment: str) -> None:
    queue = await harness.new_queue(partitions=4)
    rig = BrokerRig(harness, queue)
    handled: list[RawMessage] = []
    connection = harness.connection(assignment=assignment)

    async def join() -> Handler:
        adapter = harness.adapter(queue, prefetch=50, connection=connection)
        await adapter.connect()
        return Handler(adapter, handled)

    async def publish() -> int:
        publisher, sent = await rig.publisher(), 0
        while not stop_publishing.is_set():
            batch = [rig.outgoing(b"%d" % number, key=f"key-{number % 40}") for number in range(sent, sent + 40)]
            assert await publisher.publish(batch) == [None] * 40
            sent += 40
            await asyncio.sleep(0.02)
        return sent

    stop_publishing = asyncio.Event()
    publishing = asyncio.create_task(publish())
    first = await join()
    await _until(lambda: first.handled_count > 100)
    second = await join()
    await _until(lambda: second.handled_count > 100)
    await first.stop()
    reached = second.handled_count
    await _until(lambda: second.handled_count > reached + 200)
    stop_publishing.set()
    sent = await publishing
    await _until(lambda: len(handled) >= sent)
    await second.stop()
    assert by_key(handled) == {f"key-{key}": [b"%d" % number for number in range(key, sent, 40)] for key in range(40)}
    await rig.close()


async def test_a_revocation_waits_for_messages_being_handled(harness: KafkaHarness) -> None:
    rig = BrokerRig(harness, await harness.new_queue(partitions=2))
    keys = await _keys_of_two_partitions(rig)
    first = await rig.reader()
    for key in keys:
        await rig.publish(b"started", b"waits", key=key)
    started: dict[str, RawMessage] = {}
    waiting: dict[str, RawMessage] = {}
    for message in await first.receive(4):
        (started if message.body == b"started" else waiting)[message.key] = message
    assert all(first.adapter.owns(message) for message in started.values())
    second = await rig.reader()
    revoked: list[str] = []

    async def one_is_revoked() -> bool:
        revoked[:] = [key for key, message in waiting.items() if not first.adapter.owns(message)]
        return bool(revoked)

    await eventually(one_is_revoked)
    (key,) = revoked
    # If the revocation had not waited, this acknowledgement would be too late.
    await first.adapter.ack(started[key])
    message = await second.one()
    assert (message.key, message.body) == (key, b"waits")
    await second.adapter.ack(message)
    await second.quiet()
    await first.adapter.ack(waiting[key])
    assert second.adapter.owns(message) is False
    await rig.close()


async def test_a_consumer_at_its_prefetch_limit_stays_in_its_group(harness: KafkaHarness) -> None:
    harness.timeouts = {"session_timeout_s": 1.5, "max_poll_interval_s": 1.5}
    rig = BrokerRig(harness, await harness.new_queue(partitions=1))
    await rig.publish(b"slow", b"next")
    full = await rig.reader(prefetch=1)
    slow = await full.one()
    other = await rig.reader()
    await other.quiet(3.0)
    assert full.adapter.owns(slow)
    await full.adapter.ack(slow)
    assert (await full.one()).body == b"next"
    await rig.close()


# Messages -----------------------------------------------------------------------------------------------


async def test_unusual_messages_of_other_producers_are_delivered(harness: KafkaHarness) -> None:
    queue = await harness.new_queue(partitions=1)
    await harness.write(
        queue, None, key=b"\xff\xfe", headers=[("X-Odd", b"\xe9"), ("x-none", None), ("x-odd", b"last")]
    )
    await harness.write(queue, b"body", key=b"", headers=None)
    reader = MessageReader(await _connected(harness.adapter(queue)))
    tombstone, plain = await reader.receive(2)
    assert (tombstone.body, tombstone.key, tombstone.headers) == (None, "\xff\xfe", {"x-odd": "last", "x-none": ""})
    assert tombstone.message_id == f"{queue}-0-0"
    assert {name: tombstone.metadata[name] for name in ("topic", "partition", "offset")} == {
        "topic": queue,
        "partition": 0,
        "offset": 0,
    }
    assert (plain.body, plain.key, plain.headers) == (b"body", "", {})
    await reader.stop()


async def test_a_refused_message_stops_only_its_key(harness: KafkaHarness) -> None:
    """Too large for the broker, not for its client: the broker refuses the whole batch while others are in flight."""
    rig = BrokerRig(harness, await harness.new_queue(partitions=1, max_message_bytes="150000"))
    publisher = harness.publisher(harness.connection(publish_timeout_s=15.0))
    sent = [rig.outgoing(b"%d " % number + b"x" * 1_000, key=f"key-{number % 4}") for number in range(400)]
    sent[21] = rig.outgoing(b"x" * 200_000, key="key-1")
    answers = await publisher.publish(sent)
    failed = [index for index, answer in enumerate(answers) if answer is not None]
    assert failed == list(range(21, 400, 4))
    assert all(isinstance(answers[index], BrokerRefused) for index in (21, 25))
    reader = await rig.reader(prefetch=100)
    received: dict[str, list[bytes | None]] = {f"key-{key}": [] for key in range(4)}
    expected = [message for message, answer in zip(sent, answers, strict=True) if answer is None]
    while len({(key, body) for key, bodies in received.items() for body in bodies}) < len(expected):
        message = (await reader.handle(1))[0]
        received[message.key].append(message.body)
    # At least once, in order.
    assert {key: list(dict.fromkeys(bodies)) for key, bodies in received.items()} == group_by_key(expected)
    assert await publisher.publish([rig.outgoing(b"later", key="key-1")]) == [None]
    assert [message.body for message in await reader.handle(1)] == [b"later"]
    await rig.close()


def group_by_key(messages: list[OutgoingMessage]) -> dict[str, list[bytes | None]]:
    bodies: defaultdict[str, list[bytes | None]] = defaultdict(list)
    for message in messages:
        bodies[message.key].append(message.body)
    return dict(bodies)


# Connecting ---------------------------------------------------------------------------------------------


async def test_a_missing_topic_is_reported_and_not_created(harness: KafkaHarness) -> None:
    with pytest.raises(BrokerRefused, match="topic 'nowhere-to-be-found' not found"):
        await harness.adapter("nowhere-to-be-found").connect()
    assert "nowhere-to-be-found" not in await asyncio.to_thread(harness.topics)


async def test_a_wrong_password_is_not_logged_at_any_level(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = harness.connection(sasl_password="guessed-secret")
    for client in (harness.adapter(await harness.new_queue(), connection=wrong), harness.publisher(wrong)):
        with pytest.raises(BrokerRefused, match="Authentication failed") as caught:
            await client.connect()
        assert "guessed-secret" not in f"{caught.value!r} {client!r} {wrong!r}"
        await client.close()
    captured = capfd.readouterr()
    assert "guessed-secret" not in caplog.text + captured.out + captured.err
    # librdkafka itself would write to standard error.
    assert captured.err == ""


def test_settings_are_validated() -> None:
    for wrong in (
        {},
        {"bootstrap_servers": ""},
        {"bootstrap_servers": "k:9092", "bootstrap": "k"},
        {"bootstrap_servers": "k:9092", "security_protocol": "SASL_SSL", "sasl_username": "u"},
        {"bootstrap_servers": "k:9092", "max_poll_interval_s": 5},
    ):
        with pytest.raises(ValidationError):
            KafkaConfig.model_validate(wrong)


async def test_the_factory_builds_both_clients(harness: KafkaHarness) -> None:
    connection = {"bootstrap_servers": harness.server.address}
    publisher = build_publisher("kafka", connection)
    adapter = build_adapter("kafka", connection, await harness.new_queue(), "g", 5, dlq_name="elsewhere")
    for client in (publisher, adapter):
        await client.connect()
        assert await client.health_check()
        await client.close()


async def test_an_unreadable_certificate_is_refused(harness: KafkaHarness) -> None:
    lost = harness.connection(security_protocol="SSL", ca_file="/nowhere/ca.pem")
    for client in (harness.adapter("any", connection=lost), harness.publisher(lost)):
        with pytest.raises(BrokerRefused, match="settings"):
            await client.connect()


# Faults -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killable_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A broker that tests kill, pause and restart."""
    server = KafkaServer(find_server(KAFKA), tmp_path_factory.mktemp("kafka") / "mortal")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
async def killable(killable_server: KafkaServer) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(killable_server)
    yield harness
    killable_server.resume()
    await harness.close()


class TestKafkaFaults(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, killable: KafkaHarness) -> KafkaHarness:
        # The broker is back before the session timeout of its members.
        killable.timeouts = {"session_timeout_s": 20.0}
        return killable


@pytest.mark.faults
async def test_a_broker_killed_during_a_batch_loses_nothing(killable: KafkaHarness) -> None:
    """The outage is longer than the session timeout, so the consumer has to rejoin the group."""
    killable.timeouts = {"session_timeout_s": 2.0}
    rig = BrokerRig(killable, await killable.new_queue(partitions=4))
    publisher = await rig.publisher()
    sent = [rig.outgoing(b"%d" % number, key=f"key-{number % 20}") for number in range(2_000)]
    assert await publisher.publish(sent) == [None] * 2_000
    handled: list[RawMessage] = []
    adapter = killable.adapter(rig.queue, prefetch=50)
    await adapter.connect()
    handler = Handler(adapter, handled)
    await _until(lambda: len(handled) > 500)
    killable.server.kill()
    await killable.start_broker()
    await _until(lambda: len({message.body for message in handled}) == 2_000)
    await handler.stop()
    received = {key: list(dict.fromkeys(bodies)) for key, bodies in by_key(handled).items()}
    assert received == {f"key-{key}": [b"%d" % number for number in range(key, 2_000, 20)] for key in range(20)}
    await rig.close()


@pytest.mark.faults
async def test_calls_to_a_paused_broker_time_out(killable: KafkaHarness) -> None:
    """It accepts connections and does not respond."""
    # The group waits this long for the first reader, which may be closing its consumer when the broker responds again.
    killable.timeouts["max_poll_interval_s"] = killable.timeouts["session_timeout_s"]
    rig = BrokerRig(killable, await killable.new_queue(partitions=1))
    await rig.publish(b"one")
    publisher = await rig.publisher()
    reader = await rig.reader()
    await reader.one()
    killable.server.pause()
    started_at = monotonic()
    impatient = killable.connection(connect_timeout_s=1.0)
    for client in (killable.adapter(rig.queue, connection=impatient), killable.publisher(impatient)):
        with pytest.raises(BrokerUnavailable):
            await client.connect()
    assert not await reader.adapter.health_check()
    assert await reader.adapter.lag() is None
    answers = await publisher.publish([rig.outgoing(b"two")])
    assert isinstance(answers[0], BrokerUnavailable)
    await reader.stop()
    assert monotonic() - started_at < 30
    killable.server.resume()
    second = await rig.reader()
    assert (await second.one()).body == b"one"
    await rig.close()


# ----------------------------------------------------------------------------------------------------------


async def _is_committed(harness: KafkaHarness, queue: str, offsets: dict[int, int]) -> bool:
    return await asyncio.to_thread(harness.committed, queue) == offsets


async def _until(condition: Callable[[], bool]) -> None:
    async def check() -> bool:
        return condition()

    await eventually(check)


async def _connected(adapter: KafkaAdapter) -> KafkaAdapter:
    await adapter.connect()
    return adapter


async def _keys_of_two_partitions(rig: BrokerRig) -> list[str]:
    """Return two keys of different partitions. The queue is empty afterwards."""
    names = [f"key-{number}" for number in range(20)]
    for name in names:
        await rig.publish(b"where", key=name)
    reader = await rig.reader(prefetch=100)
    by_partition = {message.metadata["partition"]: message.key for message in await reader.handle(len(names))}
    await reader.stop()
    return list(by_partition.values())


async def test_closing_does_not_wait_for_an_unreachable_broker() -> None:
    """Once `close` returns, messages of a cancelled call must not be written any more."""
    unused_address = f"127.0.0.1:{free_port()}"
    publisher = KafkaPublisher(KafkaConfig(bootstrap_servers=unused_address, publish_timeout_s=20))
    publishing = asyncio.create_task(publisher.publish([OutgoingMessage("t", b"x", {}, "k", "1")]))
    await asyncio.sleep(0.3)
    started_at = monotonic()
    await publisher.close()
    assert monotonic() - started_at < 5
    (answer,) = await publishing
    assert isinstance(answer, BrokerUnavailable)


async def test_a_message_at_the_size_limit_becomes_a_dead_letter(harness: KafkaHarness) -> None:
    """Even if it is larger than the publish limit. Without its history if that does not fit."""
    limit = "2000000"
    queue = await harness.new_queue(1, max_message_bytes=limit)
    await harness.create(harness.dead_letters(queue), max_message_bytes=limit)
    body = b"x" * 1_999_900
    producer = Producer({"bootstrap.servers": harness.server.address, "message.max.bytes": 3_000_000})
    producer.produce(queue, body)
    assert await asyncio.to_thread(producer.flush, SOON_S) == 0
    adapter = harness.adapter(queue)
    await adapter.connect()
    reader = MessageReader(adapter)
    await adapter.send_to_dlq(await reader.one(), "too bad", ["try 1"] * 100)
    dead_letters = harness.adapter(harness.dead_letters(queue))
    await dead_letters.connect()
    dead_letter_reader = MessageReader(dead_letters)
    assert (await dead_letter_reader.one()).body == body
    await dead_letter_reader.stop()
    await reader.stop()
