"""What comes from other programs: messages of a broker, and of whoever writes to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryAdapter, MemoryBroker, MemoryConfig
from holdfast.core.states import State
from holdfast.core.verdict import MESSAGE_MALFORMED
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.dedup import LedgerDedupStore
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.chaos.places import Place, RedisPlace
from tests.chaos.process import Process
from tests.chaos.stories.story import QUEUE, Step, Story, World, keep, state_of, work

_BROKER: Final = "crash-points-in"
_GROUP: Final = "workers"
#: A reservation of a dead process is waited for, by a real clock.
_LEASE_S: Final = 0.05


class Triggered(Story):
    """Messages of a broker, each written twice under its key: one becomes a job, one is for a function."""

    name = "trigger"
    repeated = frozenset({"plain", "call"})

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain(event_name: str) -> str:
            return world.act("plain")

    async def begin(self, process: Process, world: World) -> None:
        MemoryBroker.reset(_BROKER)

    async def write(self, process: Process, world: World) -> None:
        for topic in ("tasks", "calls"):
            MemoryBroker.named(_BROKER).write(topic, b'{"n":1}', {"x-dedup-key": topic})

    async def jobs(self, process: Process, world: World) -> None:
        await self._consume(process, "tasks", _Desk(process.app, world))
        assert world.accepted, "the message is acknowledged, and there is no job"

    async def calls(self, process: Process, world: World) -> None:
        if process.place.has_ledger:
            dedup = LedgerDedupStore(process.ledger.effects, "calls", lease_s=_LEASE_S)
            await self._consume(process, "calls", _Function(world), dedup)
            assert world.acted["call"], "the message is acknowledged, and the function was not called"

    async def _consume(
        self, process: Process, topic: str, runtime: Runtime, dedup: LedgerDedupStore | None = None
    ) -> None:
        """Until the broker has nothing left of it."""
        broker = MemoryBroker.named(_BROKER)
        # What a dead process had in hand is delivered again.
        broker.lose_connections()
        config = TriggerConfig(queue_name=topic, consumer_group=_GROUP, concurrency=1)
        trigger = QueueTrigger(
            config,
            MemoryAdapter(MemoryConfig(name=_BROKER), topic, _GROUP),
            runtime,
            book=process.ledger.triggers if process.place.has_ledger else None,
            dedup=dedup,
            sleep=_a_little,
        )
        async with trigger:
            group = broker._topic(topic).groups[_GROUP]
            while group.ready or group.in_flight:
                await _a_little()
        if dedup is not None:
            await dedup.close()

    def steps(self) -> Sequence[Step]:
        return (self.begin, self.write, self.jobs, self.calls, self.write, self.jobs, self.calls, work, keep)

    async def check(self, process: Process, world: World) -> None:
        broker = MemoryBroker.named(_BROKER)
        assert not broker.messages("tasks.dlq")
        assert not broker.messages("calls.dlq")
        assert list(world.accepted) == ["tasks"]
        assert await state_of(process, world, "tasks") is State.SUCCEEDED
        if process.place.has_ledger:
            assert world.acted["call"] == 1 or (process.number > 1 and world.acted["call"] == 2), world.acted
            rows = await process.ledger.triggers.executions(None)
            assert {row.queue_name for row in rows} == {"tasks", "calls"}


async def _a_little(seconds: float = 0.0) -> None:
    await asyncio.sleep(0.001)


class _Desk(TaskRuntime):
    """Remembers which job each key was given."""

    def __init__(self, app: Holdfast, world: World) -> None:
        super().__init__(app, "plain")
        self._world = world

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        run = await super().run_call(call)
        self._world.accept("tasks", run.run_id)
        return run


class _Function(Runtime):
    def __init__(self, world: World) -> None:
        self._world = world

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return self._world.act("call")


class Foreign(Story):
    """Another program writes to the queue: a job, the same one again under its key, and nonsense."""

    name = "foreign"

    def suits(self, place: Place) -> bool:
        return isinstance(place, RedisPlace)

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain(n: int) -> int:
            return n

    async def write(self, process: Process, world: World) -> None:
        place = process.place
        assert isinstance(place, RedisPlace)
        if not world.accepted:
            job = {"type": "plain", "payload": '{"n":1}', "idempotency_key": "one"}
            await place.write({"task_id": "theirs", **job})
            await place.write({"task_id": "again", **job})
            await place.write({"colour": "blue"})
            world.accept("one", "theirs")

    async def adopt(self, process: Process, world: World) -> None:
        for _ in range(3):
            await process.work([QUEUE])

    def steps(self) -> Sequence[Step]:
        return (self.write, self.adopt, keep)

    async def check(self, process: Process, world: World) -> None:
        assert await state_of(process, world, "one") is State.SUCCEEDED
        assert (await process.engine.get(QUEUE, ["again"])) == [None]
        place = process.place
        assert isinstance(place, RedisPlace)
        if not place.has_ledger:
            letters = await place.letters()
            assert [letter[b"error_code"] for letter in letters] == [MESSAGE_MALFORMED.encode()], letters
