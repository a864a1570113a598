"""Triggers on real brokers, end to end: many duplicates, and killed brokers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Holdfast
from holdfast.brokers.factory import build_adapter, build_publisher
from holdfast.brokers.port import OutgoingMessage
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.testing import drain
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.brokers.kafka_server import KafkaServer, MakeKafka
from tests.brokers.rabbitmq_server import PASSWORD, USER, MakeRabbit, RabbitServer
from tests.faults.broker_support import Topic, group_by_key, read_created_jobs
from tests.faults.support import eventually
from tests.faults.test_kafka_triggers import decode_message

pytestmark = [pytest.mark.faults, pytest.mark.redis]


def rabbitmq_connection(server: RabbitServer) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": server.port, "user": USER, "password": PASSWORD, "timeout_s": 5}


def kafka_connection(server: KafkaServer) -> dict[str, Any]:
    # The broker is back before the session timeout of its members.
    return {"bootstrap_servers": server.address, "session_timeout_s": 20}


@pytest.fixture(params=["rabbitmq", "redis"])
def broker(request: pytest.FixtureRequest) -> tuple[str, Mapping[str, Any]]:
    """Type and connection of a broker."""
    if request.param == "redis":
        return "redis", {"url": request.getfixturevalue("redis_url")}
    return "rabbitmq", rabbitmq_connection(request.getfixturevalue("rabbitmq_server"))


async def publish(kind: str, connection: Mapping[str, Any], messages: list[OutgoingMessage]) -> None:
    publisher = build_publisher(kind, connection)
    await publisher.connect()
    try:
        for start in range(0, len(messages), 500):
            batch = messages[start : start + 500]
            assert await publisher.publish(batch) == [None] * len(batch)
    finally:
        await publisher.close()


async def test_a_storm_of_duplicates_on_four_triggers(
    broker: tuple[str, Mapping[str, Any]], redis_url: str, namespace: str
) -> None:
    """10,000 messages of 100 keys: 100 runs, everything acknowledged, every duplicate counted."""
    kind, connection = broker
    queue = f"{namespace}-storm"
    app, runs = Holdfast(redis_url, namespace=namespace), Counter[int]()

    @app.task
    async def handle(message: int) -> None:
        runs[message] += 1

    config = QueueTriggerConfig(queue_name=queue, consumer_group="shop", concurrency=50, prefetch=200)
    async with app:
        adapters = [build_adapter(kind, connection, queue, "shop", config.prefetch) for _ in range(4)]
        triggers = [QueueTrigger(config, adapter, TaskRuntime(app, "handle")) for adapter in adapters]
        await asyncio.gather(*(trigger.start() for trigger in triggers))
        storm = [
            OutgoingMessage(queue, b"%d" % (number % 100), {"x-dedup-key": str(number % 100)}, message_id=f"m-{number}")
            for number in range(10_000)
        ]
        await publish(kind, connection, storm)
        try:
            await eventually(
                lambda: sum(sum(trigger.counts.consumed.values()) for trigger in triggers) >= 10_000, "the storm", 60
            )
            await eventually(lambda: _has_no_lag(adapters[0]), "everything to be acknowledged")
        finally:
            await asyncio.gather(*(trigger.stop() for trigger in triggers))
        await drain(app)
        created = await read_created_jobs(app)
    assert runs == dict.fromkeys(range(100), 1)
    assert len(created) == 100
    counts = [trigger.counts for trigger in triggers]
    assert (
        sum(count.dedup_hits for count in counts)
        == sum(count.consumed[ExecutionStatus.DUPLICATE] for count in counts)
        == 9_900
    )
    assert sum(count.consumed[ExecutionStatus.SUCCESS] for count in counts) == 100
    assert sum(sum(count.consumed.values()) for count in counts) == 10_000
    assert all(sum(count.consumed.values()) for count in counts), "a trigger received no message"
    # No message is redelivered.
    successor = build_adapter(kind, connection, queue, "shop", 10)
    await successor.connect()
    assert await successor.lag() == 0
    if kind == "redis":
        async with Redis.from_url(connection["url"]) as client:
            assert (await client.xpending(queue, "shop"))["pending"] == 0
    await successor.close()


async def _has_no_lag(adapter: Any) -> bool:
    return bool(await adapter.lag() == 0)


class GatedRuntime(TaskRuntime):
    """Runs 500 messages; further ones block until the gate is open."""

    def __init__(self, app: Holdfast, task: str) -> None:
        super().__init__(app, task)
        self.gate = asyncio.Event()
        self.waiting = 0
        self._calls = 0

    async def run_call(self, call: Any) -> Any:
        self._calls += 1
        if self._calls > 500 and not self.gate.is_set():
            self.waiting += 1
            await self.gate.wait()
        return await super().run_call(call)


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_a_broker_killed_during_a_batch_loses_nothing(
    request: pytest.FixtureRequest, kind: str, redis_url: str, namespace: str
) -> None:
    """Without a restart of the trigger, every message becomes one job, in order per key."""
    server: Any
    if kind == "kafka":
        make_kafka: MakeKafka = request.getfixturevalue("make_kafka")
        server = make_kafka()
        connection = kafka_connection(server)
        Topic(server, "orders", 4)
    else:
        make_rabbitmq: MakeRabbit = request.getfixturevalue("make_rabbitmq")
        server = make_rabbitmq()
        # Otherwise RabbitMQ delivers new messages before those of the disconnected consumer.
        connection = rabbitmq_connection(server) | {"single_active_consumer": True}
    app = Holdfast(redis_url, namespace=namespace, feed_limit=1_000_000)

    @app.task
    async def take(message: dict[str, Any]) -> None: ...

    config = QueueTriggerConfig(queue_name="orders", consumer_group="shop", concurrency=10, prefetch=50)
    messages = [
        OutgoingMessage("orders", b'{"key": "key-%d", "n": %d}' % (key, n), {}, f"key-{key}", f"{key}-{n}")
        for n in range(150)
        for key in range(20)
    ]
    async with app:
        runtime = GatedRuntime(app, "take")
        adapter = build_adapter(kind, connection, "orders", "shop", config.prefetch)
        trigger = QueueTrigger(config, adapter, runtime)
        async with trigger:
            if kind == "rabbitmq":
                await asyncio.to_thread(server.wait_for_register, "orders")
            await publish(kind, connection, messages)
            await eventually(lambda: runtime.waiting, "a first part", 60)
            server.kill()

            async def unhealthy() -> bool:
                return (await trigger.health()).status == "unhealthy"

            await eventually(unhealthy, "the trigger to be unhealthy")
            # Blocked messages run now; they cannot be acknowledged.
            runtime.gate.set()
            # Not in a thread: the server ends with the thread that started it.
            server.start()
            await eventually(lambda: trigger.counts.consumed[ExecutionStatus.SUCCESS] >= 3_000, "the rest", 60)
            await eventually(lambda: _has_no_lag(adapter), "everything to be acknowledged")
            assert (await trigger.health()).status == "healthy"
            counts = trigger.counts
            assert (
                sum(counts.consumed.values())
                == counts.consumed[ExecutionStatus.SUCCESS] + counts.consumed[ExecutionStatus.DUPLICATE]
            )
        created = await read_created_jobs(app)
    assert group_by_key(decode_message(job) for job in created) == {f"key-{key}": list(range(150)) for key in range(20)}
