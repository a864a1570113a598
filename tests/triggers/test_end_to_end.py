"""A message becomes a job that runs and a row in the ledger (requirement X4), on real stores."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MockQueueAdapter
from holdfast.execution.backend import backend_of
from holdfast.testing import ManualClock, drain
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.rig import Rig, until


@pytest.fixture(params=["embedded", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    """Embedded SQLite, and Redis with PostgreSQL."""
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'all.db'}"}
    url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    return {"url": url, "ledger": ledger, "namespace": namespace}


async def test_a_message_is_run_acknowledged_and_recorded_once(stores: dict[str, Any], namespace: str) -> None:
    app, ran = Holdfast(**stores), list[tuple[str, Any]]()

    @app.task
    async def handle(event_name: str, message: Any) -> None:
        ran.append((event_name, message))

    broker = MemoryBroker.named(namespace)
    config = QueueTriggerConfig(queue_name="orders", consumer_group="workers", concurrency=4)
    adapter = MockQueueAdapter(MemoryConfig(name=namespace), "orders", "workers")
    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        book = backend.ledger.triggers
        async with QueueTrigger(config, adapter, TaskRuntime(app, "handle"), book=book) as trigger:
            message_id = broker.write("orders", b'{"n": 1}', {"x-event-name": "paid", "x-tenant-id": "acme"})
            broker.write("orders", b"{", {"x-tenant-id": "acme"})
            await until(lambda: sum(trigger.counts.consumed.values()) == 2)
            assert await adapter.lag() == 0
        await drain(app)
        rows = await book.executions(["acme"])
        assert sorted(row.status for row in rows) == ["success", "unparsable"]
        (row,) = await book.executions(["acme"], queue_name="orders", message_id=message_id)
        assert (row.event_name, row.trace_id, row.retry_count) == ("paid", f"queue-{message_id}", 0)
        assert row.completed_at_ms >= row.started_at_ms
        assert await book.executions(["zeta"]) == []
        job = app.job(row.agent_run_id)
        assert (await job.info()).state == "succeeded"
    assert ran == [("paid", {"n": 1})]
    MemoryBroker.reset(namespace)


async def test_a_redelivered_message_is_a_duplicate(stores: dict[str, Any], namespace: str) -> None:
    """The acknowledgement is lost: the second delivery returns the existing job."""
    app, ran = Holdfast(**stores), list[int]()

    @app.task
    async def handle(message: int) -> None:
        ran.append(message)

    async with app:
        rig = Rig(TaskRuntime(app, "handle"))
        real_ack = rig.adapter.ack

        async def lose_ack(message: Any) -> None:
            rig.adapter.ack = real_ack  # type: ignore[method-assign]
            raise ConnectionError("the connection was lost")

        rig.adapter.ack = lose_ack  # type: ignore[method-assign]
        rig.write(1)
        async with rig.trigger:
            await rig.wait_handled(1)
            rig.broker.lose_connections()
            await rig.wait_handled(2)
        await drain(app)
    assert ran == [1]
    assert sorted(row.status for row in rig.rows) == ["duplicate", "success"]
    assert len({row.agent_run_id for row in rig.rows}) == 1


async def test_a_key_runs_again_after_its_window(tmp_path: Path) -> None:
    clock = ManualClock()
    app, ran = Holdfast(f"sqlite:///{tmp_path / 'x.db'}", clock=clock), list[str]()

    @app.task
    async def handle(message: str) -> None:
        ran.append(message)

    async with app:
        rig = Rig(TaskRuntime(app, "handle"), idempotency_window=600)
        async with rig.trigger:
            for number, (message, minutes) in enumerate([("first", 9), ("known", 2), ("again", 0)], 1):
                rig.write(message, dedup_key="k")
                await rig.wait_handled(number)
                # While its job is open, a key is kept regardless of the window.
                await drain(app)
                clock.advance(timedelta(minutes=minutes))
    assert ran == ["first", "again"]
    assert rig.counts.dedup_hits == 1


async def test_many_triggers_share_a_queue(stores: dict[str, Any], namespace: str) -> None:
    app, ran = Holdfast(**stores), list[int]()

    @app.task
    async def handle(message: int) -> None:
        ran.append(message)

    async with app:
        rigs = [Rig(TaskRuntime(app, "handle"), broker=namespace, concurrency=8, prefetch=32) for _ in range(3)]
        for number in range(600):
            rigs[0].write(number % 50, key=str(number % 7), dedup_key=str(number % 50))
        await asyncio.gather(*(rig.trigger.start() for rig in rigs))
        await until(lambda: sum(sum(rig.counts.consumed.values()) for rig in rigs) == 600)
        await asyncio.gather(*(rig.trigger.stop() for rig in rigs))
        await drain(app)
    assert sorted(ran) == list(range(50))
    assert sum(rig.counts.dedup_hits for rig in rigs) == 550
    MemoryBroker.reset(namespace)
