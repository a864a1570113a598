"""SQS behaves as the port says, on moto's server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage
from holdfast.brokers.sqs import SqsAdapter
from holdfast.brokers.sqs_connection import SqsClient, SqsConfig, decode, default_dlq_name, encode, size_of
from holdfast.brokers.sqs_publisher import SqsPublisher
from holdfast.errors import BrokerRefused
from holdfast.testing.contract.broker_harness import BrokerHarness, BrokerRig, MessageReader, by_key, equals, eventually
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract, DeliveryContract, MessageContract
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.servers import free_port
from tests.brokers.sqs_server import ACCESS_KEY, REGION, SECRET_KEY, SqsServer

Client = TypeVar("Client", bound=QueueAdapter | Publisher)


def connection_to(port: int, **settings: Any) -> SqsConfig:
    known = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "region": REGION,
        "access_key": ACCESS_KEY,
        "secret_key": SECRET_KEY,
        # Longer than a test waits for anything: what comes again was given back.
        "visibility_timeout_s": 60,
        "wait_time_s": 0,
        "timeout_s": 5,
    }
    return SqsConfig.model_validate(known | settings)


class SqsHarness(BrokerHarness):
    #: Binary: it becomes a third larger.
    large_body = 180_000
    #: Of each key one message is written at a time.
    many = 60
    silence_s = 0.2
    secret = SECRET_KEY

    def __init__(self, port: int, *, fifo: bool) -> None:
        self.port = port
        self._suffix = ".fifo" if fifo else ""
        self.client = SqsClient(connection_to(port))
        self.proxy: Proxy | None = None
        self._clients: list[QueueAdapter | Publisher] = []

    def _made(self, client: Client) -> Client:
        self._clients.append(client)
        return client

    async def new_queue(self) -> str:
        name = f"queue-{secrets.token_hex(6)}{self._suffix}"
        if not self.client.is_open:
            await self.client.open()
        await self.client.url_of(name, declare=True)
        return name

    def adapter(
        self, queue: str, *, group: str = "readers", prefetch: int = 10, port: int | None = None, **settings: Any
    ) -> SqsAdapter:
        connection = connection_to(port or self.port, **settings)
        return self._made(SqsAdapter(connection, queue, group, prefetch=prefetch))

    def publisher(self) -> SqsPublisher:
        return self._made(SqsPublisher(connection_to(self.port)))

    def lost_adapter(self, queue: str) -> SqsAdapter:
        return self.adapter(queue, port=free_port())

    def lost_publisher(self) -> SqsPublisher:
        return self._made(SqsPublisher(connection_to(free_port())))

    def dead_letters(self, queue: str) -> str:
        return default_dlq_name(queue)

    async def kill_broker(self) -> None:
        assert self.proxy is not None
        self.proxy.refuse = True
        await self.proxy.cut()

    async def start_broker(self) -> None:
        assert self.proxy is not None
        self.proxy.refuse = False

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.client.close()

    async def is_empty(self, queue: str) -> bool:
        """Nothing waits in it, and nobody holds anything of it."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        url = await self.client.url_of(queue)
        answer = await self.client.call("get_queue_attributes", QueueUrl=url, AttributeNames=names)
        return [answer["Attributes"][name] for name in names] == ["0", "0"]

    def impossible(self, topic: str, key: str) -> OutgoingMessage:
        return OutgoingMessage(topic, b"x" * 300_000, {}, key, "event-impossible")


@pytest.fixture
async def harness(sqs_server: SqsServer) -> AsyncIterator[SqsHarness]:
    harness = SqsHarness(sqs_server.port, fifo=False)
    yield harness
    await harness.close()


