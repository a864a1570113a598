"""Kafka and RabbitMQ servers, started by the first stage that needs them. Each probe has its own topics and queues."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.children import ProbeFailed
from benchmarks.usage import process_cpu_s
from holdfast.verification.chaos.servers import ServerProcess
from tests.brokers.kafka_server import KafkaServer
from tests.brokers.rabbitmq_server import RabbitServer
from tools.servers import KAFKA, RABBITMQ, Server, find

PARTITIONS: Final = 4
_ANSWER_S: Final = 30.0

_numbers: Final = count(1)


class Kafka:
    """One node that is its own controller."""

    name = "Kafka"

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch / "kafka"
        self._server: KafkaServer | None = None

    @property
    def address(self) -> str:
        return self._running.address

    def start(self) -> None:
        """Start the server unless it runs."""
        if self._server is None:
            self._server = KafkaServer(_binary(KAFKA), self._folder)
            self._server.start()

    def topic(self) -> str:
        """Create a topic. The broker sets the timestamps of messages when it writes them."""
        name = f"bench-{next(_numbers)}"
        settings = {"message.timestamp.type": "LogAppendTime"}
        # Named, so that it lives until it has the answer.
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        made = admin.create_topics([NewTopic(name, PARTITIONS, 1, config=settings)])
        made[name].result(_ANSWER_S)
        return name

    def messages(self, topic: str) -> int:
        """How many were written to it."""
        reader = Consumer({"bootstrap.servers": self.address, "group.id": "bench-count"})
        try:
            ends = [
                reader.get_watermark_offsets(TopicPartition(topic, number), _ANSWER_S) for number in range(PARTITIONS)
            ]
        finally:
            reader.close()
        return sum(int(end) for _, end in ends)

    def cpu_s(self) -> float:
        """CPU time of the server so far."""
        return _cpu_s(self._running)

    def close(self) -> None:
        """Stop the server and delete its data."""
        if self._server is not None:
            self._server.remove()

    @property
    def _running(self) -> KafkaServer:
        if self._server is None:
            raise ProbeFailed("Kafka was not started")
        return self._server


class RabbitMQ:
    """One node."""

    name = "RabbitMQ"

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch / "rabbitmq"
        self._server: RabbitServer | None = None

    @property
    def address(self) -> str:
        return self._running.url

    def start(self) -> None:
        """Start the server unless it runs."""
        if self._server is None:
            self._server = RabbitServer(_binary(RABBITMQ), self._folder)
            self._server.start()

    def topic(self) -> str:
        """Name of a new quorum queue, which the process that fills it declares."""
        return f"bench-{next(_numbers)}"

    def cpu_s(self) -> float:
        """CPU time of the server so far."""
        return _cpu_s(self._running)

    def close(self) -> None:
        """Stop the server and delete its data."""
        if self._server is not None:
            self._server.remove()

    @property
    def _running(self) -> RabbitServer:
        if self._server is None:
            raise ProbeFailed("RabbitMQ was not started")
        return self._server


Broker = Kafka | RabbitMQ


def _binary(server: Server) -> Path:
    binary = find(server)
    if binary is None:
        raise ProbeFailed(f"no {server.name} here; run: {server.how_to_install}")
    return binary


def _cpu_s(server: ServerProcess) -> float:
    return process_cpu_s(server.pid)
