"""What fault tests of triggers and relays share: topics filled in bulk, processes on them, and what came of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec
import yaml
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from holdfast import Holdfast
from holdfast.core.publishing import lane_of
from tests.brokers.kafka_server import KafkaServer
from tests.faults.support import QUEUE, SOURCE, WorkerProcess

_log: Final = logging.getLogger("test.kafka")

#: Takes messages and has them queued; nobody need run them.
APP: Final = """
from holdfast import Holdfast

app = Holdfast()

@app.task
def take(message: dict) -> None: ...
"""

#: `holdfast …`, except that this process dies the moment it would mark its third batch.
DIES_BEFORE_MARKING: Final = """
import asyncio, os, signal
from holdfast.cli.main import main
from holdfast.ledger.postgres.outbox import PostgresOutboxStore

mark, marked, one_by_one = PostgresOutboxStore.record_results, [], asyncio.Lock()

async def killed(*asked):
    async with one_by_one:
        if len(marked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        marked.append(await mark(*asked))
        return marked[-1]

PostgresOutboxStore.record_results = killed
main()
"""


class Processes:
    """`holdfast …` in a folder of its own; all end with the test."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        # Who tests another copy of the source has put it first.
        path = os.pathsep.join(filter(None, [kept.get("PYTHONPATH", ""), str(SOURCE)]))
        self._environment = kept | {"PYTHONPATH": path} | variables
        self._started: list[WorkerProcess] = []

    def start(self, *words: str, program: Sequence[str] = ("-m", "holdfast"), **variables: str) -> WorkerProcess:
        log = self._folder / f"process-{len(self._started)}.log"
        line = [sys.executable, *program, *words]
        process = WorkerProcess(line, self._folder, self._environment | variables, log)
        self._started.append(process)
        return process

    def clean_up(self) -> None:
        for process in self._started:
            process.clean_up()


def write_triggers(folder: Path, *entries: Mapping[str, Any]) -> str:
    """The file and the app beside it."""
    (folder / "app.py").write_text(APP)
    (folder / "triggers.yaml").write_text(yaml.safe_dump({"triggers": list(entries)}))
    return "triggers.yaml"


class Topic:
    """One topic of a real Kafka."""

    def __init__(self, server: KafkaServer, name: str, partitions: int) -> None:
        self.name = name
        self.partitions = partitions
        self._server: dict[str, str | int | float | bool] = {"bootstrap.servers": server.address}
        self._admin = AdminClient(self._server, logger=_log)
        self._admin.create_topics([NewTopic(name, partitions, 1)])[name].result()

    def fill(self, messages: Iterable[tuple[str | None, bytes | None, Any]]) -> None:
        """Write (key, body, headers) in this order."""
        settings = {
            **self._server,
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": 500_000,
        }
        producer = Producer(settings, logger=_log)
        for number, (key, body, headers) in enumerate(messages):
            producer.produce(self.name, body, key=key, headers=headers)
            if not number % 1_000:
                producer.poll(0)
        assert producer.flush(60) == 0

    def read(self) -> list[tuple[int, Any]]:
        """All that is in it, with its partition, in the order of each partition."""
        return list(self._read())

    def _read(self) -> Iterator[tuple[int, Any]]:
        consumer = Consumer({**self._server, "group.id": f"{self.name}-look", "enable.auto.commit": False}, logger=_log)
        try:
            for partition in range(self.partitions):
                place = TopicPartition(self.name, partition, 0)
                _, end = consumer.get_watermark_offsets(place, 10)
                consumer.assign([place])
                at = 0
                while at < end:
                    # It waits for as many as it was asked for.
                    for message in consumer.consume(min(1_000, end - at), 10):
                        assert message.error() is None, message.error()
                        at = (message.offset() or 0) + 1
                        yield partition, message
        finally:
            consumer.close()

    def left(self, group: str) -> int:
        """How many messages the group has not committed."""
        asked = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        places = asked[group].result().topic_partitions
        committed = {place.partition: place.offset for place in places if place.topic == self.name}
        consumer = Consumer({**self._server, "group.id": f"{self.name}-look"}, logger=_log)
        try:
            ends = [
                consumer.get_watermark_offsets(TopicPartition(self.name, partition), 10)[1]
                for partition in range(self.partitions)
            ]
        finally:
            consumer.close()
        return sum(end - max(0, committed.get(partition, 0)) for partition, end in enumerate(ends))


async def accepted(app: Holdfast) -> list[dict[str, Any]]:
    """What was known of each job when it was accepted, in the order of the feed."""
    found: list[dict[str, Any]] = []
    page = await app.engine.read_feed(QUEUE, "", 500)
    while page:
        for entry in page:
            found += [event.data or {} for event in entry.events if event.type == "task.created"]
        # A page begins with the last entry of the one before.
        page = (await app.engine.read_feed(QUEUE, page[-1].position, 500))[1:]
    return found


def by_key(numbered: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The numbers of each key, in the order in which they came."""
    numbers: dict[str, list[int]] = {}
    for each in numbered:
        numbers.setdefault(each["key"], []).append(each["n"])
    return numbers


async def fill_outbox(
    url: str, topic: str, keys: int, each: int, destination: str = "default"
) -> dict[str, tuple[str, int]]:
    """`each` numbered events of every key, mixed; event id → key and number."""
    written = {f"{topic}-{key}-{n}": (f"key-{key}", n) for n in range(each) for key in range(keys)}
    connection = await asyncpg.connect(url)
    try:
        now = await connection.fetchval("SELECT clock_timestamp()")
        rows = [
            (
                "default",
                event_id,
                destination,
                topic,
                key,
                lane_of(destination, topic, key, event_id),
                msgspec.json.encode({"key": key, "n": n}).decode(),
                now,
            )
            for event_id, (key, n) in written.items()
        ]
        columns = ("tenant_id", "id", "destination", "topic", "key", "lane", "payload", "created_at")
        await connection.copy_records_to_table("outbox_events", records=rows, columns=columns)
        await connection.execute("ANALYZE outbox_events")
        await connection.execute("SELECT pg_notify('holdfast_outbox', '')")
    finally:
        await connection.close()
    return written


async def statuses(url: str) -> dict[str, int]:
    """How many events are in each status."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT status, count(*) FROM outbox_events GROUP BY status")
        return {row[0]: row[1] for row in rows}
    finally:
        await connection.close()