@pytest.fixture
async def bench(harness: SqsHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(harness, await harness.new_queue())
    yield bench
    await bench.close()


@pytest.fixture
async def fifo_harness(sqs_server: SqsServer) -> AsyncIterator[SqsHarness]:
    harness = SqsHarness(sqs_server.port, fifo=True)
    yield harness
    await harness.close()


@pytest.fixture
async def fifo_bench(fifo_harness: SqsHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(fifo_harness, await fifo_harness.new_queue())
    yield bench
    await bench.close()


class TestContract(BrokerContract):
    """On FIFO queues: a standard queue promises no order."""

    @pytest.fixture
    def harness(self, fifo_harness: SqsHarness) -> SqsHarness:
        return fifo_harness


class TestStandardQueues(MessageContract, DeliveryContract):
    """What a message carries and who holds it is the same on a standard queue; only order is not promised."""

    test_messages_of_one_key_are_published_and_delivered_in_order = None  # type: ignore[assignment]


class TestFaultContract(BrokerFaultContract):
    """moto keeps nothing on disk, so the way to it is cut instead."""

    @pytest.fixture
    async def harness(self, sqs_server: SqsServer) -> AsyncIterator[SqsHarness]:
        async with Proxy(sqs_server.port) as proxy:
            harness = SqsHarness(proxy.port, fifo=True)
            harness.proxy = proxy
            yield harness
            await harness.close()


async def test_a_message_in_hand_is_prolonged_and_comes_to_nobody_else(bench: BrokerRig, harness: SqsHarness) -> None:
    """Also while the consumer is paused."""
    await bench.publish(b"mine")
    holder = await bench.reader(visibility_timeout_s=2)
    message = await holder.one()
    await holder.adapter.pause()
    other = await bench.reader()
    # More than twice what its visibility lasts.
    await other.quiet(4.2)
    assert holder.adapter.owns(message)
    await holder.adapter.ack(message)
    await holder.stop()
    assert await harness.is_empty(bench.queue)


@pytest.mark.faults
async def test_a_message_that_cannot_be_prolonged_is_ours_no_longer(
    bench: BrokerRig, harness: SqsHarness, sqs_server: SqsServer
) -> None:
    await bench.publish(b"lost")
    async with Proxy(sqs_server.port) as proxy:
        cut_off = await bench.adapter(port=proxy.port, visibility_timeout_s=1)
        holder = bench.read(cut_off)
        message = await holder.one()
        proxy.stall()
        other = await bench.reader()
        again = await other.one()
        assert (again.message_id, again.deliveries) == (message.message_id, 2)
        assert not cut_off.owns(message)
        proxy.flow()
        # What is said of it now does not count.
        await cut_off.ack(message)
        await cut_off.nack(message, requeue=True)
        await holder.stop()
    assert other.adapter.owns(again)
    await other.adapter.ack(again)
    await other.stop()
    assert await harness.is_empty(bench.queue)


async def test_settled_messages_are_told_once_sqs_is_reached_again(bench: BrokerRig, sqs_server: SqsServer) -> None:
    await bench.publish(*[b"%d" % number for number in range(12)])
    async with Proxy(sqs_server.port) as proxy:
        adapter = await bench.adapter(port=proxy.port, prefetch=20)
        reader = bench.read(adapter)
        taken = await reader.receive(12)
        proxy.refuse = True
        await proxy.cut()
        for message in taken:
            await adapter.ack(message)
        assert not await adapter.health_check()
        proxy.refuse = False
        await eventually(adapter.health_check)
        await reader.stop()
    adapter = await bench.adapter()
    await eventually(lambda: equals(adapter.lag, 0))
    await bench.read(adapter).quiet()


async def test_a_standard_queue_carries_the_key_in_a_header(bench: BrokerRig) -> None:
    await bench.publish(b"one", key="Schlüssel 1", x_event_name="paid")
    message = await (await bench.reader()).one()
    assert (message.key, message.headers) == ("Schlüssel 1", {"x-event-name": "paid"})


async def test_order_per_key_on_a_fifo_queue_of_two_consumers(fifo_bench: BrokerRig) -> None:
    publisher = await fifo_bench.publisher()
    sent = [fifo_bench.outgoing(b"%d" % number, key=f"key-{number % 4}") for number in range(40)]
    assert await publisher.publish(sent) == [None] * 40
    came: list[RawMessage] = []

    async def work(reader: MessageReader) -> None:
        while len(came) < 40:
            for message in reader.waiting():
                came.append(message)
                await reader.adapter.ack(message)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for reader in [await fifo_bench.reader(prefetch=4) for _ in range(2)]:
            group.create_task(work(reader))
    assert by_key(came) == {f"key-{key}": [b"%d" % number for number in range(key, 40, 4)] for key in range(4)}


async def test_the_same_event_published_twice_is_one_message_of_a_fifo_queue(fifo_bench: BrokerRig) -> None:
    await fifo_bench.publish(b"once", key="k")
    await fifo_bench.publish(b"once", key="k")
    reader = await fifo_bench.reader()
    await reader.handle(1)
    await reader.quiet()


async def test_with_a_message_that_is_lost_go_those_behind_it_in_its_group(fifo_bench: BrokerRig) -> None:
    await fifo_bench.publish(b"1", b"2", b"3", key="late")
    await fifo_bench.publish(b"4", key="other")
    reader = await fifo_bench.reader(visibility_timeout_s=2)
    adapter = reader.adapter
    assert isinstance(adapter, SqsAdapter)
    taken = {message.body: message for message in await reader.receive(4)}
    # As if SQS had not answered for long, when it was the first one's turn to be prolonged.
    adapter._in_flight[taken[b"1"]].prolonged_at -= 1000
    assert [adapter.owns(taken[body]) for body in (b"1", b"2", b"3", b"4")] == [False, False, False, True]
    again = await reader.handle(3)
    assert [message.body for message in again] == [b"1", b"2", b"3"]
    assert adapter.owns(taken[b"4"])


async def test_what_was_lost_is_not_held_on_to(bench: BrokerRig) -> None:
    await bench.publish(b"lost")
    reader = await bench.reader(visibility_timeout_s=2)
    adapter = reader.adapter
    assert isinstance(adapter, SqsAdapter)
    message = await reader.one()
    # As if SQS had not answered for long: whoever has the message drops it now, though SQS would still prolong it.
    adapter._in_flight[message].prolonged_at -= 1000
    assert not adapter.owns(message)
    again = await reader.one()
    assert (again.message_id, again.deliveries) == (message.message_id, 2)
    assert [adapter.owns(each) for each in (message, again)] == [False, True]


async def test_a_long_poll_is_one_question_and_brings_a_message_at_once(bench: BrokerRig) -> None:
    adapter = await bench.adapter(wait_time_s=SqsConfig().wait_time_s)
    assert isinstance(adapter, SqsAdapter)
    asked = 0
    ask = adapter._request

    async def counted(count: int) -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        return await ask(count)

    adapter._request = counted  # type: ignore[method-assign]
    reader = bench.read(adapter)
    await reader.quiet(1.0)
    assert asked == 1
    for body in (b"one", b"two"):
        published = monotonic()
        await bench.publish(body)
        message = await reader.one()
        assert message.body == body
        assert monotonic() - published < 5
        # While a question waits, the rest of the work goes on: deletions, prolongations, health.
        await adapter.ack(message)
        assert await adapter.health_check()
    assert asked <= 3
    # One that waits does not hold up the end.
    ending = monotonic()
    await reader.stop()
    assert monotonic() - ending < 5


async def test_what_is_too_large_is_refused_and_large_batches_are_divided(bench: BrokerRig) -> None:
    publisher = await bench.publisher()
    large = [bench.outgoing(b"%d" % number + b"x" * 100_000) for number in range(5)]
    too_large = [
        OutgoingMessage(bench.queue, b"x" * 262_145, {}),
        OutgoingMessage(bench.queue, b"", {"x-note": "y" * 262_144}),
    ]
    answers = await publisher.publish([*too_large, *large])
    assert [type(answer) for answer in answers] == [BrokerRefused] * 2 + [type(None)] * 5
    assert "exceeds the limit of 262144" in str(answers[0])
    reader = await bench.reader()
    assert {(message.body or b"")[:1] for message in await reader.handle(5)} == {b"0", b"1", b"2", b"3", b"4"}


async def test_a_message_that_sqs_refuses_takes_no_other_along(bench: BrokerRig, harness: SqsHarness) -> None:
    # A queue with a limit of its own: SQS refuses the batch as a whole.
    url = await harness.client.url_of(bench.queue)
    await harness.client.call("set_queue_attributes", QueueUrl=url, Attributes={"MaximumMessageSize": "1024"})
    messages = [bench.outgoing(b"1"), bench.outgoing(b"x" * 2000), bench.outgoing(b"2")]
    answers = await (await bench.publisher()).publish(messages)
    assert [type(answer) for answer in answers] == [type(None), BrokerRefused, type(None)]


async def test_a_queue_that_is_not_there_is_refused_or_made(harness: SqsHarness, namespace: str) -> None:
    for name in (namespace, f"{namespace}.fifo"):
        adapter = harness.adapter(name)
        with pytest.raises(BrokerRefused, match=r"NonExistentQueue|QueueDoesNotExist"):
            await adapter.connect()
        publisher = harness.publisher()
        await publisher.connect()
        (answer,) = await publisher.publish([OutgoingMessage(name, b"1", {})])
        assert isinstance(answer, BrokerRefused)
        adapter = harness.adapter(name, declare=True)
        await adapter.connect()
        assert await publisher.publish([OutgoingMessage(name, b"1", {})]) == [None]
        await adapter.close()


async def test_a_refused_message_is_left_to_the_redrive_policy(bench: BrokerRig, harness: SqsHarness) -> None:
    graveyard = await harness.new_queue()
    client = harness.client
    arn = (
        await client.call("get_queue_attributes", QueueUrl=await client.url_of(graveyard), AttributeNames=["QueueArn"])
    )["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    url = await client.url_of(bench.queue)
    await client.call("set_queue_attributes", QueueUrl=url, Attributes={"RedrivePolicy": policy})
    await bench.publish(b"poison")
    reader = await bench.reader(visibility_timeout_s=1)
    message = await reader.one()
    await reader.adapter.nack(message)
    assert not reader.adapter.owns(message)
    buried = harness.adapter(graveyard)
    await buried.connect()
    assert (await bench.read(buried).one()).body == b"poison"


async def test_wrong_credentials_are_told_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = SqsServer(tmp_path, strict=True)
    server.start()
    try:
        caplog.set_level(logging.DEBUG)
        secret = {"access_key": "AKIDWRONGWRONGWRONG1", "secret_key": "wr0ng/secret+key", "session_token": "tok/en+=="}
        connection = connection_to(server.port, **secret)
        seen = [repr(connection), str(connection)]
        for client in (SqsAdapter(connection, "queue", "readers"), SqsPublisher(connection)):
            # botocore's loggers come into being with its modules.
            for name in list(logging.Logger.manager.loggerDict):
                caplog.set_level(logging.DEBUG, logger=name)
            with pytest.raises(BrokerRefused, match=r"InvalidClientTokenId|security token") as caught:
                await client.connect()
            seen += [repr(client), "".join(traceback.format_exception(caught.value))]
            await client.close()
    finally:
        server.stop()
    text = "\n".join([*seen, caplog.text])
    assert "botocore.endpoint" in text
    for hidden in secret.values():
        assert hidden not in text


KEYS = st.text(max_size=150)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    body=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: text.encode(errors="surrogatepass")),
    headers=st.dictionaries(st.text(min_size=1, max_size=30), st.text(max_size=60), max_size=14),
    key=KEYS,
    fifo=st.booleans(),
)
def test_whatever_is_written_is_read(body: bytes, headers: dict[str, str], key: str, fifo: bool) -> None:
    headers = {name.lower(): value for name, value in headers.items()}
    entry = encode(OutgoingMessage("queue", body, headers, key, "id"), fifo=fifo)
    attributes = entry.get("MessageAttributes", {})
    assert len(attributes) <= 10
    # What SQS allows.
    allowed = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
    for text in (entry["MessageBody"], *(value["StringValue"] for value in attributes.values())):
        assert allowed.fullmatch(text)
    assert size_of(entry) >= len(entry["MessageBody"])
    if fifo:
        assert re.fullmatch("[!-~]{1,128}", entry["MessageGroupId"])
    system = {"MessageGroupId": entry["MessageGroupId"]} if fifo else {}
    received = {
        "MessageId": "id",
        "ReceiptHandle": "handle",
        "Body": entry["MessageBody"],
        "MessageAttributes": attributes,
        "Attributes": system,
    }
    message = decode(received, "queue")
    assert (message.body, dict(message.headers), message.key) == (body, headers, key)


def test_dead_letters_have_a_name_that_sqs_allows() -> None:
    assert (default_dlq_name("orders"), default_dlq_name("orders.fifo")) == ("orders-dlq", "orders-dlq.fifo")


async def test_a_message_as_large_as_may_be_becomes_a_dead_letter(bench: BrokerRig) -> None:
    """Without its story, for which there is no room."""
    body = b"x" * (SqsConfig().max_message_bytes - 10)
    await bench.publish(body)
    reader = await bench.reader()
    await reader.adapter.send_to_dlq(await reader.one(), "too bad", ["try 1"])
    letter = await (await bench.dead_letters()).one()
    assert letter.body == body


async def test_a_call_that_ends_in_an_unknown_way_is_made_again(
    bench: BrokerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = await bench.adapter()
    assert isinstance(adapter, SqsAdapter)
    library = adapter._client._client
    receive, failures = library.receive_message, [RuntimeError("a mistake")]

    async def flaky(**arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await receive(**arguments)

    monkeypatch.setattr(library, "receive_message", flaky)
    await bench.publish(b"one")
    assert (await bench.read(adapter).one()).body == b"one"
    assert not failures
