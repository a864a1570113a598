"""The client of Kafka on a real broker: the contract, and what is Kafka's own."""

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
        #: Of the adapters that are made from now on.
        self.patience: dict[str, float] = {"session_timeout_s": 6.0}
        self._closers: list[KafkaAdapter | KafkaPublisher] = []

    def connection(self, **fields: Any) -> KafkaConfig:
        """As a user with a password."""
        settings = {
            "bootstrap_servers": self.server.sasl_address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": SASL_USER,
            "sasl_password": SASL_PASSWORD,
            **self.patience,
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
        return self._kept(KafkaAdapter(connection or self.connection(), queue, f"{queue}-{group}", prefetch=prefetch))

    def publisher(self, connection: KafkaConfig | None = None) -> KafkaPublisher:
        return self._kept(KafkaPublisher(connection or self.connection()))

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
        """Not before it has noted what is acknowledged: it does so twice a second, and what came since comes again."""
        for adapter in self._closers:
            if isinstance(adapter, KafkaAdapter):
                await eventually(partial(self._has_noted, adapter))
        self.server.kill()

    async def _has_noted(self, adapter: KafkaAdapter) -> bool:
        done = adapter._offsets.done_up_to()
        noted = await asyncio.to_thread(self.committed, adapter._topic)
        return all(noted.get(partition) == offset for partition, offset in done.items())

    async def start_broker(self) -> None:
        # Not in a thread: the server goes with the thread that started it.
        self.server.start()

    async def write(self, queue: str, body: bytes | None, **fields: Any) -> None:
        """As some other program does."""
        producer = Producer({"bootstrap.servers": self.server.address})
        producer.produce(queue, body, **fields)
        assert await asyncio.to_thread(producer.flush, SOON_S) == 0

    def topics(self) -> set[str]:
        return set(self._admin.list_topics(timeout=SOON_S).topics)

    def committed(self, queue: str, group: str = "readers") -> dict[int, int]:
        """What the broker has noted for the group: partition → offset."""
        asking = Consumer({"bootstrap.servers": self.server.address, "group.id": f"{queue}-{group}"})
        try:
            places = asking.committed([TopicPartition(queue, number) for number in range(8)], timeout=SOON_S)
            return {place.partition: place.offset for place in places if place.offset >= 0}
        finally:
            asking.close()

    async def close(self) -> None:
        for client in self._closers:
            await client.close()

    def _lost(self) -> KafkaConfig:
        nowhere = f"127.0.0.1:{free_port()}"
        return self.connection(bootstrap_servers=nowhere, connect_timeout_s=1.0, publish_timeout_s=1.0)

    def _kept(self, client: Client) -> Client:
        self._closers.append(client)
        return client


@pytest.fixture
async def harness(kafka_server: KafkaServer) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.close()


@pytest.fixture
async def bench(harness: KafkaHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(harness, await harness.new_queue())
    yield bench
    await bench.close()


class TestKafka(BrokerContract):
    async def test_a_paused_consumer_keeps_its_messages(self, bench: BrokerRig) -> None:
        """One partition, so that the group has no reason to give it to the second one."""
        harness = bench.harness
        assert isinstance(harness, KafkaHarness)
        harness.patience = {"session_timeout_s": 2.0, "max_poll_interval_s": 2.0}
        bench.queue = await harness.new_queue(partitions=1)
        await super().test_a_paused_consumer_keeps_its_messages(bench)


# Offsets ------------------------------------------------------------------------------------------------


async def test_a_commit_never_passes_a_message_in_hand(harness: KafkaHarness) -> None:
    bench = BrokerRig(harness, await harness.new_queue(partitions=1))
    await bench.publish(*[b"%d" % number for number in range(10)])
    first = await bench.reader()
    taken = await first.receive(10)
    for message in taken:
        if message.body != b"3":
            await first.adapter.ack(message)
    await eventually(lambda: _is(harness, bench.queue, {0: 3}))
    await first.stop()
    assert await _is(harness, bench.queue, {0: 3})
    second = await bench.reader()
    again = await second.receive(7)
    assert [message.body for message in again] == [b"%d" % number for number in range(3, 10)]
    for message in reversed(again):
        await second.adapter.ack(message)
    await eventually(lambda: _is(harness, bench.queue, {0: 10}))
    await bench.close()


async def test_requeued_messages_come_in_order_before_all_others(harness: KafkaHarness) -> None:
    bench = BrokerRig(harness, await harness.new_queue(partitions=1))
    reader = await bench.reader(prefetch=5)
    await reader.adapter.pause()
    await bench.publish(*[b"%d" % number for number in range(6)], key="k")
    await reader.adapter.resume()
    taken = await reader.receive(5)
    await reader.adapter.pause()
    await reader.adapter.nack(taken[2], requeue=True)
    await reader.adapter.nack(taken[1], requeue=True)
    await reader.adapter.ack(taken[0])
    await reader.adapter.resume()
    again = await reader.receive(3)
    assert [message.body for message in again] == [b"1", b"2", b"5"]
    assert [message.deliveries for message in again] == [2, 2, 1]
    # The first delivery counts no more.
    await reader.adapter.ack(taken[1])
    assert reader.adapter.owns(again[0])
    await bench.close()


# Rebalances ---------------------------------------------------------------------------------------------


class Handler:
    """Handles messages as a trigger does: one key's one after the other, different keys at the same time."""

    def __init__(self, adapter: KafkaAdapter, handled: list[RawMessage]) -> None:
        self.adapter = adapter
        self.mine = 0
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
                self.mine += 1
                await self.adapter.ack(message)

    async def stop(self) -> None:
        """As a trigger does: nothing new, what is in hand to its end, then close."""
        await self.adapter.pause()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.adapter.close()
        await self._task


@pytest.mark.parametrize("assignment", ["cooperative-sticky", "range"])
async def test_members_come_and_go_and_nothing_is_lost_or_repeated(harness: KafkaHarness, assignment: str) -> None:
    queue = await harness.new_queue(partitions=4)
    bench = BrokerRig(harness, queue)
    handled: list[RawMessage] = []
    connection = harness.connection(assignment=assignment)

    async def join() -> Handler:
        adapter = harness.adapter(queue, prefetch=50, connection=connection)
        await adapter.connect()
        return Handler(adapter, handled)

    async def publish() -> int:
        publisher, sent = await bench.publisher(), 0
        while not enough.is_set():
            batch = [bench.outgoing(b"%d" % number, key=f"key-{number % 40}") for number in range(sent, sent + 40)]
            assert await publisher.publish(batch) == [None] * 40
            sent += 40
            await asyncio.sleep(0.02)
        return sent

    enough = asyncio.Event()
    publishing = asyncio.create_task(publish())
    first = await join()
    await _until(lambda: first.mine > 100)
    second = await join()
    await _until(lambda: second.mine > 100)
    await first.stop()
    reached = second.mine
    await _until(lambda: second.mine > reached + 200)
    enough.set()
    sent = await publishing
    await _until(lambda: len(handled) >= sent)
    await second.stop()
    assert by_key(handled) == {f"key-{key}": [b"%d" % number for number in range(key, sent, 40)] for key in range(40)}
    await bench.close()


async def test_a_partition_that_leaves_waits_for_what_is_being_handed_over(harness: KafkaHarness) -> None:
    bench = BrokerRig(harness, await harness.new_queue(partitions=2))
    keys = await _keys_of_two_partitions(bench)
    first = await bench.reader()
    for key in keys:
        await bench.publish(b"begun", b"waits", key=key)
    begun: dict[str, RawMessage] = {}
    waiting: dict[str, RawMessage] = {}
    for message in await first.receive(4):
        (begun if message.body == b"begun" else waiting)[message.key] = message
    assert all(first.adapter.owns(message) for message in begun.values())
    second = await bench.reader()
    leaving: list[str] = []

    async def one_leaves() -> bool:
        leaving[:] = [key for key, message in waiting.items() if not first.adapter.owns(message)]
        return bool(leaving)

    await eventually(one_leaves)
    (key,) = leaving
    # Had the partition not waited, this would come too late.
    await first.adapter.ack(begun[key])
    message = await second.one()
    assert (message.key, message.body) == (key, b"waits")
    await second.adapter.ack(message)
    await second.quiet()
    await first.adapter.ack(waiting[key])
    assert second.adapter.owns(message) is False
    await bench.close()


async def test_a_consumer_that_is_full_stays_in_its_group(harness: KafkaHarness) -> None:
    harness.patience = {"session_timeout_s": 1.5, "max_poll_interval_s": 1.5}
    bench = BrokerRig(harness, await harness.new_queue(partitions=1))
    await bench.publish(b"slow", b"next")
    full = await bench.reader(prefetch=1)
    slow = await full.one()
    other = await bench.reader()
    await other.quiet(3.0)
    assert full.adapter.owns(slow)
    await full.adapter.ack(slow)
    assert (await full.one()).body == b"next"
    await bench.close()


# Messages -----------------------------------------------------------------------------------------------


async def test_odd_messages_of_other_writers_come_through(harness: KafkaHarness) -> None:
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


async def test_a_message_that_the_broker_refuses_stops_its_key_alone(harness: KafkaHarness) -> None:
    """Too large for the broker, not for its client: what was sent with it is refused, too, and more is under way."""
    bench = BrokerRig(harness, await harness.new_queue(partitions=1, max_message_bytes="150000"))
    publisher = harness.publisher(harness.connection(publish_timeout_s=15.0))
    sent = [bench.outgoing(b"%d " % number + b"x" * 1_000, key=f"key-{number % 4}") for number in range(400)]
    sent[21] = bench.outgoing(b"x" * 200_000, key="key-1")
    answers = await publisher.publish(sent)
    failed = [index for index, answer in enumerate(answers) if answer is not None]
    assert failed == list(range(21, 400, 4))
    assert all(isinstance(answers[index], BrokerRefused) for index in (21, 25))
    reader = await bench.reader(prefetch=100)
    came: dict[str, list[bytes | None]] = {f"key-{key}": [] for key in range(4)}
    wanted = [message for message, answer in zip(sent, answers, strict=True) if answer is None]
    while len({(key, body) for key, bodies in came.items() for body in bodies}) < len(wanted):
        message = (await reader.handle(1))[0]
        came[message.key].append(message.body)
    # At least once, in order.
    assert {key: list(dict.fromkeys(bodies)) for key, bodies in came.items()} == by_key_of(wanted)
    assert await publisher.publish([bench.outgoing(b"later", key="key-1")]) == [None]
    assert [message.body for message in await reader.handle(1)] == [b"later"]
    await bench.close()


def by_key_of(messages: list[OutgoingMessage]) -> dict[str, list[bytes | None]]:
    bodies: defaultdict[str, list[bytes | None]] = defaultdict(list)
    for message in messages:
        bodies[message.key].append(message.body)
    return dict(bodies)


# Connecting ---------------------------------------------------------------------------------------------


async def test_a_topic_that_is_not_there_is_named_and_not_made(harness: KafkaHarness) -> None:
    with pytest.raises(BrokerRefused, match="topic 'nowhere-to-be-found' not found"):
        await harness.adapter("nowhere-to-be-found").connect()
    assert "nowhere-to-be-found" not in await asyncio.to_thread(harness.topics)


async def test_a_wrong_password_leaves_no_trace_at_any_level(
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


def test_settings_are_checked() -> None:
    for wrong in (
        {},
        {"bootstrap_servers": ""},
        {"bootstrap_servers": "k:9092", "bootstrap": "k"},
        {"bootstrap_servers": "k:9092", "security_protocol": "SASL_SSL", "sasl_username": "u"},
        {"bootstrap_servers": "k:9092", "max_poll_interval_s": 5},
    ):
        with pytest.raises(ValidationError):
            KafkaConfig.model_validate(wrong)


async def test_the_factory_knows_it(harness: KafkaHarness) -> None:
    connection = {"bootstrap_servers": harness.server.address}
    publisher = build_publisher("kafka", connection)
    adapter = build_adapter("kafka", connection, await harness.new_queue(), "g", 5, dlq_name="elsewhere")
    for client in (publisher, adapter):
        await client.connect()
        assert await client.health_check()
        await client.close()


async def test_a_certificate_that_cannot_be_read_is_told(harness: KafkaHarness) -> None:
    lost = harness.connection(security_protocol="SSL", ca_file="/nowhere/ca.pem")
    for client in (harness.adapter("any", connection=lost), harness.publisher(lost)):
        with pytest.raises(BrokerRefused, match="settings"):
            await client.connect()


# Faults -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal_kafka(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that these tests kill, stop and start again."""
    server = KafkaServer(find_server(KAFKA), tmp_path_factory.mktemp("kafka") / "mortal")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
async def mortal(mortal_kafka: KafkaServer) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(mortal_kafka)
    yield harness
    mortal_kafka.resume()
    await harness.close()


class TestKafkaFaults(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, mortal: KafkaHarness) -> KafkaHarness:
        # The broker is back before it would have given its members up.
        mortal.patience = {"session_timeout_s": 20.0}
        return mortal


@pytest.mark.faults
async def test_a_broker_that_dies_in_mid_batch_loses_nothing(mortal: KafkaHarness) -> None:
    """It is away for so long that the group has given us up when it is back."""
    mortal.patience = {"session_timeout_s": 2.0}
    bench = BrokerRig(mortal, await mortal.new_queue(partitions=4))
    publisher = await bench.publisher()
    sent = [bench.outgoing(b"%d" % number, key=f"key-{number % 20}") for number in range(2_000)]
    assert await publisher.publish(sent) == [None] * 2_000
    handled: list[RawMessage] = []
    adapter = mortal.adapter(bench.queue, prefetch=50)
    await adapter.connect()
    handler = Handler(adapter, handled)
    await _until(lambda: len(handled) > 500)
    mortal.server.kill()
    await mortal.start_broker()
    await _until(lambda: len({message.body for message in handled}) == 2_000)
    await handler.stop()
    came = {key: list(dict.fromkeys(bodies)) for key, bodies in by_key(handled).items()}
    assert came == {f"key-{key}": [b"%d" % number for number in range(key, 2_000, 20)] for key in range(20)}
    await bench.close()


@pytest.mark.faults
async def test_a_broker_that_stands_still_keeps_nobody(mortal: KafkaHarness) -> None:
    """It accepts connections and answers nothing."""
    bench = BrokerRig(mortal, await mortal.new_queue(partitions=1))
    await bench.publish(b"one")
    publisher = await bench.publisher()
    reader = await bench.reader()
    await reader.one()
    mortal.server.pause()
    began = monotonic()
    hasty = mortal.connection(connect_timeout_s=1.0)
    for late in (mortal.adapter(bench.queue, connection=hasty), mortal.publisher(hasty)):
        with pytest.raises(BrokerUnavailable):
            await late.connect()
    assert not await reader.adapter.health_check()
    assert await reader.adapter.lag() is None
    answers = await publisher.publish([bench.outgoing(b"two")])
    assert isinstance(answers[0], BrokerUnavailable)
    await reader.stop()
    assert monotonic() - began < 30
    mortal.server.resume()
    second = await bench.reader()
    assert (await second.one()).body == b"one"
    await bench.close()


# ----------------------------------------------------------------------------------------------------------


async def _is(harness: KafkaHarness, queue: str, offsets: dict[int, int]) -> bool:
    return await asyncio.to_thread(harness.committed, queue) == offsets


async def _until(holds: Callable[[], bool]) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look)


async def _connected(adapter: KafkaAdapter) -> KafkaAdapter:
    await adapter.connect()
    return adapter


async def _keys_of_two_partitions(bench: BrokerRig) -> list[str]:
    """Two keys that lie in different partitions; the queue is empty afterwards."""
    names = [f"key-{number}" for number in range(20)]
    for name in names:
        await bench.publish(b"where", key=name)
    reader = await bench.reader(prefetch=100)
    by_partition = {message.metadata["partition"]: message.key for message in await reader.handle(len(names))}
    await reader.stop()
    return list(by_partition.values())


async def test_closing_does_not_wait_for_a_broker_that_is_silent() -> None:
    """Who has given a call up must be able to rely on it: nothing of it is written once this returns."""
    nowhere = f"127.0.0.1:{free_port()}"
    publisher = KafkaPublisher(KafkaConfig(bootstrap_servers=nowhere, publish_timeout_s=20))
    publishing = asyncio.create_task(publisher.publish([OutgoingMessage("t", b"x", {}, "k", "1")]))
    await asyncio.sleep(0.3)
    began = monotonic()
    await publisher.close()
    assert monotonic() - began < 5
    (answer,) = await publishing
    assert isinstance(answer, BrokerUnavailable)


async def test_a_message_as_large_as_may_be_becomes_a_dead_letter(harness: KafkaHarness) -> None:
    """Though it is larger than what we may publish; and without its story, if there is no room for it."""
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
    letters = harness.adapter(harness.dead_letters(queue))
    await letters.connect()
    letter_reader = MessageReader(letters)
    assert (await letter_reader.one()).body == body
    await letter_reader.stop()
    await reader.stop()
