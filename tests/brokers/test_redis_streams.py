"""Redis Streams as a broker, on the current Redis and on the oldest that is supported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import inf
from typing import Any, Final

import pytest
from pydantic import ValidationError
from redis.asyncio import Redis

from holdfast.brokers.port import OutgoingMessage
from holdfast.brokers.redis_connection import RedisConfig, RedisPublisher
from holdfast.brokers.redis_streams import RedisAdapter, _PendingEntry
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.testing.contract.broker_harness import BrokerHarness, BrokerRig, eventually
from holdfast.testing.contract.brokers import BrokerContract, BrokerFaultContract
from holdfast.verification.chaos.servers import RedisServer, free_port
from tests.conftest import MakeServer

pytestmark = pytest.mark.redis

PASSWORD: Final = "correct-horse-battery"
VISIBILITY_S: Final = 1.0


class RedisStreamsHarness(BrokerHarness):
    silence_s = VISIBILITY_S
    secret = PASSWORD

    def __init__(self, url: str, namespace: str, server: RedisServer | None = None, **options: Any) -> None:
        self._namespace = namespace
        self._options = {"url": url, "visibility_timeout_s": VISIBILITY_S, **options}
        self._queues = 0
        self._server = server
        self.redis: Any = Redis.from_url(url)
        self._clients: list[RedisAdapter | RedisPublisher] = []

    def connection(self, **options: Any) -> RedisConfig:
        return RedisConfig.model_validate({**self._options, **options})

    async def new_queue(self) -> str:
        self._queues += 1
        return f"{self._namespace}:queue-{self._queues}"

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10, **options: Any) -> RedisAdapter:
        adapter = RedisAdapter(self.connection(**options), queue, group, prefetch=prefetch)
        self._clients.append(adapter)
        return adapter

    def publisher(self, **options: Any) -> RedisPublisher:
        publisher = RedisPublisher(self.connection(**options))
        self._clients.append(publisher)
        return publisher

    def lost_adapter(self, queue: str) -> RedisAdapter:
        return self.adapter(queue, url=f"redis://ann:{PASSWORD}@127.0.0.1:{free_port()}/0")

    def lost_publisher(self) -> RedisPublisher:
        return self.publisher(url=f"redis://ann:{PASSWORD}@127.0.0.1:{free_port()}/0")

    def refused_adapter(self, queue: str) -> RedisAdapter:
        return self.adapter(queue, username="unknown", password=PASSWORD)

    async def spoil_dead_letters(self, queue: str) -> bool:
        await self.redis.set(self.dead_letters(queue), "no stream")
        return True

    def impossible(self, topic: str, key: str) -> OutgoingMessage:
        return OutgoingMessage(topic, b"", {"body": "there is one already"}, key)

    async def kill_broker(self) -> None:
        assert self._server is not None
        self._server.kill()

    async def start_broker(self) -> None:
        assert self._server is not None
        self._server.start()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.redis.aclose()


@pytest.fixture(params=["redis_url", "redis_60_url"], ids=["current", "6.0.9"])
async def harness(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[RedisStreamsHarness]:
    harness = RedisStreamsHarness(request.getfixturevalue(request.param), namespace)
    yield harness
    await harness.close()


@pytest.fixture
async def rig(harness: RedisStreamsHarness) -> AsyncIterator[BrokerRig]:
    rig = BrokerRig(harness, await harness.new_queue())
    yield rig
    await rig.close()


class TestRedisStreams(BrokerContract):
    pass


class TestRedisStreamsFaults(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, make_redis: MakeServer, namespace: str) -> AsyncIterator[RedisStreamsHarness]:
        server = make_redis(appendonly="yes", appendfsync="always")
        harness = RedisStreamsHarness(server.url, namespace, server)
        yield harness
        await harness.close()


async def abandon(adapter: RedisAdapter) -> None:
    """Stop the adapter as if its process had been killed: nothing is renewed or released."""
    for task in adapter._tasks:
        task.cancel()
    await asyncio.gather(*adapter._tasks, return_exceptions=True)


async def test_messages_of_a_dead_consumer_are_reclaimed_and_counted(
    rig: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await rig.publish(b"one", key="k", x_note="n")
    dead = harness.adapter(rig.queue)
    await dead.connect()
    first = await anext(dead.consume())
    await abandon(dead)
    successor = await rig.reader()
    await successor.quiet(VISIBILITY_S / 4)
    redelivered = await successor.one()
    assert (redelivered.message_id, redelivered.body, redelivered.key, redelivered.deliveries) == (
        first.message_id,
        b"one",
        "k",
        2,
    )
    assert not dead.owns(first)
    # Too late: the message has been redelivered, and the other delivery is the valid one.
    dead._in_flight[first] = _PendingEntry(first, 1, inf)
    await dead.ack(first)
    assert (await harness.redis.xpending(rig.queue, "readers"))["pending"] == 1
    await successor.adapter.ack(redelivered)
    assert (await harness.redis.xpending(rig.queue, "readers"))["pending"] == 0
    consumers = await harness.redis.xinfo_consumers(rig.queue, "readers")
    assert [row["name"].decode() for row in consumers] == [redelivered.metadata["consumer"]]


async def test_requeued_messages_are_delivered_before_younger_ones(
    rig: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await rig.publish(*[b"%d" % number for number in range(4)], key="k")
    adapter = harness.adapter(rig.queue)
    await adapter.connect()
    messages = adapter.consume()
    zero, one = await anext(messages), await anext(messages)
    await adapter.nack(one, requeue=True)
    await adapter.nack(zero, requeue=True)
    redelivered = [await anext(messages) for _ in range(4)]
    assert [(message.body, message.deliveries) for message in redelivered] == [
        (b"0", 2),
        (b"1", 2),
        (b"2", 1),
        (b"3", 1),
    ]


async def test_a_message_in_flight_is_kept_beyond_the_visibility_timeout(rig: BrokerRig) -> None:
    await rig.publish(b"long")
    worker = await rig.reader()
    message = await worker.one()
    other = await rig.reader()
    await other.quiet(2.5 * VISIBILITY_S)
    assert worker.adapter.owns(message)
    await worker.adapter.ack(message)


async def test_a_message_whose_delivery_was_lost_is_delivered_again(
    rig: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await rig.publish(b"lost")
    adapter = harness.adapter(rig.queue)
    await adapter.connect()
    # The state after a lost reply.
    await harness.redis.xreadgroup("readers", adapter._consumer, {rig.queue: ">"})
    assert (await asyncio.wait_for(rig.read(adapter).one(), VISIBILITY_S / 2)).body == b"lost"


@pytest.mark.parametrize("end", ["leaves", "dies"])
async def test_deleted_entries_are_removed_from_the_pending_list(
    rig: BrokerRig, harness: RedisStreamsHarness, end: str
) -> None:
    await rig.publish(b"deleted", b"kept")
    first = harness.adapter(rig.queue)
    await first.connect()
    messages = first.consume()
    deleted, _ = await anext(messages), await anext(messages)
    await harness.redis.xdel(rig.queue, deleted.message_id)
    await (first.close() if end == "leaves" else abandon(first))
    second = await rig.reader()
    assert (await second.handle(1))[0].body == b"kept"
    await second.quiet()
    assert (await harness.redis.xpending(rig.queue, "readers"))["pending"] == 0


async def test_released_messages_do_not_wait_for_the_visibility_timeout(
    rig: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await rig.publish(b"one")
    first, second = (harness.adapter(rig.queue, visibility_timeout_s=600) for _ in range(2))
    await first.connect()
    message = await anext(first.consume())
    await second.connect()
    other = rig.read(second)
    await other.quiet(0.1)
    await first.close()
    assert (await other.handle(1))[0].message_id == message.message_id


async def test_closed_consumers_are_removed_from_the_group(rig: BrokerRig, harness: RedisStreamsHarness) -> None:
    await rig.publish(b"one")
    for _ in range(3):
        reader = await rig.reader()
        await reader.one()
        await reader.stop()
    names = [row["name"] for row in await harness.redis.xinfo_consumers(rig.queue, "readers")]
    assert names == [b"returned"]


async def test_a_deleted_stream_is_read_again_once_it_exists(rig: BrokerRig, harness: RedisStreamsHarness) -> None:
    reader = await rig.reader()
    await rig.publish(b"before")
    await reader.handle(1)
    await harness.redis.delete(rig.queue)
    await rig.publish(b"after")
    assert (await reader.handle(1))[0].body == b"after"


@pytest.mark.parametrize("field", ["body", "payload", "data"])
async def test_entries_of_other_programs_are_decoded(rig: BrokerRig, harness: RedisStreamsHarness, field: str) -> None:
    await harness.redis.xadd(rig.queue, {field: b"\xff\x00", "key": "k", "X-Event-Name": "paid", "odd": b"\xff"})
    message = await (await rig.reader()).one()
    assert (message.body, message.key) == (b"\xff\x00", "k")
    assert message.headers == {"x-event-name": "paid", "odd": "\ufffd"}


async def test_an_entry_without_a_body_has_an_empty_one(rig: BrokerRig, harness: RedisStreamsHarness) -> None:
    await harness.redis.xadd(rig.queue, {"id": "5"})
    message = await (await rig.reader()).one()
    assert (message.body, message.headers) == (b"", {"id": "5"})


async def test_acknowledged_entries_are_deleted_on_request(rig: BrokerRig, harness: RedisStreamsHarness) -> None:
    await rig.publish(b"one", b"two", b"three")
    adapter = harness.adapter(rig.queue, delete_acknowledged=True)
    await adapter.connect()
    reader = rig.read(adapter)
    one, two, _ = await reader.receive(3)
    await adapter.ack(one)
    await adapter.send_to_dlq(two, "why")
    assert await harness.redis.xlen(rig.queue) == 1
    assert await adapter.lag() == 0


async def test_streams_are_trimmed_on_request(rig: BrokerRig, harness: RedisStreamsHarness) -> None:
    publisher = harness.publisher(max_length=100)
    await publisher.connect()
    for _ in range(5):
        await publisher.publish([rig.outgoing(b"x") for _ in range(200)])
    # Redis trims whole nodes of 100 entries.
    assert await harness.redis.xlen(rig.queue) <= 200


async def test_a_topic_that_is_not_a_stream_is_refused_and_the_others_are_written(
    rig: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await harness.redis.set(f"{rig.queue}:text", "no stream")
    wrong = OutgoingMessage(f"{rig.queue}:text", b"1", {}, "k")
    first, second, third = await (await rig.publisher()).publish([wrong, rig.outgoing(b"1"), wrong])
    assert isinstance(first, BrokerRefused)
    assert isinstance(third, BrokerRefused)
    assert second is None
    adapter = harness.adapter(f"{rig.queue}:text")
    with pytest.raises(BrokerRefused, match="not a stream"):
        await adapter.connect()


@pytest.mark.faults
async def test_a_full_server_accepts_all_messages_of_a_call_or_none(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis(maxmemory="4mb", maxmemory_policy="noeviction")
    harness = RedisStreamsHarness(server.url, namespace, server)
    rig = BrokerRig(harness, await harness.new_queue())
    publisher = await rig.publisher()
    written, answers = 0, list[BrokerUnavailable | None]()
    for _ in range(100):
        answers = await publisher.publish([rig.outgoing(b"x" * 20_000, key="k") for _ in range(20)])
        assert len({answer is None for answer in answers}) == 1
        written += sum(answer is None for answer in answers)
        if answers[0] is not None:
            break
    assert answers[0] is not None
    assert await harness.redis.xlen(rig.queue) == written
    await rig.close()
    await harness.close()


@pytest.mark.faults
async def test_a_server_that_stops_answering_is_noticed(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis()
    harness = RedisStreamsHarness(server.url, namespace, server, reply_timeout_s=0.5)
    rig = BrokerRig(harness, await harness.new_queue())
    reader = await rig.reader()
    publisher = await rig.publisher()
    await rig.publish(b"one")
    await reader.handle(1)
    server.pause()
    assert [answer is None for answer in await publisher.publish([rig.outgoing(b"two")])] == [False]
    assert not await reader.adapter.health_check()
    server.resume()
    await rig.publish(b"three")
    received: set[bytes | None] = set()
    while b"three" not in received:
        received.add((await reader.handle(1))[0].body)
    await eventually(publisher.health_check)
    await rig.close()
    await harness.close()


def test_invalid_connection_settings_are_refused() -> None:
    for options, message in (
        ({"url": "http://somewhere"}, "must start with"),
        ({"ca_file": "ca.pem"}, "rediss"),
        ({"url": "rediss://host", "cert_file": "c.pem"}, "must be set together"),
        ({"host": "h"}, "Extra inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            RedisConfig.model_validate(options)
    shown = repr(RedisConfig.model_validate({"url": f"redis://ann:{PASSWORD}@h", "password": PASSWORD}))
    assert PASSWORD not in shown


@pytest.mark.parametrize("entry_id", ["1763247000000000000-1", "18446744073709551614-3"])
async def test_an_entry_whose_id_is_not_a_timestamp_is_delivered(
    rig: BrokerRig, harness: RedisStreamsHarness, entry_id: str
) -> None:
    await harness.redis.xadd(rig.queue, {"body": "one"}, id=entry_id)
    (message,) = await (await rig.reader()).handle(1)
    assert (message.message_id, message.body) == (entry_id, b"one")


async def test_a_fetch_that_fails_unexpectedly_raises(rig: BrokerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a failed consumer would look like an idle stream."""
    adapter = rig.harness.adapter(rig.queue)
    await adapter.connect()

    async def broken(*_: object) -> Any:
        await asyncio.sleep(0.05)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(adapter, "_reclaim", broken)
    messages = aiter(adapter.consume())
    with pytest.raises(RuntimeError, match="a mistake"):
        await asyncio.wait_for(anext(messages), 5)


def test_an_invalid_url_does_not_show_its_password() -> None:
    with pytest.raises(ValidationError, match="url is not valid") as caught:
        RedisConfig.model_validate({"url": "redis://:pass/word@host:6379/0"})
    assert "pass/" not in str(caught.value)
    assert "'pass'" not in str(caught.value)


async def test_a_message_with_a_pending_acknowledgement_is_not_redelivered(
    rig: BrokerRig, harness: RedisStreamsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.publish(b"one")
    reader = await rig.reader()
    message, adapter = await reader.one(), reader.adapter
    assert isinstance(adapter, RedisAdapter)
    run, sending, confirmed = adapter._run, asyncio.Event(), asyncio.Event()

    async def slow_run(name: str, *args: Any, **options: Any) -> Any:
        if name == "ack":
            sending.set()
            await confirmed.wait()
        return await run(name, *args, **options)

    monkeypatch.setattr(adapter, "_run", slow_run)
    ack = asyncio.create_task(adapter.ack(message))
    await sending.wait()
    assert await adapter._reclaim(10) == []
    confirmed.set()
    await ack
    assert await harness.redis.xpending_range(rig.queue, "readers", "-", "+", 10) == []
    assert adapter._acknowledging == set()
