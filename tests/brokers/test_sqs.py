"""The SQS client fulfils the broker contract, on moto's server."""

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
    defaults = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "region": REGION,
        "access_key": ACCESS_KEY,
        "secret_key": SECRET_KEY,
        # Longer than any wait of a test: a redelivered message was released, its visibility did not expire.
        "visibility_timeout_s": 60,
        "wait_time_s": 0,
        "timeout_s": 5,
    }
    return SqsConfig.model_validate(defaults | settings)


class SqsHarness(BrokerHarness):
    #: Binary bodies grow by a third when encoded.
    large_body = 180_000
    #: Messages of one key are written one at a time.
    many = 60
    silence_s = 0.2
    secret = SECRET_KEY

    def __init__(self, port: int, *, fifo: bool) -> None:
        self.port = port
        self._suffix = ".fifo" if fifo else ""
        self.client = SqsClient(connection_to(port))
        self.proxy: Proxy | None = None
        self._clients: list[QueueAdapter | Publisher] = []

    def _keep(self, client: Client) -> Client:
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
        return self._keep(SqsAdapter(connection, queue, group, prefetch=prefetch))

    def publisher(self) -> SqsPublisher:
        return self._keep(SqsPublisher(connection_to(self.port)))

    def lost_adapter(self, queue: str) -> SqsAdapter:
        return self.adapter(queue, port=free_port())

    def lost_publisher(self) -> SqsPublisher:
        return self._keep(SqsPublisher(connection_to(free_port())))

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
        """Return whether the queue has no waiting messages and none in flight."""
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
async def rig(harness: SqsHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(harness, await harness.new_queue())
    yield rig
    await rig.close()


@pytest.fixture
async def fifo_harness(sqs_server: SqsServer) -> AsyncIterator[SqsHarness]:
    harness = SqsHarness(sqs_server.port, fifo=True)
    yield harness
    await harness.close()


@pytest.fixture
async def fifo_rig(fifo_harness: SqsHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(fifo_harness, await fifo_harness.new_queue())
    yield rig
    await rig.close()


class TestContract(BrokerContract):
    """On FIFO queues: standard queues do not guarantee order."""

    @pytest.fixture
    def harness(self, fifo_harness: SqsHarness) -> SqsHarness:
        return fifo_harness


class TestStandardQueues(MessageContract, DeliveryContract):
    """Content and delivery are the same on standard queues; only order is not guaranteed."""

    test_messages_of_one_key_are_published_and_delivered_in_order = None  # type: ignore[assignment]


class TestFaultContract(BrokerFaultContract):
    """moto keeps no data on disk, so the connection is cut instead of killing the server."""

    @pytest.fixture
    async def harness(self, sqs_server: SqsServer) -> AsyncIterator[SqsHarness]:
        async with Proxy(sqs_server.port) as proxy:
            harness = SqsHarness(proxy.port, fifo=True)
            harness.proxy = proxy
            yield harness
            await harness.close()


async def test_a_message_in_flight_is_prolonged_and_not_redelivered(rig: BrokerRig, harness: SqsHarness) -> None:
    """Including while the consumer is paused."""
    await rig.publish(b"mine")
    owner = await rig.reader(visibility_timeout_s=2)
    message = await owner.one()
    await owner.adapter.pause()
    other = await rig.reader()
    # More than twice the visibility timeout.
    await other.quiet(4.2)
    assert owner.adapter.owns(message)
    await owner.adapter.ack(message)
    await owner.stop()
    assert await harness.is_empty(rig.queue)


@pytest.mark.faults
async def test_a_message_that_cannot_be_prolonged_is_not_owned_any_more(
    rig: BrokerRig, harness: SqsHarness, sqs_server: SqsServer
) -> None:
    await rig.publish(b"lost")
    async with Proxy(sqs_server.port) as proxy:
        cut_off = await rig.adapter(port=proxy.port, visibility_timeout_s=1)
        owner = rig.read(cut_off)
        message = await owner.one()
        proxy.stall()
        other = await rig.reader()
        redelivered = await other.one()
        assert (redelivered.message_id, redelivered.deliveries) == (message.message_id, 2)
        assert not cut_off.owns(message)
        proxy.flow()
        # Settling the message now has no effect.
        await cut_off.ack(message)
        await cut_off.nack(message, requeue=True)
        await owner.stop()
    assert other.adapter.owns(redelivered)
    await other.adapter.ack(redelivered)
    await other.stop()
    assert await harness.is_empty(rig.queue)


async def test_messages_settled_during_an_outage_are_deleted_after_it(rig: BrokerRig, sqs_server: SqsServer) -> None:
    await rig.publish(*[b"%d" % number for number in range(12)])
    async with Proxy(sqs_server.port) as proxy:
        adapter = await rig.adapter(port=proxy.port, prefetch=20)
        reader = rig.read(adapter)
        received_messages = await reader.receive(12)
        proxy.refuse = True
        await proxy.cut()
        for message in received_messages:
            await adapter.ack(message)
        assert not await adapter.health_check()
        proxy.refuse = False
        await eventually(adapter.health_check)
        await reader.stop()
    adapter = await rig.adapter()
    await eventually(lambda: equals(adapter.lag, 0))
    await rig.read(adapter).quiet()


async def test_a_standard_queue_carries_the_key_in_a_header(rig: BrokerRig) -> None:
    await rig.publish(b"one", key="Schlüssel 1", x_event_name="paid")
    message = await (await rig.reader()).one()
    assert (message.key, message.headers) == ("Schlüssel 1", {"x-event-name": "paid"})


async def test_order_per_key_on_a_fifo_queue_of_two_consumers(fifo_rig: BrokerRig) -> None:
    publisher = await fifo_rig.publisher()
    sent = [fifo_rig.outgoing(b"%d" % number, key=f"key-{number % 4}") for number in range(40)]
    assert await publisher.publish(sent) == [None] * 40
    received_messages: list[RawMessage] = []

    async def work(reader: MessageReader) -> None:
        while len(received_messages) < 40:
            for message in reader.waiting():
                received_messages.append(message)
                await reader.adapter.ack(message)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for reader in [await fifo_rig.reader(prefetch=4) for _ in range(2)]:
            group.create_task(work(reader))
    assert by_key(received_messages) == {
        f"key-{key}": [b"%d" % number for number in range(key, 40, 4)] for key in range(4)
    }


async def test_the_same_event_published_twice_is_one_message_of_a_fifo_queue(fifo_rig: BrokerRig) -> None:
    await fifo_rig.publish(b"once", key="k")
    await fifo_rig.publish(b"once", key="k")
    reader = await fifo_rig.reader()
    await reader.handle(1)
    await reader.quiet()


async def test_losing_a_message_also_loses_those_behind_it_in_its_group(fifo_rig: BrokerRig) -> None:
    await fifo_rig.publish(b"1", b"2", b"3", key="late")
    await fifo_rig.publish(b"4", key="other")
    reader = await fifo_rig.reader(visibility_timeout_s=2)
    adapter = reader.adapter
    assert isinstance(adapter, SqsAdapter)
    received_messages = {message.body: message for message in await reader.receive(4)}
    # As if SQS had not responded for long when the first message was due to be prolonged.
    adapter._in_flight[received_messages[b"1"]].prolonged_at -= 1000
    assert [adapter.owns(received_messages[body]) for body in (b"1", b"2", b"3", b"4")] == [False, False, False, True]
    redelivered = await reader.handle(3)
    assert [message.body for message in redelivered] == [b"1", b"2", b"3"]
    assert adapter.owns(received_messages[b"4"])


async def test_a_lost_message_is_released_and_redelivered(rig: BrokerRig) -> None:
    await rig.publish(b"lost")
    reader = await rig.reader(visibility_timeout_s=2)
    adapter = reader.adapter
    assert isinstance(adapter, SqsAdapter)
    message = await reader.one()
    # As if SQS had not responded for long: the consumer drops the message, although SQS would still prolong it.
    adapter._in_flight[message].prolonged_at -= 1000
    assert not adapter.owns(message)
    redelivered = await reader.one()
    assert (redelivered.message_id, redelivered.deliveries) == (message.message_id, 2)
    assert [adapter.owns(each) for each in (message, redelivered)] == [False, True]


async def test_a_long_poll_is_one_request_and_returns_a_message_at_once(rig: BrokerRig) -> None:
    adapter = await rig.adapter(wait_time_s=SqsConfig().wait_time_s)
    assert isinstance(adapter, SqsAdapter)
    requests = 0
    request = adapter._request

    async def counting_request(count: int) -> list[dict[str, Any]]:
        nonlocal requests
        requests += 1
        return await request(count)

    adapter._request = counting_request  # type: ignore[method-assign]
    reader = rig.read(adapter)
    await reader.quiet(1.0)
    assert requests == 1
    for body in (b"one", b"two"):
        published_at = monotonic()
        await rig.publish(body)
        message = await reader.one()
        assert message.body == body
        assert monotonic() - published_at < 5
        # A pending long poll does not block deletions, prolongations and health checks.
        await adapter.ack(message)
        assert await adapter.health_check()
    assert requests <= 3
    # A pending long poll does not delay the stop.
    stopped_at = monotonic()
    await reader.stop()
    assert monotonic() - stopped_at < 5


async def test_too_large_messages_are_refused_and_large_batches_are_split(rig: BrokerRig) -> None:
    publisher = await rig.publisher()
    large = [rig.outgoing(b"%d" % number + b"x" * 100_000) for number in range(5)]
    too_large = [
        OutgoingMessage(rig.queue, b"x" * 262_145, {}),
        OutgoingMessage(rig.queue, b"", {"x-note": "y" * 262_144}),
    ]
    answers = await publisher.publish([*too_large, *large])
    assert [type(answer) for answer in answers] == [BrokerRefused] * 2 + [type(None)] * 5
    assert "exceeds the limit of 262144" in str(answers[0])
    reader = await rig.reader()
    assert {(message.body or b"")[:1] for message in await reader.handle(5)} == {b"0", b"1", b"2", b"3", b"4"}


async def test_a_refused_message_does_not_affect_the_rest_of_its_batch(rig: BrokerRig, harness: SqsHarness) -> None:
    # The queue has its own size limit: SQS refuses the whole batch.
    url = await harness.client.url_of(rig.queue)
    await harness.client.call("set_queue_attributes", QueueUrl=url, Attributes={"MaximumMessageSize": "1024"})
    messages = [rig.outgoing(b"1"), rig.outgoing(b"x" * 2000), rig.outgoing(b"2")]
    answers = await (await rig.publisher()).publish(messages)
    assert [type(answer) for answer in answers] == [type(None), BrokerRefused, type(None)]


async def test_a_missing_queue_is_refused_or_declared(harness: SqsHarness, namespace: str) -> None:
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


async def test_a_refused_message_is_left_to_the_redrive_policy(rig: BrokerRig, harness: SqsHarness) -> None:
    dlq = await harness.new_queue()
    client = harness.client
    arn = (await client.call("get_queue_attributes", QueueUrl=await client.url_of(dlq), AttributeNames=["QueueArn"]))[
        "Attributes"
    ]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    url = await client.url_of(rig.queue)
    await client.call("set_queue_attributes", QueueUrl=url, Attributes={"RedrivePolicy": policy})
    await rig.publish(b"poison")
    reader = await rig.reader(visibility_timeout_s=1)
    message = await reader.one()
    await reader.adapter.nack(message)
    assert not reader.adapter.owns(message)
    dlq_adapter = harness.adapter(dlq)
    await dlq_adapter.connect()
    assert (await rig.read(dlq_adapter).one()).body == b"poison"


async def test_wrong_credentials_are_refused_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = SqsServer(tmp_path, strict=True)
    server.start()
    try:
        caplog.set_level(logging.DEBUG)
        secret = {"access_key": "AKIDWRONGWRONGWRONG1", "secret_key": "wr0ng/secret+key", "session_token": "tok/en+=="}
        connection = connection_to(server.port, **secret)
        shown = [repr(connection), str(connection)]
        for client in (SqsAdapter(connection, "queue", "readers"), SqsPublisher(connection)):
            # botocore creates its loggers when its modules are imported.
            for name in list(logging.Logger.manager.loggerDict):
                caplog.set_level(logging.DEBUG, logger=name)
            with pytest.raises(BrokerRefused, match=r"InvalidClientTokenId|security token") as caught:
                await client.connect()
            shown += [repr(client), "".join(traceback.format_exception(caught.value))]
            await client.close()
    finally:
        server.stop()
    text = "\n".join([*shown, caplog.text])
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
def test_encoded_messages_are_decoded_unchanged(body: bytes, headers: dict[str, str], key: str, fifo: bool) -> None:
    headers = {name.lower(): value for name, value in headers.items()}
    entry = encode(OutgoingMessage("queue", body, headers, key, "id"), fifo=fifo)
    attributes = entry.get("MessageAttributes", {})
    assert len(attributes) <= 10
    # The characters that SQS allows.
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


def test_dead_letter_queues_have_names_that_sqs_allows() -> None:
    assert (default_dlq_name("orders"), default_dlq_name("orders.fifo")) == ("orders-dlq", "orders-dlq.fifo")


async def test_a_message_at_the_size_limit_becomes_a_dead_letter(rig: BrokerRig) -> None:
    """Without its history, which does not fit."""
    body = b"x" * (SqsConfig().max_message_bytes - 10)
    await rig.publish(body)
    reader = await rig.reader()
    await reader.adapter.send_to_dlq(await reader.one(), "too bad", ["try 1"])
    dead_letter = await (await rig.dead_letters()).one()
    assert dead_letter.body == body


async def test_a_call_that_fails_unexpectedly_is_repeated(rig: BrokerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = await rig.adapter()
    assert isinstance(adapter, SqsAdapter)
    library = adapter._client._client
    receive, failures = library.receive_message, [RuntimeError("a mistake")]

    async def flaky(**arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await receive(**arguments)

    monkeypatch.setattr(library, "receive_message", flaky)
    await rig.publish(b"one")
    assert (await rig.read(adapter).one()).body == b"one"
    assert not failures


@pytest.mark.parametrize(
    "attributes", [{"x-headers": "[" * 100_000}, {"x-body-encoding": "base64"}], ids=["deep headers", "not base64"]
)
def test_a_hostile_attribute_is_kept_as_it_is(attributes: dict[str, str]) -> None:
    values = {name: {"DataType": "String", "StringValue": text} for name, text in attributes.items()}
    received = {"MessageId": "m", "ReceiptHandle": "r", "Body": "é", "MessageAttributes": values}
    assert decode(received, "q").body == "é".encode()
