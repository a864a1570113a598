"""The outbox: events that were written before, relayed to Kafka as fast as one relay can; and how long an event takes
from its transaction to the broker at a steady pace.

Delay is from the row's `created_at`, by PostgreSQL's clock when the transaction began, to the broker's own stamp when
it wrote the message: both clocks are this machine's. Every event must be in the topic, and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.audit import Audit
from benchmarks.children import Child, ProbeFailed
from benchmarks.model import OURS_LEDGER, Measure, percentile
from benchmarks.stages.stage import Hall, Probe, Stage

PER_S: Final = 1_000
_MODULE: Final = "benchmarks.sides.messages"
_SHARES: Final = {"p50": 0.50, "p99": 0.99, "p99.9": 0.999}
_WAITING: Final = "SELECT count(*) FROM outbox_events WHERE status <> 'SENT'"


class _Outbox(Stage):
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, self.name)

    def prepare(self) -> None:
        self._audit.prepare()
        self._hall.kafka.start()

    def probes(self) -> Sequence[Probe]:
        return [Probe(OURS_LEDGER, self._run)]

    def _run(self, round_number: int) -> str:
        raise NotImplementedError

    def _child(self, role: str) -> Child:
        target = {"type": "kafka", "connection": {"bootstrap_servers": self._hall.kafka.address}}
        settings: dict[str, Any] = {"ledger": self._audit.database.url, "outbox_targets": {"default": target}}
        return Child(_MODULE, role, {"url": self._hall.redis.url, "settings": settings}, self._hall.scratch)


class Outbox(_Outbox):
    """One relay."""

    name = "outbox"
    title = "Outbox in PostgreSQL to Kafka, 1 relay"
    measures = (
        Measure("outbox", "published and marked", "events/s", more_is_better=True),
        Measure("outbox.cpu", "CPU of the relay", "µs/event", digits=1),
        Measure("outbox.postgres", "CPU of PostgreSQL", "µs/event", digits=1),
        Measure("outbox.broker", "CPU of Kafka", "µs/event", digits=1),
    )

    def _run(self, round_number: int) -> str:
        hall, events = self._hall, self._hall.options.messages
        self._audit.reset()
        topic = hall.kafka.topic()
        with self._child("write") as writer:
            writer.call("fill", topic=topic, events=events)
        with self._child("relay") as relay:
            postgres, kafka = hall.postgres.cpu_s(), hall.kafka.cpu_s()
            answer = relay.call("run", events=events)
            postgres, kafka = hall.postgres.cpu_s() - postgres, hall.kafka.cpu_s() - kafka
        published, left = hall.kafka.messages(topic), self._audit.database.value(_WAITING)
        if published != events or left:
            raise ProbeFailed(f"{published:,} messages of {events:,} events; {left:,} are not marked")
        values = {
            "outbox": answer["rate"],
            "outbox.cpu": answer["cpu_us"],
            "outbox.postgres": postgres / events * 1e6,
            "outbox.broker": kafka / events * 1e6,
        }
        for measure, value in values.items():
            hall.results.add(measure, OURS_LEDGER, round_number, value)
        parts = " + ".join(f"{values[name]:.0f}" for name in ("outbox.cpu", "outbox.postgres", "outbox.broker"))
        return f"{answer['rate']:,.0f} events/s · CPU {parts} µs each"


class Delay(_Outbox):
    """One relay, and a process with 32 connections that writes five events a transaction."""

    name = "delay"
    title = f"Outbox delay at {PER_S:,} events/s, transaction to Kafka"
    measures = (
        *(Measure(f"delay.{name}", name, "ms", digits=1) for name in _SHARES),
        Measure("delay.rate", "events written", "events/s", more_is_better=True),
    )

    def _run(self, round_number: int) -> str:
        hall = self._hall
        self._audit.reset()
        warm_up, topic = hall.kafka.topic(), hall.kafka.topic()
        with self._child("write") as writer, self._child("relay") as relay:
            relay.call("start")
            writer.call("steady", topic=warm_up, per_s=PER_S, seconds=0.5)
            sent = writer.call("steady", topic=topic, per_s=PER_S, seconds=hall.options.delay_s)
            with Child(_MODULE, "read", {"url": hall.kafka.address}, hall.scratch) as reader:
                late_ms: list[float] = reader.call("delays", topic=topic, events=sent["events"])["late_ms"]
        if len(late_ms) != sent["events"]:
            raise ProbeFailed(f"{len(late_ms):,} of {sent['events']:,} events published")
        shares = {name: percentile(late_ms, share) for name, share in _SHARES.items()}
        for name, value in shares.items():
            hall.results.add(f"delay.{name}", OURS_LEDGER, round_number, value)
        hall.results.add("delay.rate", OURS_LEDGER, round_number, sent["rate"])
        summary = " · ".join(f"{name} {value:.0f}" for name, value in shares.items())
        return f"{summary} ms of {len(late_ms):,} events at {sent['rate']:,.0f} events/s"
