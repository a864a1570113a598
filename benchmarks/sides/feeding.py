"""Fills topics and queues for a measurement: JSON of 200 bytes, a thousand keys."""

from __future__ import annotations

import aiormq
from aiormq import spec as amqp
from confluent_kafka import Producer

from benchmarks.sides.channel import ARGUMENT, Answer, Spec, main, serve
from holdfast.core.codec import encode_json

KEYS = 1_000
_BODY = encode_json(ARGUMENT, "a message", 1_000)
#: The client's own queue is flushed after this number of messages.
_PART = 10_000


async def kafka(spec: Spec) -> None:
    """Into Kafka."""

    async def fill(topic: str, messages: int) -> Answer:
        producer = Producer({"bootstrap.servers": spec.url, "linger.ms": 20, "batch.size": 200_000})
        for start in range(0, messages, _PART):
            for number in range(start, min(messages, start + _PART)):
                producer.produce(topic, _BODY, key=f"key-{number % KEYS}")
            producer.flush()
        return {}

    await serve({"fill": fill})


async def rabbitmq(spec: Spec) -> None:
    """Into RabbitMQ: persistent, in a quorum queue."""

    async def fill(topic: str, messages: int) -> Answer:
        connection = await aiormq.connect(spec.url)
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, aiormq.Channel)
        await channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "quorum"})
        for number in range(messages):
            properties = amqp.Basic.Properties(
                delivery_mode=2, message_id=f"{topic}-{number}", headers={"x-key": f"key-{number % KEYS}"}
            )
            last = number % _PART == _PART - 1 or number == messages - 1
            await channel.basic_publish(_BODY, routing_key=topic, properties=properties, wait=last)
        # Answered once all before it were taken.
        await channel.basic_qos(prefetch_count=1)
        await connection.close()
        return {}

    await serve({"fill": fill})


if __name__ == "__main__":
    main({"kafka": kafka, "rabbitmq": rabbitmq})
