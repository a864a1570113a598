"""`app.ledger`, and what an app does about a ledger that is down, missing or wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast import Holdfast
from holdfast.core.states import State
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.worker.worker import Worker
from tests.conftest import MakePostgres
from tests.servers import free_port

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


async def test_the_ledger_has_what_has_happened(redis_url: str, ledger_url: str, namespace: str) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    async with app, working(app):
        jobs = [await app.tasks["add"].submit(1, number) for number in range(20)]
        assert [await job.result(timeout=20) for job in jobs] == list(range(1, 21))
        await app.ledger.caught_up(timeout=20)
        page = await app.ledger.queries.jobs(limit=50)
        assert {row.job_id for row in page.jobs} == {job.id for job in jobs}
        assert {row.state for row in page.jobs} == {State.SUCCEEDED}


async def test_embedded_the_ledger_is_never_behind(tmp_path_url: str) -> None:
    app = make_app(tmp_path_url, None, "")
    async with app, working(app):
        job = await app.tasks["add"].submit(1, 2)
        assert await job.result(timeout=20) == 3
        await app.ledger.caught_up(timeout=0.001)
        detail = await app.ledger.queries.job(job.id)
        assert detail.state is State.SUCCEEDED


async def test_without_a_ledger_the_door_says_so(redis_url: str, namespace: str) -> None:
    app = make_app(redis_url, None, namespace)
    async with app:
        with pytest.raises(InvalidOption, match=r"no ledger.*HOLDFAST_LEDGER"):
            await app.ledger.caught_up()
        with pytest.raises(InvalidOption, match="no ledger"):
            _ = app.ledger.queries


async def test_a_ledger_that_is_down_stops_neither_opening_nor_submitting(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(redis_url, f"postgresql://u:secret@127.0.0.1:{free_port()}/db", namespace)
    with caplog.at_level(logging.WARNING):
        async with app, working(app):
            job = await app.tasks["add"].submit(1, 2)
            assert await job.result(timeout=20) == 3
            with pytest.raises(LedgerUnavailable, match="nothing listens there"):
                await app.ledger.caught_up(timeout=0.3)
    assert "going on without the ledger" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.faults
async def test_a_ledger_that_comes_back_catches_up(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres()
    server.stop()
    app = make_app(redis_url, server.url, namespace)
    async with app, working(app):
        job = await app.tasks["add"].submit(1, 2)
        assert await job.result(timeout=20) == 3
        waiting = asyncio.create_task(app.ledger.caught_up(timeout=40))
        await asyncio.to_thread(server.start)
        await waiting
        assert (await app.ledger.queries.job(job.id)).state is State.SUCCEEDED


async def test_nobody_projects(redis_url: str, ledger_url: str, namespace: str) -> None:
    app = make_app(redis_url, ledger_url, namespace)
    async with app:
        await app.tasks["add"].submit(1, 2)
        with pytest.raises(LedgerUnavailable, match=r"answers, but has nothing of queue default.*does a worker"):
            await app.ledger.caught_up(timeout=0.3)


async def test_a_ledger_without_tables_is_refused(redis_url: str, empty_postgres_url: str, namespace: str) -> None:
    app = make_app(redis_url, empty_postgres_url, namespace)
    with pytest.raises(SchemaMismatch, match="run `holdfast migrate up`"):
        await app.open()
    with pytest.raises(SchemaMismatch):
        await app.tasks["add"].submit(1, 2)
    await app.close()


async def test_another_namespaces_ledger_is_refused(redis_url: str, ledger_url: str, namespace: str) -> None:
    async with make_app(redis_url, ledger_url, namespace):
        pass
    app = make_app(redis_url, ledger_url, f"{namespace}-other")
    with pytest.raises(InvalidOption, match=f"belongs to namespace {namespace}, this is {namespace}-other"):
        await app.open()
    await app.close()


async def test_an_engine_s_file_is_no_ledger(redis_url: str, tmp_path_url: str, namespace: str) -> None:
    async with make_app(tmp_path_url, None, ""):
        pass
    app = make_app(redis_url, tmp_path_url, namespace)
    with pytest.raises(InvalidOption, match="is an engine's database, not a ledger's"):
        await app.open()
    await app.close()


@pytest.fixture
def tmp_path_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('engine') / 'jobs.db'}"
