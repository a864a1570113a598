"""Jobs that the engine no longer knows: callers get what the ledger has, before "unknown"."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Holdfast, Retry, State
from holdfast.errors import (
    EngineRefused,
    EngineUnavailable,
    JobCancelled,
    JobFailed,
    LedgerUnavailable,
    UnknownJob,
    WaitTimeout,
)
from holdfast.execution.backend import backend_of
from tests.conftest import MakePostgres, MakeServer
from tests.worker.support import eventually, working

pytestmark = pytest.mark.redis


def app_on(url: str, ledger: str | None = None) -> Holdfast:
    return Holdfast(url, ledger=ledger, reconcile_interval_s=1, durable_timeout_s=50)


async def wipe(url: str) -> None:
    async with Redis.from_url(url) as client:
        await client.flushall()


async def recorded(app: Holdfast, jobs: list[Any]) -> bool:
    """Whether the ledger has the end of these jobs."""
    ledger = backend_of(app).ledger
    assert ledger is not None
    rows = [await ledger.queries.job(job.id) for job in jobs]
    return all(row.state in (State.SUCCEEDED, State.FAILED, State.CANCELLED) for row in rows)


async def test_callers_wait_through_a_wipe_for_durable_jobs(make_redis: MakeServer, ledger_url: str) -> None:
    redis = make_redis()
    app = app_on(redis.url, ledger_url)

    @app.task
    async def work(number: int) -> int:
        return number

    async with app:
        async with working(app, queues=["other"]):
            jobs = [await work.options(durable=True).submit(number) for number in range(5)]
            waiting = [asyncio.create_task(job.result()) for job in jobs]
            await wipe(redis.url)
            with pytest.raises(WaitTimeout):
                await jobs[0].result(0.05)
            assert await jobs[0].state() is State.QUEUED
        async with working(app):
            assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [0, 1, 2, 3, 4]


async def test_the_end_of_a_job_is_known_after_a_wipe(make_redis: MakeServer, ledger_url: str) -> None:
    redis = make_redis()
    app = app_on(redis.url, ledger_url)

    @app.task(retry=Retry(max_retries=0))
    async def work(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    async with app:
        async with working(app):
            done, failed, cancelled = [
                await work.options(durable=True, delay=delay).submit(number)
                for number, delay in ((7, None), (-1, None), (1, 3_600))
            ]
            await cancelled.cancel("not needed")
            assert await done.result(60) == 7
            with pytest.raises(JobFailed):
                await failed.result(60)
            await eventually(lambda: recorded(app, [done, failed, cancelled]), "the ends in the ledger")
        await wipe(redis.url)
        assert await done.result(0) == 7
        assert [await job.state() for job in (done, failed, cancelled)] == [
            State.SUCCEEDED,
            State.FAILED,
            State.CANCELLED,
        ]
        assert (await done.info()).payload == b'{"number":7}'
        assert [attempt.failure and attempt.failure.code for attempt in await failed.history()] == ["TASK_ERROR"]
        with pytest.raises(JobFailed, match="TASK_ERROR: negative"):
            await failed.result()
        with pytest.raises(JobCancelled):
            await cancelled.result()
        for call in (app.job("unknown").result, app.job("unknown").state, app.job(done.id, queue="other").result):
            with pytest.raises(UnknownJob):
                await call()


async def test_a_job_is_not_denied_while_the_ledger_does_not_answer(
    make_redis: MakeServer, make_postgres: MakePostgres
) -> None:
    redis, postgres = make_redis(), make_postgres()
    app = app_on(redis.url, postgres.url)

    @app.task
    async def work() -> str:
        return "done"

    async with app:
        async with working(app):
            job = await work.options(durable=True).submit()
            assert await job.result(60) == "done"
            await eventually(lambda: recorded(app, [job]), "the end in the ledger")
        await wipe(redis.url)
        await asyncio.to_thread(postgres.kill)
        for call in (job.state, job.info, lambda: job.result(0.3)):
            with pytest.raises(LedgerUnavailable):
                await call()
        waiting = asyncio.create_task(job.result())
        await asyncio.to_thread(postgres.start)
        assert await asyncio.wait_for(waiting, 60) == "done"


@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_wait_survives_a_restart_of_redis(make_redis: MakeServer, timeout: float | None) -> None:
    redis = make_redis(appendonly="yes", appendfsync="always")
    app = app_on(redis.url)

    @app.task
    async def work() -> str:
        return "done"

    async with app:
        job = await work.submit()
        submitter = await backend_of(app).connections.submitter()
        wait_final, failures = submitter.wait_final, list[EngineUnavailable]()

        async def watched(queue: str, job_id: str, wait_ms: int) -> Any:
            try:
                return await wait_final(queue, job_id, wait_ms)
            except EngineUnavailable as exc:
                failures.append(exc)
                raise

        submitter.wait_final = watched  # type: ignore[method-assign]
        waiting = asyncio.create_task(job.result(timeout))
        await asyncio.to_thread(redis.kill)
        await eventually(lambda: failures, "a failed attempt")
        with pytest.raises(EngineUnavailable):
            await job.result(0.3)
        await asyncio.to_thread(redis.start)
        async with working(app):
            assert await asyncio.wait_for(waiting, 60) == "done"


async def test_a_refusal_ends_a_wait_at_once(make_redis: MakeServer) -> None:
    redis = make_redis()
    app = app_on(redis.url)

    @app.task
    async def work() -> None: ...

    async with app, Redis.from_url(redis.url) as client:
        job = await work.submit()
        (key,) = [name async for name in client.scan_iter(f"*{job.id}*")]
        await client.delete(key)
        await client.lpush(key, "not a record")
        with pytest.raises(EngineRefused):
            await asyncio.wait_for(job.result(), 10)
