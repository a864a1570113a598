"""Workers and `holdfast upkeep` project the feed in a thread that does not block tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from holdfast import Holdfast, Retry
from holdfast.core.states import State
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.ledger import Ledger
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.worker import Worker
from tests.ledger.projection_rig import QUEUE, check_ledger, rows
from tests.upkeep.projector_rig import until


@pytest.fixture
async def app(redis_url: str, ledger_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    made = Holdfast(redis_url, ledger=ledger_url, namespace=namespace, retry=Retry(max_retries=0))

    @made.task
    async def add(a: int, b: int) -> int:
        return a + b

    @made.task
    async def fail() -> None:
        raise ValueError("boom")

    yield made
    await made.close()


async def _count_states(ledger: Ledger) -> dict[str, int]:
    found = await rows(ledger, "SELECT state, count(*) AS n FROM jobs GROUP BY state")
    return {row["state"]: row["n"] for row in found}


async def _wait_states(ledger: Ledger, **expected: int) -> None:
    async def reached() -> bool:
        return await _count_states(ledger) == expected

    await until(reached, f"the ledger shows {expected}")


async def test_a_worker_projects_the_feed(app: Holdfast) -> None:
    worker = Worker(app, queues=[QUEUE])
    working = asyncio.create_task(worker.run())
    for number in range(20):
        await app.tasks["add"].submit(number, 1)
    for _ in range(3):
        await app.tasks["fail"].submit()
    backend = backend_of(app)
    assert backend.ledger is not None
    await _wait_states(backend.ledger, succeeded=20, failed=3)
    assert any(thread.name == "holdfast-projector" for thread in threading.enumerate())
    worker.drain()
    await working
    assert not any(thread.name == "holdfast-projector" for thread in threading.enumerate())
    states = await check_ledger(backend.ledger)
    assert set(states.values()) == {State.FAILED, State.SUCCEEDED}
    (feed,) = await rows(backend.ledger, "SELECT projector FROM feed_positions")
    assert feed["projector"] is None


async def test_upkeep_projects_for_workers_without_upkeep(app: Holdfast) -> None:
    await app.open()
    backend = backend_of(app)
    assert backend.ledger is not None
    upkeep = Upkeep(app.engine, [], app.settings, backend.ledger)
    upkeep_task = asyncio.create_task(upkeep.run())
    worker = Worker(app, queues=[QUEUE], upkeep=False)
    working = asyncio.create_task(worker.run())
    await app.tasks["add"].submit(1, 2)
    await _wait_states(backend.ledger, succeeded=1)
    worker.drain()
    await working
    upkeep.stop()
    await upkeep_task


async def test_a_worker_runs_jobs_while_its_ledger_is_unreachable(redis_url: str, namespace: str) -> None:
    app = Holdfast(redis_url, ledger="postgresql://user@127.0.0.1:1/none", namespace=namespace)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with app:
        worker = Worker(app, queues=[QUEUE])
        working = asyncio.create_task(worker.run())
        job = await add.submit(1, 2)
        assert await job.result(timeout=10) == 3
        worker.drain()
        await working
