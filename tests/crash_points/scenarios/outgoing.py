"""What goes to other programs: events, and webhooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, ClassVar, Final

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker
from holdfast.core.states import State
from holdfast.execution.backend import backend_of
from holdfast.execution.spec import TaskSpec
from holdfast.ledger.port.messages import OutboxStatus
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.settings import Settings
from holdfast.upkeep.dispatch import WebhookDispatcher
from holdfast.upkeep.relay_service import RelayService
from holdfast.webhooks.deliveries import QUEUE as WEBHOOKS
from holdfast.webhooks.sender import WebhookSender
from holdfast.worker.webhook_worker import _WebhookBackend
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.scenario import Step, Story, World, hand_in, keep, work
from tests.crash_points.seams import outside
from tests.outbox.support import transaction
from tests.webhooks.receiver import SECRET

_BROKER: Final = "crash-points"


class Publishing(Story):
    """In the user's own transaction: an event for a broker, and a job. A relay brings both to where they belong."""

    name = "outbox"
    waits = True
    repeated = frozenset({"plain"})

    settings: ClassVar[dict[str, Any]] = {
        "outbox_targets": {"default": {"type": "memory", "connection": {"name": _BROKER}}},
        "outbox_lease_s": 1,
        "outbox_backoff_base_s": 0.01,
    }

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return world.act("plain")

    async def write(self, process: Process, world: World) -> None:
        """The user's own statement of what was committed, and so not ours to fail."""
        if not world.notes.get("written"):
            MemoryBroker.reset(_BROKER)
            async with users_transaction(process.place.ledger_url) as connection:
                await process.app.outbox.add_many(
                    connection, [NewOutboxEvent(topic="orders", key="k", payload={"n": 1})]
                )
                job = await process.app.tasks["plain"].options(connection=connection, idempotency_key="tx").submit()
            world.accept("tx", job.id)
            world.notes["written"] = True

    async def relay(self, process: Process, world: World) -> None:
        outbox = backend_of(process.app).outbox
        assert outbox is not None
        relaying = RelayService(process.app, outbox)
        running = asyncio.create_task(relaying.run())
        store = await again(outbox.open)
        for _ in range(2_000):
            found = await again(lambda: store.find(None, limit=10))
            if all(each.status is OutboxStatus.SENT for each in found):
                break
            await asyncio.sleep(0.005)
            process.place.tick()
        relaying.stop()
        await running

    def steps(self) -> Sequence[Step]:
        return (self.write, self.relay, work, keep)

    async def check(self, process: Process, world: World) -> None:
        # At least once, and marked as sent only when it was.
        assert MemoryBroker.named(_BROKER).messages("orders")


@asynccontextmanager
async def users_transaction(url: str) -> AsyncIterator[Any]:
    with outside():
        async with transaction(url) as connection:
            yield connection


class Telling(Story):
    """The end of a job is told by webhook: the courier hands in a delivery, which a worker makes."""

    name = "webhooks"
    waits = True
    settings: ClassVar[dict[str, Any]] = {"webhook_secret": SECRET, "webhook_allow": ["127.0.0.1"]}

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    def plans(self, app: Holdfast, world: World) -> Mapping[str, TaskSpec]:
        return _WebhookBackend(app.engine, app.settings, _Addressee(app.settings, world)).specs

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "plain", "one", webhook="http://127.0.0.1:9/hook")

    async def tell(self, process: Process, world: World) -> None:
        courier = WebhookDispatcher(process.engine, process.ledger, process.app.settings)
        async with process.projecting() if process.place.apart else nullcontext():
            await again(courier.run_once)
        await courier._probe.close()

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, keep, self.tell, work, keep)

    async def attend(self, process: Process, world: World) -> None:
        await self.tell(process, world)

    async def check(self, process: Process, world: World) -> None:
        # Told at least once, and always under the same id; handed in once.
        assert len(world.notes.get("told", ())) == 1, world.notes
        found = await process.ledger.queries.jobs(JobFilter(queues=frozenset({WEBHOOKS})), 10, None)
        assert [job.state for job in found.jobs] == [State.SUCCEEDED]
        assert not await process.ledger.notifications.finished_jobs(10)


class _Addressee(WebhookSender):
    """Takes everything."""

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings)
        self._world = world

    async def send(self, url: str, webhook_id: str, body: bytes, trace: Mapping[str, str] | None = None) -> int:
        self._world.notes.setdefault("told", set()).add(webhook_id)
        return 204
