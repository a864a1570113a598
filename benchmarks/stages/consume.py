"""From a broker to accepted jobs: a topic or queue that was filled before, emptied by one trigger process.

A message counts once its job is accepted by the engine and the message is acknowledged. Keys, deduplication and rows of
`queue_executions` are on, and every message must have its job and its row at the end. FastStream empties the same kind
of queue: with a handler that does nothing, and with one that does the closest equivalent of a submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.audit import Audit
from benchmarks.brokers import Broker
from benchmarks.children import Child, ProbeFailed
from benchmarks.model import FASTSTREAM, FASTSTREAM_PUSH, OURS_LEDGER, Measure
from benchmarks.peers import venv
from benchmarks.stages.stage import Hall, Probe, Stage

CONCURRENCY: Final = 500
_OURS: Final = "benchmarks.sides.messages"
_THEIRS: Final = "benchmarks.peers.with_faststream"
_FEEDER: Final = "benchmarks.sides.feeding"
_PEER: Final = "faststream"
#: The slow one gets fewer messages: a rate does not need as many.
_PUSHED: Final = 0.25
_ROWS: Final = "SELECT count(*) FROM queue_executions WHERE status = 'success'"


class Consume(Stage):
    """One broker."""

    def __init__(self, hall: Hall, broker: Broker, messages: int) -> None:
        self._hall = hall
        self._broker = broker
        self._messages = messages
        self._audit = Audit(hall, self.name)
        self._peer = False

    def prepare(self) -> None:
        self._audit.prepare()
        self._broker.start()
        if _PEER in self._hall.options.peers:
            version = venv.ensure([_PEER])[_PEER]
            self._peer = venv.is_there(version)
            self._hall.results.settings["FastStream"] = version

    def probes(self) -> Sequence[Probe]:
        theirs = [
            Probe(FASTSTREAM, partial(self._run_theirs, FASTSTREAM, False)),
            Probe(FASTSTREAM_PUSH, partial(self._run_theirs, FASTSTREAM_PUSH, True)),
        ]
        return [Probe(OURS_LEDGER, self._run_ours), *(theirs if self._peer else ())]

    def _run_ours(self, round_number: int) -> str:
        self._audit.reset()
        hall, topic = self._hall, self._filled(self._messages)
        settings = {"ledger": self._audit.database.url}
        entry = {
            "queue_name": topic,
            "consumer_group": "bench",
            "concurrency": CONCURRENCY,
            "adapter": {"type": self.name, "connection": self._connection()},
            "runtime": {"task": "noop"},
        }
        with Child(_OURS, "trigger", {"url": hall.redis.url, "settings": settings}, hall.scratch) as child:
            redis, postgres, broker = hall.redis.cpu_s(), hall.postgres.cpu_s(), self._broker.cpu_s()
            answer = child.call("run", messages=self._messages, entry=entry)
            spent = {
                "redis": hall.redis.cpu_s() - redis,
                "postgres": hall.postgres.cpu_s() - postgres,
                "broker": self._broker.cpu_s() - broker,
            }
        rows = self._audit.database.value(_ROWS)
        if rows != self._messages:
            raise ProbeFailed(f"{rows:,} rows of {self._messages:,} messages; they ended as {answer['consumed']}")
        for server, cpu_s in spent.items():
            hall.results.add(f"{self.name}.{server}", OURS_LEDGER, round_number, cpu_s / self._messages * 1e6)
        return self._note(OURS_LEDGER, round_number, answer)

    def _run_theirs(self, side: str, push: bool, round_number: int) -> str:
        hall, messages = self._hall, max(2, round(self._messages * (_PUSHED if push else 1)))
        hall.redis.reset()
        topic = self._filled(messages)
        spec = {"url": self._broker.address, "settings": {"redis": hall.redis.url}}
        with Child(_THEIRS, self.name, spec, hall.scratch, venv.python(_PEER)) as child:
            answer = child.call("run", topic=topic, messages=messages, push=push)
        return self._note(side, round_number, answer)

    def _filled(self, messages: int) -> str:
        topic = self._broker.topic()
        with Child(_FEEDER, self.name, {"url": self._broker.address}, self._hall.scratch) as feeder:
            feeder.call("fill", topic=topic, messages=messages)
        return topic

    def _note(self, side: str, round_number: int, answer: dict[str, Any]) -> str:
        self._hall.results.add(self.name, side, round_number, answer["rate"])
        self._hall.results.add(f"{self.name}.cpu", side, round_number, answer["cpu_us"])
        return f"{answer['rate']:,.0f} messages/s · CPU {answer['cpu_us']:.0f} µs each"

    def _connection(self) -> dict[str, Any]:
        raise NotImplementedError


def _measures(name: str) -> tuple[Measure, ...]:
    return (
        Measure(name, "consumed", "messages/s", more_is_better=True),
        Measure(f"{name}.cpu", "CPU of the consumer", "µs/message", digits=1),
        Measure(f"{name}.redis", "CPU of Redis", "µs/message", digits=1),
        Measure(f"{name}.postgres", "CPU of PostgreSQL", "µs/message", digits=1),
        Measure(f"{name}.broker", "CPU of the broker", "µs/message", digits=1),
    )


class ConsumeKafka(Consume):
    name = "kafka"
    title = f"Kafka to accepted jobs, 1 trigger process, concurrency {CONCURRENCY}"
    measures = _measures(name)

    def __init__(self, hall: Hall) -> None:
        super().__init__(hall, hall.kafka, hall.options.messages)

    def _connection(self) -> dict[str, Any]:
        return {"bootstrap_servers": self._broker.address}


class ConsumeRabbitMQ(Consume):
    name = "rabbitmq"
    title = f"RabbitMQ to accepted jobs, 1 trigger process, concurrency {CONCURRENCY}"
    measures = _measures(name)

    def __init__(self, hall: Hall) -> None:
        # Filling takes longer than emptying.
        super().__init__(hall, hall.rabbitmq, max(1, hall.options.messages // 2))

    def _connection(self) -> dict[str, Any]:
        return {"url": self._broker.address}
