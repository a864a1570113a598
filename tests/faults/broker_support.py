"""Shared by fault tests of triggers and relays: topics, outboxes, processes, and readers of the results."""

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

#: Accepts messages as jobs, which need not run.
APP: Final = """
from holdfast import Holdfast

app = Holdfast()

@app.task
def take(message: dict) -> None: ...
"""

#: `holdfast …` in a process that is killed before it records the results of its third batch.
KILLED_BEFORE_RECORDING: Final = """
import asyncio, os, signal
from holdfast.cli.main import main
from holdfast.ledger.postgres.outbox import PostgresOutboxStore

record, recorded, lock = PostgresOutboxStore.record_results, [], asyncio.Lock()

async def record_or_die(*args):
    async with lock:
        if len(recorded) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        recorded.append(await record(*args))
        return recorded[-1]

PostgresOutboxStore.record_results = record_or_die
main()
"""


class Processes:
    """Starts `holdfast …` processes in one folder. They end with the test."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        # Another copy of the source under test comes first.
        path = os.pathsep.join(filter(None, [inherited.get("PYTHONPATH", ""), str(SOURCE)]))
        self._environment = inherited | {"PYTHONPATH": path} | variables
        self._started: list[WorkerProcess] = []

    def start(self, *args: str, program: Sequence[str] = ("-m", "holdfast"), **variables: str) -> WorkerProcess:
        log = self._folder / f"process-{len(self._started)}.log"
        command = [sys.executable, *program, *args]
        process = WorkerProcess(command, self._folder, self._environment | variables, log)
        self._started.append(process)
        return process

    def clean_up(self) -> None:
        for process in self._started:
            process.clean_up()


def write_triggers(folder: Path, *entries: Mapping[str, Any]) -> str:
    """Write the trigger file and its app. Return the name of the file."""
    (folder / "app.py").write_text(APP)
    (folder / "triggers.yaml").write_text(yaml.safe_dump({"triggers": list(entries)}))
    return "triggers.yaml"


class Topic:
    """A topic on a real Kafka broker."""

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
        """Return all messages with their partitions, in order per partition."""
        return list(self._read())

    def _read(self) -> Iterator[tuple[int, Any]]:
        consumer = Consumer(
            {**self._server, "group.id": f"{self.name}-inspect", "enable.auto.commit": False}, logger=_log
        )
        try:
            for partition in range(self.partitions):
                start = TopicPartition(self.name, partition, 0)
                _, end = consumer.get_watermark_offsets(start, 10)
                consumer.assign([start])
                offset = 0
                while offset < end:
                    # `consume` waits for the requested number of messages.
                    for message in consumer.consume(min(1_000, end - offset), 10):
                        assert message.error() is None, message.error()
                        offset = (message.offset() or 0) + 1
                        yield partition, message
        finally:
            consumer.close()

    def count_uncommitted(self, group: str) -> int:
        """Return the number of messages that the group has not committed."""
        offsets = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        positions = offsets[group].result().topic_partitions
        committed = {position.partition: position.offset for position in positions if position.topic == self.name}
        consumer = Consumer({**self._server, "group.id": f"{self.name}-inspect"}, logger=_log)
        try:
            ends = [
                consumer.get_watermark_offsets(TopicPartition(self.name, partition), 10)[1]
                for partition in range(self.partitions)
            ]
        finally:
            consumer.close()
        return sum(end - max(0, committed.get(partition, 0)) for partition, end in enumerate(ends))


async def read_created_jobs(app: Holdfast) -> list[dict[str, Any]]:
    """Return the data of the created events of all jobs, in the order of the feed."""
    created: list[dict[str, Any]] = []
    page = await app.engine.read_feed(QUEUE, "", 500)
    while page:
        for entry in page:
            created += [event.data or {} for event in entry.events if event.type == "task.created"]
        # A page starts with the last entry of the previous one.
        page = (await app.engine.read_feed(QUEUE, page[-1].position, 500))[1:]
    return created


def group_by_key(numbered: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the numbers of each key in order."""
    numbers: dict[str, list[int]] = {}
    for each in numbered:
        numbers.setdefault(each["key"], []).append(each["n"])
    return numbers


async def fill_outbox(
    url: str, topic: str, keys: int, each: int, destination: str = "default"
) -> dict[str, tuple[str, int]]:
    """Write `each` numbered events of every key, interleaved. Return key and number by event id."""
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


async def count_statuses(url: str) -> dict[str, int]:
    """Return the number of events by status."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT status, count(*) FROM outbox_events GROUP BY status")
        return {row[0]: row[1] for row in rows}
    finally:
        await connection.close()
