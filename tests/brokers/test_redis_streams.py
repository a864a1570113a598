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
        self._made: list[RedisAdapter | RedisPublisher] = []

    def connection(self, **options: Any) -> RedisConfig:
        return RedisConfig.model_validate({**self._options, **options})

    async def new_queue(self) -> str:
        self._queues += 1
        return f"{self._namespace}:queue-{self._queues}"

    def adapter(self, queue: str, *, group: str = "readers", prefetch: int = 10, **options: Any) -> RedisAdapter:
        adapter = RedisAdapter(self.connection(**options), queue, group, prefetch=prefetch)
        self._made.append(adapter)
        return adapter

    def publisher(self, **options: Any) -> RedisPublisher:
        publisher = RedisPublisher(self.connection(**options))
        self._made.append(publisher)
        return publisher

    def lost_adapter(self, queue: str) -> RedisAdapter:
        return self.adapter(queue, url=f"redis://ann:{PASSWORD}@127.0.0.1:{free_port()}/0")

    def lost_publisher(self) -> RedisPublisher:
        return self.publisher(url=f"redis://ann:{PASSWORD}@127.0.0.1:{free_port()}/0")

    def refused_adapter(self, queue: str) -> RedisAdapter:
        return self.adapter(queue, username="nobody", password=PASSWORD)

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
        for client in self._made:
            await client.close()
        await self.redis.aclose()


