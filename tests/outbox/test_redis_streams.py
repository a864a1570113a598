"""From the outbox to Redis Streams: a real broker, in order per key, and one that goes away and comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from holdfast.ledger.port.messages import OutboxStatus
from holdfast.outbox.writer import NewOutboxEvent
from tests.conftest import MakeServer
from tests.outbox.support import World, until
from tests.outbox.test_relay import check_order

MakeWorld = Callable[..., Any]


def to_redis(url: str) -> dict[str, Any]:
    connection = {"url": url, "connect_timeout_s": 1, "reply_timeout_s": 1}
    return {"default": {"type": "redis", "connection": connection}}


def events(stream: str, keys: int, each: int) -> list[NewOutboxEvent]:
    return [
        NewOutboxEvent(topic=stream, key=f"key-{key}", payload={"key": key, "n": number})
        for number in range(each)
        for key in range(keys)
    ]


async def entries(url: str, stream: str) -> list[dict[str, str]]:
    async with Redis.from_url(url, decode_responses=True) as client:
        found: Any = await client.xrange(stream)
    return [entry for _, entry in found]


async def test_in_order_per_key(make_world: MakeWorld, redis_url: str, namespace: str) -> None:
    world: World = await make_world(outbox_targets=to_redis(redis_url), outbox_batch=50)
    stream = f"{namespace}:orders"
    written = await world.write(*events(stream, 10, 20))
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
    found = await entries(redis_url, stream)
    documents = [msgspec.json.decode(entry["body"]) for entry in found]
    check_order([document["data"] for document in documents], 10, 20)
    assert {entry["x-dedup-key"] for entry in found} == {document["id"] for document in documents} == set(written)
    assert {entry["content-type"] for entry in found} == {"application/cloudevents+json"}


@pytest.mark.faults
async def test_a_broker_that_goes_and_comes_back(make_world: MakeWorld, make_redis: MakeServer) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    world: World = await make_world(outbox_targets=to_redis(server.url), outbox_batch=20)
    async with world.relay():
        await world.write(*events("orders", 5, 10))
        await until(lambda: world.all_are(OutboxStatus.SENT))
        server.stop()
        await world.write(*events("later", 5, 10))

        async def trouble() -> bool:
            return len(await world.events(status=OutboxStatus.RETRYING)) >= 5

        await until(trouble)
        server.start()
        await until(lambda: world.all_are(OutboxStatus.SENT), 30)
    for stream in ("orders", "later"):
        bodies = [msgspec.json.decode(entry["body"])["data"] for entry in await entries(server.url, stream)]
        check_order(bodies, 5, 10, repeats=True)
