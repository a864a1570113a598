"""Messages from other programs: over a broker, and written directly to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MockQueueAdapter
from holdfast.core.states import State
from holdfast.core.verdict import MESSAGE_MALFORMED
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import LedgerIdempotencyStore
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.crash_points.process import Process
from tests.crash_points.scenarios.scenario import QUEUE, RunRecord, Scenario, Step, get_state, run_upkeep, work
from tests.crash_points.stores import RedisStores, Stores

_BROKER: Final = "crash-points-in"
_GROUP: Final = "workers"
#: A crashed process's reservation expires by the real clock.
_LEASE_S: Final = 0.05


class Triggers(Scenario):
    """Broker messages, each sent twice under its key: one becomes a job, one calls a function."""

    name = "trigger"
    repeated = frozenset({"plain", "call"})

    def supports(self, stores: Stores) -> bool:
        return True

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain(event_name: str) -> str:
            return record.perform("plain")

    async def begin(self, process: Process, record: RunRecord) -> None:
        MemoryBroker.reset(_BROKER)

    async def write(self, process: Process, record: RunRecord) -> None:
        for topic in ("tasks", "calls"):
            MemoryBroker.named(_BROKER).write(topic, b'{"n":1}', {"x-dedup-key": topic})

    async def jobs(self, process: Process, record: RunRecord) -> None:
        await self._consume(process, "tasks", _RecordingRuntime(process.app, record))
        assert record.accepted, "the message is acknowledged, but there is no job"

    async def calls(self, process: Process, record: RunRecord) -> None:
        if process.stores.has_ledger:
            dedup = LedgerIdempotencyStore(process.ledger.effects, "calls", lease_s=_LEASE_S)
            await self._consume(process, "calls", _FunctionRuntime(record), dedup)
            assert record.effects["call"], "the message is acknowledged, but the function was not called"

    async def _consume(
        self, process: Process, topic: str, runtime: Runtime, dedup: LedgerIdempotencyStore | None = None
    ) -> None:
        """Consume until the broker has no messages of the topic left."""
        broker = MemoryBroker.named(_BROKER)
        # Messages that were in flight in a crashed process are delivered again.
        broker.lose_connections()
        config = QueueTriggerConfig(queue_name=topic, consumer_group=_GROUP, concurrency=1)
        trigger = QueueTrigger(
            config,
            MockQueueAdapter(MemoryConfig(name=_BROKER), topic, _GROUP),
            runtime,
            book=process.ledger.triggers if process.stores.has_ledger else None,
            dedup=dedup,
            sleep=_short_sleep,
        )
        async with trigger:
            group = broker._topic(topic).groups[_GROUP]
            while group.ready or group.in_flight:
                await _short_sleep()
        if dedup is not None:
            await dedup.close()

    def steps(self) -> Sequence[Step]:
        return (self.begin, self.write, self.jobs, self.calls, self.write, self.jobs, self.calls, work, run_upkeep)

    async def check(self, process: Process, record: RunRecord) -> None:
        broker = MemoryBroker.named(_BROKER)
        assert not broker.messages("tasks.dlq")
        assert not broker.messages("calls.dlq")
        assert list(record.accepted) == ["tasks"]
        assert await get_state(process, record, "tasks") is State.SUCCEEDED
        if process.stores.has_ledger:
            assert record.effects["call"] == 1 or (process.number > 1 and record.effects["call"] == 2), record.effects
            rows = await process.ledger.triggers.executions(None)
            assert {row.queue_name for row in rows} == {"tasks", "calls"}


async def _short_sleep(seconds: float = 0.0) -> None:
    await asyncio.sleep(0.001)


class _RecordingRuntime(TaskRuntime):
    """Records the job of each key."""

    def __init__(self, app: Holdfast, record: RunRecord) -> None:
        super().__init__(app, "plain")
        self._record = record

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        run = await super().run_call(call)
        self._record.accept("tasks", run.run_id)
        return run


class _FunctionRuntime(Runtime):
    def __init__(self, record: RunRecord) -> None:
        self._record = record

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return self._record.perform("call")


class Foreign(Scenario):
    """Another program writes to the queue: a job, its duplicate, and an invalid message."""

    name = "foreign"

    def supports(self, stores: Stores) -> bool:
        return isinstance(stores, RedisStores)

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain(n: int) -> int:
            return n

    async def write(self, process: Process, record: RunRecord) -> None:
        stores = process.stores
        assert isinstance(stores, RedisStores)
        if not record.accepted:
            job = {"type": "plain", "payload": '{"n":1}', "idempotency_key": "one"}
            await stores.write({"task_id": "theirs", **job})
            await stores.write({"task_id": "again", **job})
            await stores.write({"colour": "blue"})
            record.accept("one", "theirs")

    async def adopt(self, process: Process, record: RunRecord) -> None:
        for _ in range(3):
            await process.work([QUEUE])

    def steps(self) -> Sequence[Step]:
        return (self.write, self.adopt, run_upkeep)

    async def check(self, process: Process, record: RunRecord) -> None:
        assert await get_state(process, record, "one") is State.SUCCEEDED
        assert (await process.engine.get(QUEUE, ["again"])) == [None]
        stores = process.stores
        assert isinstance(stores, RedisStores)
        if not stores.has_ledger:
            dead_letters = await stores.dead_letters()
            assert [dead_letter[b"error_code"] for dead_letter in dead_letters] == [MESSAGE_MALFORMED.encode()], (
                dead_letters
            )
