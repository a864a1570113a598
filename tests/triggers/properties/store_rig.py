"""Triggers on a real store: an embedded app, opened once for all examples of a module.

Each example has a separate queue. The clock moves only when it is advanced; retries advance it and take no time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, generate_latest

from holdfast import Context, Holdfast
from holdfast.brokers.memory import MemoryBroker, MemoryConfig
from holdfast.brokers.port import OutgoingMessage, RawMessage
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import Execution
from holdfast.observe.counters import TriggerStats
from holdfast.observe.prometheus import trigger_metrics
from holdfast.testing import ManualClock, drain
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import LedgerIdempotencyStore
from holdfast.triggers.runtime import CallableRuntime, Runtime
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.observe.support import samples
from tests.triggers.rig import RecordingAdapter, until

T = TypeVar("T")
Kind = Literal["task", "callable"]
Act = Callable[[str, Mapping[str, Any], str | None, str], Awaitable[Any]]

KINDS: Final[tuple[Kind, ...]] = ("task", "callable")
_numbers: Final = count(1)


class Store:
    """One app for all examples, on a separate loop."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.clock = ManualClock()
        self._path = folder / "all.db"
        self.app = Holdfast(f"sqlite:///{self._path}", clock=self.clock)
        #: Tenant and message of every run.
        self.ran: list[tuple[str, Any]] = []

        @self.app.task
        async def handle(context: Context, message: Any) -> None:
            self.ran.append((context.tenant_id, message))

    def run_example(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(scenario)

    def durations(self, queue_name: str) -> dict[str, int]:
        """Return the column `duration_ms` of a queue's rows by message."""
        with closing(sqlite3.connect(self._path)) as file:
            query = "SELECT message_id, duration_ms FROM queue_executions WHERE queue_name = ?"
            return dict(file.execute(query, (queue_name,)).fetchall())

    async def finish_jobs(self) -> None:
        """Run all jobs to their end."""
        await drain(self.app)


@contextmanager
def open_store(folder: Path) -> Iterator[Store]:
    """Open the store for the block."""
    with asyncio.Runner() as runner:
        store = Store(folder, runner)
        runner.run(store.app.open())
        try:
            yield store
        finally:
            runner.run(store.app.close())


class LossyAckAdapter(RecordingAdapter):
    """Loses the first acknowledgement of the messages in `lose_ack_of`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lose_ack_of: set[str] = set()

    async def ack(self, message: RawMessage) -> None:
        if message.message_id in self.lose_ack_of:
            self.lose_ack_of.discard(message.message_id)
            raise ConnectionError("the reply was lost")
        await super().ack(message)


class TriggerRig:
    """One queue with one trigger, with executions in the store's ledger. Create it inside of `run_example`."""

    def __init__(self, store: Store, kind: Kind, act: Act | None = None, **config: Any) -> None:
        """`act`: the callable of the runtime. By default runs are recorded in `store.ran`, like those of the task."""
        self._store = store
        queue = f"queue-{next(_numbers)}"
        self.broker = MemoryBroker.named(queue)
        self.config = QueueTriggerConfig(**({"queue_name": queue, "consumer_group": "workers"} | config))
        self.adapter = LossyAckAdapter(MemoryConfig(name=queue), queue, "workers", prefetch=self.config.prefetch)
        ledger = backend_of(store.app).ledger
        assert ledger is not None
        self.book = ledger.triggers
        runtime: Runtime = TaskRuntime(store.app, "handle") if kind == "task" else CallableRuntime(act or self._record)
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            runtime,
            book=self.book,
            dedup=None if kind == "task" else LedgerIdempotencyStore(ledger.effects, queue),
            clock=store.clock,
            sleep=self._sleep,
        )
        self.counts = self.trigger.counts

    async def _record(self, _: str, context: Mapping[str, Any], __: str | None, tenant_id: str) -> str:
        self._store.ran.append((tenant_id, context["message"]))
        return f"run-{len(self._store.ran)}"

    async def _sleep(self, seconds: float) -> None:
        self._store.clock.advance(seconds)
        await asyncio.sleep(0.001)

    def write(self, body: Any, headers: dict[str, str] | None = None, key: str = "") -> str:
        """Publish bytes as they are, other values as JSON. Return the message id."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.broker.write(self.config.queue_name, encoded, headers, key)

    async def wait_handled(self, messages: int) -> None:
        await until(lambda: sum(self.counts.consumed.values()) >= messages, f"the handling of {messages} messages")

    async def rows(self, *tenants: str) -> list[Execution]:
        """Return the executions of this queue in the ledger, by default of all tenants."""
        return await self.book.executions(tenants or None, queue_name=self.config.queue_name, limit=1_000)

    @property
    def dead_letters(self) -> list[OutgoingMessage]:
        return self.broker.messages(f"{self.config.queue_name}.dlq")

    def close(self) -> None:
        MemoryBroker.reset(self.config.queue_name)


class LogCapture(logging.Handler):
    """Collects the records of a logger and its children at any level, each with the result of `annotate`."""

    def __init__(self, annotate: Callable[[], Any] = lambda: None) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[tuple[Any, logging.LogRecord]] = []
        self._annotate = annotate

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((self._annotate(), record))

    def records_of(self, message_id: str) -> list[logging.LogRecord]:
        """Return the records of one message."""
        return [record for _, record in self.records if getattr(record, "message_id", None) == message_id]

    @contextmanager
    def capture(self, logger: str = "holdfast.triggers") -> Iterator[LogCapture]:
        source = logging.getLogger(logger)
        level = source.level
        source.setLevel(logging.DEBUG)
        source.addHandler(self)
        try:
            yield self
        finally:
            source.removeHandler(self)
            source.setLevel(level)


def scrape_metrics(*triggers: TriggerStats) -> dict[str, float]:
    """Return the samples that Prometheus would scrape."""
    registry = CollectorRegistry()

    class Collector:
        def collect(self) -> Iterator[Any]:
            return trigger_metrics(triggers)

    registry.register(Collector())
    return samples(generate_latest(registry).decode())
