"""FastStream: consumers that do nothing, or push every message to a Redis list. Without log lines, on uvloop.

Kafka by aiokafka: offsets are committed periodically, regardless of the outcome; up to 500 handlers at a time
where they wait for Redis. RabbitMQ by aio-pika: acknowledged after the handler, 500 in flight.
"""

from __future__ import annotations

from typing import Any, Final

import redis.asyncio
from faststream.kafka import KafkaBroker  # type: ignore[import-not-found]
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue  # type: ignore[import-not-found]

from benchmarks.sides.channel import Answer, Spec, main, serve, watched

_CONCURRENCY: Final = 500


async def kafka(spec: Spec) -> None:
    """Consumes from Kafka."""

    def subscribed(topic: str, push: bool) -> tuple[Any, Any]:
        broker = KafkaBroker(spec.url, logger=None)
        workers = _CONCURRENCY if push else None
        return broker, broker.subscriber(topic, group_id="bench", auto_offset_reset="earliest", max_workers=workers)

    await _serve(spec, subscribed)


async def rabbitmq(spec: Spec) -> None:
    """Consumes from RabbitMQ."""

    def subscribed(topic: str, push: bool) -> tuple[Any, Any]:
        broker = RabbitBroker(spec.url, logger=None, default_channel=Channel(prefetch_count=_CONCURRENCY))
        return broker, broker.subscriber(RabbitQueue(topic, queue_type=QueueType.QUORUM, durable=True))

    await _serve(spec, subscribed)


async def _serve(spec: Spec, subscribed: Any) -> None:
    client = redis.asyncio.Redis.from_url(spec.settings["redis"], max_connections=_CONCURRENCY)

    async def run(topic: str, messages: int, push: bool) -> Answer:
        broker, subscriber = subscribed(topic, push)
        done = 0

        async def nothing(body: dict[str, Any]) -> None:
            nonlocal done
            done += 1

        async def pushes(body: dict[str, Any]) -> None:
            nonlocal done
            await client.rpush(topic, body["a"])
            done += 1

        subscriber(pushes if push else nothing)
        await broker.start()
        answer = await watched(lambda: done, messages)
        await broker.stop()
        return answer

    await serve({"run": run})
    await client.aclose()


if __name__ == "__main__":
    main({"kafka": kafka, "rabbitmq": rabbitmq})
