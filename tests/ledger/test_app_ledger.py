"""`app.ledger`, and how an app handles a ledger that is unreachable, missing or invalid."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from holdfast import Holdfast
from holdfast.client.submitter import BatchingSubmitter
from holdfast.core.states import State
from holdfast.errors import InvalidOption, LedgerUnavailable, NotDurableYet, SchemaMismatch
from holdfast.execution.backend import backend_of
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.verification.chaos.servers import free_port
from holdfast.worker.worker import Worker
from tests.conftest import MakePostgres
from tests.worker.support import eventually

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


def make_app(url: str, ledger: str | None, namespace: str) -> Holdfast:
    app = Holdfast(url, ledger=ledger, namespace=namespace, connect_timeout_s=1, reply_timeout_s=2)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    return app


@asynccontextmanager
async def working(app: Holdfast) -> AsyncIterator[None]:
    worker = Worker(app)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await running


async def test_the_ledger_has_every_job(redis_url: str, ledger_url: str, namespace: str) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    async with app, working(app):
        jobs = [await app.tasks["add"].submit(1, number) for number in range(20)]
        assert [await job.result(timeout=60) for job in jobs] == list(range(1, 21))
        await app.ledger.wait_caught_up(timeout=20)
        page = await app.ledger.queries.jobs(limit=50)
        assert {row.job_id for row in page.jobs} == {job.id for job in jobs}
        assert {row.state for row in page.jobs} == {State.SUCCEEDED}


async def test_the_embedded_ledger_never_lags(tmp_path_url: str) -> None:
    app = make_app(tmp_path_url, None, "")
    async with app, working(app):
        job = await app.tasks["add"].submit(1, 2)
        assert await job.result(timeout=60) == 3
        await app.ledger.wait_caught_up(timeout=0.001)
        detail = await app.ledger.queries.job(job.id)
        assert detail.state is State.SUCCEEDED


async def test_without_a_ledger_its_methods_raise(redis_url: str, namespace: str) -> None:
    app = make_app(redis_url, None, namespace)
    async with app:
        with pytest.raises(InvalidOption, match=r"no ledger.*HOLDFAST_LEDGER"):
            await app.ledger.wait_caught_up()
        with pytest.raises(InvalidOption, match="no ledger"):
            _ = app.ledger.queries


async def test_an_unreachable_ledger_stops_neither_opening_nor_submitting(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(redis_url, f"postgresql://u:secret@127.0.0.1:{free_port()}/db", namespace)
    with caplog.at_level(logging.WARNING):
        async with app, working(app):
            job = await app.tasks["add"].submit(1, 2)
            assert await job.result(timeout=60) == 3
            with pytest.raises(LedgerUnavailable, match="nothing listens there"):
                await app.ledger.wait_caught_up(timeout=0.3)
    assert "continuing without it" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.faults
async def test_a_recovered_ledger_catches_up(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres()
    server.stop()
    app = make_app(redis_url, server.url, namespace)
    async with app, working(app):
        job = await app.tasks["add"].submit(1, 2)
        assert await job.result(timeout=60) == 3
        waiting = asyncio.create_task(app.ledger.wait_caught_up(timeout=40))
        await asyncio.to_thread(server.start)
        await waiting
        assert (await app.ledger.queries.job(job.id)).state is State.SUCCEEDED


async def test_the_ledger_catches_up_with_a_feed_that_ends_without_events(
    redis_url: str, ledger_url: str, namespace: str
) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    async with app, working(app):
        job = await app.tasks["add"].submit(1, 2)
        assert await job.result(timeout=60) == 3
        async with redis.asyncio.from_url(redis_url) as client:
            await client.xadd(app.engine._store.keys("default").feed, {"another": "program"})  # type: ignore[attr-defined]
        await app.ledger.wait_caught_up(timeout=5)


async def test_without_a_projector_waiting_times_out(redis_url: str, ledger_url: str, namespace: str) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    async with app:
        await app.tasks["add"].submit(1, 2)
        with pytest.raises(LedgerUnavailable, match=r"answers, but has nothing of queue default.*check that a worker"):
            await app.ledger.wait_caught_up(timeout=0.3)


async def test_a_ledger_without_tables_is_refused(redis_url: str, empty_postgres_url: str, namespace: str) -> None:
    app = make_app(redis_url, empty_postgres_url, namespace)
    with pytest.raises(SchemaMismatch, match="run `holdfast migrate up`"):
        await app.open()
    with pytest.raises(SchemaMismatch):
        await app.tasks["add"].submit(1, 2)
    await app.close()


async def test_the_ledger_of_another_namespace_is_refused(redis_url: str, ledger_url: str, namespace: str) -> None:
    async with make_app(redis_url, ledger_url, namespace):
        pass
    app = make_app(redis_url, ledger_url, f"{namespace}-other")
    with pytest.raises(InvalidOption, match=f"belongs to namespace {namespace}, this is {namespace}-other"):
        await app.open()
    await app.close()


async def test_an_engines_file_is_refused_as_a_ledger(redis_url: str, tmp_path_url: str, namespace: str) -> None:
    async with make_app(tmp_path_url, None, ""):
        pass
    app = make_app(redis_url, tmp_path_url, namespace)
    with pytest.raises(InvalidOption, match="is an engine's database, not a ledger's"):
        await app.open()
    await app.close()


@pytest.fixture
def tmp_path_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('engine') / 'jobs.db'}"


@pytest.mark.faults
async def test_a_silent_ledger_hardly_delays_submission(
    redis_url: str, namespace: str, make_postgres: MakePostgres
) -> None:
    server = make_postgres(fsync=False)
    app = Holdfast(redis_url, ledger=server.url, namespace=namespace)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    server.pause()
    durations = []
    try:
        for queue in ("one", "two", "three"):
            began = time.monotonic()
            await add.options(queue=queue).submit(1, 2)
            durations.append(time.monotonic() - began)
        began = time.monotonic()
        await app.close()
        durations.append(time.monotonic() - began)
    finally:
        server.resume()
    assert durations[0] < 5
    assert max(durations[1:3]) < 1
    assert durations[3] < 3
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.faults
async def test_a_ledger_that_turns_out_unusable_is_logged(
    redis_url: str, namespace: str, make_postgres: MakePostgres, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_postgres(fsync=False, migrated=False)
    app = make_app(redis_url, server.url, namespace)
    server.pause()
    try:
        await app.tasks["add"].submit(1, 2)
    finally:
        server.resume()
    await eventually(lambda: "ledger unusable" in caplog.text)
    # Intake continues, also for new queues.
    await app.tasks["add"].options(queue="new").submit(1, 2)
    await app.close()


async def test_closing_during_a_durable_wait_leaves_no_task(redis_url: str, ledger_url: str, namespace: str) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    submitter, accepted = await backend_of(app).connections.submitter(), asyncio.Event()
    assert isinstance(submitter, BatchingSubmitter)
    submitter.on_accepted = lambda _: accepted.set()
    waiting = asyncio.create_task(app.tasks["add"].options(durable=True).submit(1, 2))
    await asyncio.wait_for(accepted.wait(), 60)
    await app.close()
    with pytest.raises(NotDurableYet):
        await waiting
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_the_longest_names_that_are_accepted_reach_the_ledger(
    redis_url: str, ledger_url: str, namespace: str
) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    options: dict[str, Any] = {
        "idempotency_key": "😀" * 250,
        "trace_id": "".join(chr(0x10000 + number * 7) for number in range(250)),
        "tenant_id": "".join(chr(0x20000 + number * 31) for number in range(50)),
        "queue": "".join(chr(0x21000 + number * 37) for number in range(50)),
    }
    async with app:
        worker = Worker(app, queues=[options["queue"]])
        running = asyncio.create_task(worker.run())
        job = await app.tasks["add"].options(durable=True, **options).submit(1, 2)
        page = await app.ledger.queries.jobs(JobFilter(idempotency_key=options["idempotency_key"]))
        assert [found.job_id for found in page.jobs] == [job.id]
        page = await app.ledger.queries.jobs(JobFilter(trace_id=options["trace_id"]))
        assert [found.job_id for found in page.jobs] == [job.id]
        worker.drain()
        await running
