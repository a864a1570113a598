"""Messages to other programs: outbox events and webhooks."""

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
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.scenario import RunRecord, Scenario, Step, run_upkeep, submit_until_accepted, work
from tests.crash_points.seams import bypass_seam
from tests.outbox.support import transaction
from tests.webhooks.receiver import SECRET

_BROKER: Final = "crash-points"


class Outbox(Scenario):
    """An event for a broker and a job, in the user's own transaction; a relay publishes both."""

    name = "outbox"
    waits = True
    repeated = frozenset({"plain"})

    settings: ClassVar[dict[str, Any]] = {
        "outbox_targets": {"default": {"type": "memory", "connection": {"name": _BROKER}}},
        "outbox_lease_s": 1,
        "outbox_backoff_base_s": 0.01,
    }

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return record.perform("plain")

    async def write(self, process: Process, record: RunRecord) -> None:
        """The commit is the user's own, so it is not made to fail."""
        if not record.notes.get("written"):
            MemoryBroker.reset(_BROKER)
            async with open_user_transaction(process.stores.ledger_url) as connection:
                await process.app.outbox.add_many(
                    connection, [NewOutboxEvent(topic="orders", key="k", payload={"n": 1})]
                )
                job = await process.app.tasks["plain"].options(connection=connection, idempotency_key="tx").submit()
            record.accept("tx", job.id)
            record.notes["written"] = True

    async def relay(self, process: Process, record: RunRecord) -> None:
        outbox = backend_of(process.app).outbox
        assert outbox is not None
        relay_service = RelayService(process.app, outbox)
        relay_task = asyncio.create_task(relay_service.run())
        store = await retry_call(outbox.open)
        for _ in range(2_000):
            found = await retry_call(lambda: store.find(None, limit=10))
            if all(event.status is OutboxStatus.SENT for event in found):
                break
            await asyncio.sleep(0.005)
            process.stores.tick()
        relay_service.stop()
        await relay_task

    def steps(self) -> Sequence[Step]:
        return (self.write, self.relay, work, run_upkeep)

    async def check(self, process: Process, record: RunRecord) -> None:
        # Published at least once, and marked as sent only after that.
        assert MemoryBroker.named(_BROKER).messages("orders")


@asynccontextmanager
async def open_user_transaction(url: str) -> AsyncIterator[Any]:
    with bypass_seam():
        async with transaction(url) as connection:
            yield connection


class Webhooks(Scenario):
    """A webhook reports the end of a job: the dispatcher submits a delivery, and a worker makes it."""

    name = "webhooks"
    waits = True
    settings: ClassVar[dict[str, Any]] = {"webhook_secret": SECRET, "webhook_allow": ["127.0.0.1"]}

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    def specs(self, app: Holdfast, record: RunRecord) -> Mapping[str, TaskSpec]:
        return _WebhookBackend(app.engine, app.settings, _AcceptingSender(app.settings, record)).specs

    async def submit(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "plain", "one", webhook="http://127.0.0.1:9/hook")

    async def dispatch(self, process: Process, record: RunRecord) -> None:
        dispatcher = WebhookDispatcher(process.engine, process.ledger, process.app.settings)
        async with process.run_projector() if process.stores.separate_ledger else nullcontext():
            await retry_call(dispatcher.run_once)
        await dispatcher._probe.close()

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, run_upkeep, self.dispatch, work, run_upkeep)

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        await self.dispatch(process, record)

    async def check(self, process: Process, record: RunRecord) -> None:
        # Sent at least once, always under the same id; submitted once.
        assert len(record.notes.get("webhook_ids", ())) == 1, record.notes
        found = await process.ledger.queries.jobs(JobFilter(queues=frozenset({WEBHOOKS})), 10, None)
        assert [job.state for job in found.jobs] == [State.SUCCEEDED]
        assert not await process.ledger.notifications.finished_jobs(10)


class _AcceptingSender(WebhookSender):
    """Accepts every delivery."""

    def __init__(self, settings: Settings, record: RunRecord) -> None:
        super().__init__(settings)
        self._record = record

    async def send(self, url: str, webhook_id: str, body: bytes, trace: Mapping[str, str] | None = None) -> int:
        self._record.notes.setdefault("webhook_ids", set()).add(webhook_id)
        return 204
