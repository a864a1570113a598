"""holdfast between brokers and stores: a trigger, a relay, and writers for it; each in a separate process."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any, Final

import asyncpg
import msgspec
from confluent_kafka import Consumer

from benchmarks.sides.channel import ARGUMENT, Answer, Spec, main, serve, watched
from benchmarks.sides.feeding import KEYS
from holdfast import Holdfast
from holdfast.execution.backend import backend_of
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.service import build_trigger
from holdfast.upkeep.relay_service import RelayService

#: Events of one transaction while the outbox is filled; and while delay is measured, and connections that write then.
_PART: Final = 2_000
_TOGETHER: Final = 5
_WRITERS: Final = 32
_READ_WITHIN_S: Final = 30.0


class Stamped(msgspec.Struct):
    """Of a CloudEvent: which one, and when it was written."""

    id: str
    time: datetime


async def trigger(spec: Spec) -> None:
    """As `holdfast trigger run` builds it, with one task."""
    app = Holdfast(spec.url, **spec.settings)

    @app.task
    async def noop(argument: dict[str, Any]) -> int:
        return 1

    async def run(messages: int, entry: dict[str, Any]) -> Answer:
        built = build_trigger(app, TriggerEntry.model_validate(entry))
        counts = built.trigger.counts
        async with built.trigger:
            answer = await watched(lambda: sum(counts.consumed.values()), messages)
        return answer | {"consumed": counts.consumed, "records_lost": counts.records_lost}

    async with app:
        await serve({"run": run})


async def relay(spec: Spec) -> None:
    """As `holdfast outbox relay` runs it."""
    app = Holdfast(spec.url, **spec.settings)
    async with app:
        outbox = backend_of(app).outbox
        assert outbox is not None
        relaying = RelayService(app, outbox)
        running: list[asyncio.Task[None]] = []

        async def start() -> Answer:
            running.append(asyncio.create_task(relaying.run()))
            return {}

        async def run(events: int) -> Answer:
            await start()
            return await watched(lambda: _sent(app), events)

        await serve({"start": start, "run": run})
        relaying.stop()
        await asyncio.gather(*running)


async def write(spec: Spec) -> None:
    """Users' transactions."""
    app = Holdfast(spec.url, **spec.settings)
    pool = await asyncpg.create_pool(spec.settings["ledger"], min_size=_WRITERS, max_size=_WRITERS)

    async def fill(topic: str, events: int) -> Answer:
        """Many events in a transaction."""
        async with pool.acquire() as connection:
            for start in range(0, events, _PART):
                async with connection.transaction():
                    numbers = range(start, min(events, start + _PART))
                    await app.outbox.add_many(connection, [_event(topic, number) for number in numbers])
            await connection.execute("ANALYZE outbox_events")
        return {}

    async def steady(topic: str, per_s: int, seconds: float) -> Answer:
        """A few events in a transaction, at a steady pace; a late writer catches up."""
        total, began = round(per_s * seconds), time.monotonic()

        async def writer(first: int) -> None:
            for start in range(first, total, _WRITERS * _TOGETHER):
                if (early_s := began + start / per_s - time.monotonic()) > 0:
                    await asyncio.sleep(early_s)
                numbers = range(start, min(total, start + _TOGETHER))
                async with pool.acquire() as connection, connection.transaction():
                    await app.outbox.add_many(connection, [_event(topic, number) for number in numbers])

        await asyncio.gather(*(writer(number * _TOGETHER) for number in range(_WRITERS)))
        return {"events": total, "rate": total / (time.monotonic() - began)}

    await serve({"fill": fill, "steady": steady})
    pool.terminate()


async def read(spec: Spec) -> None:
    """What came to Kafka."""

    async def delays(topic: str, events: int) -> Answer:
        """From the time in the event to the broker's own stamp on the message."""
        return {"late_ms": await asyncio.to_thread(_delays, spec.url, topic, events)}

    await serve({"delays": delays})


def _delays(address: str, topic: str, events: int) -> list[float]:
    decode = msgspec.json.Decoder(Stamped).decode
    consumer = Consumer({"bootstrap.servers": address, "group.id": "bench", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    late, deadline = dict[str, float](), time.monotonic() + _READ_WITHIN_S
    while len(late) < events and time.monotonic() < deadline:
        for message in consumer.consume(1_000, 0.2):
            event = decode(message.value() or b"")
            late.setdefault(event.id, message.timestamp()[1] - event.time.timestamp() * 1e3)
    consumer.close()
    return sorted(late.values())


def _event(topic: str, number: int) -> NewOutboxEvent:
    return NewOutboxEvent(topic=topic, key=f"key-{number % KEYS}", payload=ARGUMENT)


def _sent(app: Holdfast) -> int:
    numbers = app.engine.counters.outbox
    return 0 if numbers is None else sum(numbers.success.buckets)


if __name__ == "__main__":
    main({"trigger": trigger, "relay": relay, "write": write, "read": read})