@pytest.fixture(params=["redis_url", "redis_60_url"], ids=["current", "6.0.9"])
async def harness(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[RedisStreamsHarness]:
    harness = RedisStreamsHarness(request.getfixturevalue(request.param), namespace)
    yield harness
    await harness.close()


@pytest.fixture
async def bench(harness: RedisStreamsHarness) -> AsyncIterator[BrokerRig]:
    bench = BrokerRig(harness, await harness.new_queue())
    yield bench
    await bench.close()


class TestRedisStreams(BrokerContract):
    pass


class TestRedisStreamsFaults(BrokerFaultContract):
    @pytest.fixture
    async def harness(self, make_redis: MakeServer, namespace: str) -> AsyncIterator[RedisStreamsHarness]:
        server = make_redis(appendonly="yes", appendfsync="always")
        harness = RedisStreamsHarness(server.url, namespace, server)
        yield harness
        await harness.close()


async def abandoned(adapter: RedisAdapter) -> None:
    """As if the process had died: nothing is renewed, nothing given back."""
    for task in adapter._tasks:
        task.cancel()
    await asyncio.gather(*adapter._tasks, return_exceptions=True)


async def test_what_a_dead_consumer_had_is_taken_over_and_counted(
    bench: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await bench.publish(b"one", key="k", x_note="n")
    dead = harness.adapter(bench.queue)
    await dead.connect()
    first = await anext(dead.consume())
    await abandoned(dead)
    heir = await bench.reader()
    await heir.quiet(VISIBILITY_S / 4)
    again = await heir.one()
    assert (again.message_id, again.body, again.key, again.deliveries) == (first.message_id, b"one", "k", 2)
    assert not dead.owns(first)
    # Too late: the other's delivery is the one that counts.
    dead._in_flight[first] = _PendingEntry(first, 1, inf)
    await dead.ack(first)
    assert (await harness.redis.xpending(bench.queue, "readers"))["pending"] == 1
    await heir.adapter.ack(again)
    assert (await harness.redis.xpending(bench.queue, "readers"))["pending"] == 0
    consumers = await harness.redis.xinfo_consumers(bench.queue, "readers")
    assert [row["name"].decode() for row in consumers] == [again.metadata["consumer"]]


async def test_what_is_requeued_comes_before_what_is_younger(bench: BrokerRig, harness: RedisStreamsHarness) -> None:
    await bench.publish(*[b"%d" % number for number in range(4)], key="k")
    adapter = harness.adapter(bench.queue)
    await adapter.connect()
    messages = adapter.consume()
    zero, one = await anext(messages), await anext(messages)
    await adapter.nack(one, requeue=True)
    await adapter.nack(zero, requeue=True)
    again = [await anext(messages) for _ in range(4)]
    assert [(message.body, message.deliveries) for message in again] == [(b"0", 2), (b"1", 2), (b"2", 1), (b"3", 1)]


async def test_a_message_in_hand_is_kept_for_longer_than_the_visibility_time(bench: BrokerRig) -> None:
    await bench.publish(b"long")
    worker = await bench.reader()
    message = await worker.one()
    other = await bench.reader()
    await other.quiet(2.5 * VISIBILITY_S)
    assert worker.adapter.owns(message)
    await worker.adapter.ack(message)


async def test_a_message_that_was_sent_and_never_arrived_is_delivered(
    bench: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await bench.publish(b"lost")
    adapter = harness.adapter(bench.queue)
    await adapter.connect()
    # What a reply lost on its way leaves behind.
    await harness.redis.xreadgroup("readers", adapter._consumer, {bench.queue: ">"})
    assert (await asyncio.wait_for(bench.read(adapter).one(), VISIBILITY_S / 2)).body == b"lost"


@pytest.mark.parametrize("end", ["leaves", "dies"])
async def test_pending_entries_that_were_deleted_are_forgotten(
    bench: BrokerRig, harness: RedisStreamsHarness, end: str
) -> None:
    await bench.publish(b"deleted", b"kept")
    first = harness.adapter(bench.queue)
    await first.connect()
    messages = first.consume()
    deleted, _ = await anext(messages), await anext(messages)
    await harness.redis.xdel(bench.queue, deleted.message_id)
    await (first.close() if end == "leaves" else abandoned(first))
    second = await bench.reader()
    assert (await second.handle(1))[0].body == b"kept"
    await second.quiet()
    assert (await harness.redis.xpending(bench.queue, "readers"))["pending"] == 0


async def test_what_is_given_back_need_not_wait_for_the_visibility_time(
    bench: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await bench.publish(b"one")
    first, second = (harness.adapter(bench.queue, visibility_timeout_s=600) for _ in range(2))
    await first.connect()
    message = await anext(first.consume())
    await second.connect()
    other = bench.read(second)
    await other.quiet(0.1)
    await first.close()
    assert (await other.handle(1))[0].message_id == message.message_id


async def test_consumers_that_left_are_not_remembered(bench: BrokerRig, harness: RedisStreamsHarness) -> None:
    await bench.publish(b"one")
    for _ in range(3):
        reader = await bench.reader()
        await reader.one()
        await reader.stop()
    names = [row["name"] for row in await harness.redis.xinfo_consumers(bench.queue, "readers")]
    assert names == [b"returned"]


async def test_a_stream_that_was_deleted_is_read_again_when_it_is_back(
    bench: BrokerRig, harness: RedisStreamsHarness
) -> None:
    reader = await bench.reader()
    await bench.publish(b"before")
    await reader.handle(1)
    await harness.redis.delete(bench.queue)
    await bench.publish(b"after")
    assert (await reader.handle(1))[0].body == b"after"


@pytest.mark.parametrize("field", ["body", "payload", "data"])
async def test_entries_of_others_are_understood(bench: BrokerRig, harness: RedisStreamsHarness, field: str) -> None:
    await harness.redis.xadd(bench.queue, {field: b"\xff\x00", "key": "k", "X-Event-Name": "paid", "odd": b"\xff"})
    message = await (await bench.reader()).one()
    assert (message.body, message.key) == (b"\xff\x00", "k")
    assert message.headers == {"x-event-name": "paid", "odd": "\ufffd"}


async def test_an_entry_without_a_body_has_an_empty_one(bench: BrokerRig, harness: RedisStreamsHarness) -> None:
    await harness.redis.xadd(bench.queue, {"id": "5"})
    message = await (await bench.reader()).one()
    assert (message.body, message.headers) == (b"", {"id": "5"})


async def test_what_is_acknowledged_is_deleted_on_request(bench: BrokerRig, harness: RedisStreamsHarness) -> None:
    await bench.publish(b"one", b"two", b"three")
    adapter = harness.adapter(bench.queue, delete_acknowledged=True)
    await adapter.connect()
    reader = bench.read(adapter)
    one, two, _ = await reader.receive(3)
    await adapter.ack(one)
    await adapter.send_to_dlq(two, "why")
    assert await harness.redis.xlen(bench.queue) == 1
    assert await adapter.lag() == 0


async def test_streams_are_trimmed_on_request(bench: BrokerRig, harness: RedisStreamsHarness) -> None:
    publisher = harness.publisher(max_length=100)
    await publisher.connect()
    for _ in range(5):
        await publisher.publish([bench.outgoing(b"x") for _ in range(200)])
    # Redis trims by whole nodes, of a hundred entries.
    assert await harness.redis.xlen(bench.queue) <= 200


async def test_a_topic_that_is_no_stream_is_refused_and_the_others_are_written(
    bench: BrokerRig, harness: RedisStreamsHarness
) -> None:
    await harness.redis.set(f"{bench.queue}:text", "no stream")
    wrong = OutgoingMessage(f"{bench.queue}:text", b"1", {}, "k")
    first, second, third = await (await bench.publisher()).publish([wrong, bench.outgoing(b"1"), wrong])
    assert isinstance(first, BrokerRefused)
    assert isinstance(third, BrokerRefused)
    assert second is None
    adapter = harness.adapter(f"{bench.queue}:text")
    with pytest.raises(BrokerRefused, match="not a stream"):
        await adapter.connect()


@pytest.mark.faults
async def test_a_full_server_takes_all_of_a_call_or_nothing(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis(maxmemory="4mb", maxmemory_policy="noeviction")
    harness = RedisStreamsHarness(server.url, namespace, server)
    bench = BrokerRig(harness, await harness.new_queue())
    publisher = await bench.publisher()
    written, answers = 0, list[BrokerUnavailable | None]()
    for _ in range(100):
        answers = await publisher.publish([bench.outgoing(b"x" * 20_000, key="k") for _ in range(20)])
        assert len({answer is None for answer in answers}) == 1
        written += sum(answer is None for answer in answers)
        if answers[0] is not None:
            break
    assert answers[0] is not None
    assert await harness.redis.xlen(bench.queue) == written
    await bench.close()
    await harness.close()


@pytest.mark.faults
async def test_a_server_that_stops_answering_is_noticed(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis()
    harness = RedisStreamsHarness(server.url, namespace, server, reply_timeout_s=0.5)
    bench = BrokerRig(harness, await harness.new_queue())
    reader = await bench.reader()
    publisher = await bench.publisher()
    await bench.publish(b"one")
    await reader.handle(1)
    server.pause()
    assert [answer is None for answer in await publisher.publish([bench.outgoing(b"two")])] == [False]
    assert not await reader.adapter.health_check()
    server.resume()
    await bench.publish(b"three")
    came: set[bytes | None] = set()
    while b"three" not in came:
        came.add((await reader.handle(1))[0].body)
    await eventually(publisher.health_check)
    await bench.close()
    await harness.close()


def test_a_connection_that_cannot_be_is_told() -> None:
    for options, why in (
        ({"url": "http://somewhere"}, "must start with"),
        ({"ca_file": "ca.pem"}, "rediss"),
        ({"url": "rediss://host", "cert_file": "c.pem"}, "must be set together"),
        ({"host": "h"}, "Extra inputs"),
    ):
        with pytest.raises(ValueError, match=why):
            RedisConfig.model_validate(options)
    shown = repr(RedisConfig.model_validate({"url": f"redis://ann:{PASSWORD}@h", "password": PASSWORD}))
    assert PASSWORD not in shown


@pytest.mark.parametrize("entry_id", ["1763247000000000000-1", "18446744073709551614-3"])
async def test_an_entry_with_an_id_that_is_no_time_comes_like_any_other(
    bench: BrokerRig, harness: RedisStreamsHarness, entry_id: str
) -> None:
    await harness.redis.xadd(bench.queue, {"body": "one"}, id=entry_id)
    (message,) = await (await bench.reader()).handle(1)
    assert (message.message_id, message.body) == (entry_id, b"one")


async def test_a_fetch_that_ends_in_an_unknown_way_is_told(bench: BrokerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a consumer that reads nothing would look like a quiet stream."""
    adapter = bench.harness.adapter(bench.queue)
    await adapter.connect()

    async def broken(*_: object) -> Any:
        await asyncio.sleep(0.05)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(adapter, "_reclaim", broken)
    messages = aiter(adapter.consume())
    with pytest.raises(RuntimeError, match="a mistake"):
        await asyncio.wait_for(anext(messages), 5)


def test_a_url_that_cannot_be_read_does_not_show_its_password() -> None:
    with pytest.raises(ValidationError, match="url is not valid") as caught:
        RedisConfig.model_validate({"url": "redis://:pass/word@host:6379/0"})
    assert "pass/" not in str(caught.value)
    assert "'pass'" not in str(caught.value)


async def test_a_message_whose_acknowledgement_is_on_its_way_is_not_redelivered(
    bench: BrokerRig, harness: RedisStreamsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.publish(b"one")
    reader = await bench.reader()
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
    assert await harness.redis.xpending_range(bench.queue, "readers", "-", "+", 10) == []
    assert adapter._acknowledging == set()
