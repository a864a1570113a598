"""The relay with Redis Streams as the broker: order per key, and an outage of the broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from holdfast.ledger.port.messages import OutboxStatus
from holdfast.outbox.writer import NewOutboxEvent
from tests.conftest import MakeServer
from tests.outbox.support import Deployment, until
from tests.outbox.test_relay import check_order

MakeDeployment = Callable[..., Any]


def redis_targets(url: str) -> dict[str, Any]:
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
        rows: Any = await client.xrange(stream)
    return [entry for _, entry in rows]


async def test_events_are_published_in_order_per_key(
    make_deployment: MakeDeployment, redis_url: str, namespace: str
) -> None:
    deployment: Deployment = await make_deployment(outbox_targets=redis_targets(redis_url), outbox_batch=50)
    stream = f"{namespace}:orders"
    written = await deployment.write(*events(stream, 10, 20))
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    rows = await entries(redis_url, stream)
    documents = [msgspec.json.decode(entry["body"]) for entry in rows]
    check_order([document["data"] for document in documents], 10, 20)
    assert {entry["x-dedup-key"] for entry in rows} == {document["id"] for document in documents} == set(written)
    assert {entry["content-type"] for entry in rows} == {"application/cloudevents+json"}


@pytest.mark.faults
async def test_an_outage_of_the_broker_loses_and_reorders_nothing(
    make_deployment: MakeDeployment, make_redis: MakeServer
) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    deployment: Deployment = await make_deployment(outbox_targets=redis_targets(server.url), outbox_batch=20)
    async with deployment.relay():
        await deployment.write(*events("orders", 5, 10))
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
        server.stop()
        await deployment.write(*events("later", 5, 10))

        async def is_failing() -> bool:
            return len(await deployment.events(status=OutboxStatus.RETRYING)) >= 5

        await until(is_failing)
        server.start()
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT), 30)
    for stream in ("orders", "later"):
        bodies = [msgspec.json.decode(entry["body"])["data"] for entry in await entries(server.url, stream)]
        check_order(bodies, 5, 10, repeats=True)
