"""The task protocol's acceptance criteria, through the public API, on both engines (X1: 1 to 4, E1).

Events are read from the ledger: the engine's own file on SQLite, PostgreSQL with Redis. Each read verifies the whole
ledger.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Context, Fatal, Holdfast, Retry, State
from holdfast.core.job import Event
from holdfast.core.states import HEARTBEAT_EVENT
from holdfast.errors import JobFailed
from holdfast.ledger.verify import verify_ledger
from tests.worker.support import eventually, working

QUEUE = "default"
#: Longer than any of these jobs should take, shorter than the timeout of a test.
TIMEOUT_S = 60


@pytest.fixture
def ledger_of_engine(engine_url: str, request: pytest.FixtureRequest) -> str | None:
    """PostgreSQL for Redis; None for SQLite, which is embedded."""
    return request.getfixturevalue("postgres_url") if engine_url.startswith("redis") else None


@pytest.fixture
async def app(engine_url: str, ledger_of_engine: str | None, namespace: str) -> AsyncIterator[Holdfast]:
    app = Holdfast(
        engine_url, ledger=ledger_of_engine, namespace=namespace, visibility_timeout_s=1, heartbeat_interval_s=0.25
    )
    async with app:
        yield app


async def read_events(app: Holdfast, job_id: str) -> list[Event]:
    """Return the job's history from the ledger. Needs a running worker, which projects."""
    await app.ledger.wait_caught_up(TIMEOUT_S)
    queries = app.ledger.queries
    (await verify_ledger(queries)).assert_valid()
    job = await queries.job(job_id)
    return [event.event() for event in await queries.events(job.key) if event.type != HEARTBEAT_EVENT]


async def list_event_types(app: Holdfast, job_id: str) -> list[str]:
    return [event.type for event in await read_events(app, job_id)]


async def require_nothing_pending(app: Holdfast) -> None:
    assert sum((await app.engine.stats(QUEUE)).states.values()) == 0
    if app.settings.url.startswith("redis"):
        async with Redis.from_url(app.settings.url) as redis:
            stream = f"{app.settings.namespace}:stream:task"
            assert await redis.xlen(stream) == 0
            assert (await redis.xpending(stream, "cg:workers"))["pending"] == 0


# X1, criterion 1 -------------------------------------------------------------------------------------


async def test_a_successful_job_is_created_claimed_succeeded_and_leaves_nothing_pending(app: Holdfast) -> None:
    @app.task
    async def add(left: int, right: int) -> int:
        return left + right

    async with working(app):
        job = await add.submit(2, right=3)
        assert await job.result(timeout=TIMEOUT_S) == 5
        assert await job.state() is State.SUCCEEDED
        assert await list_event_types(app, job.id) == ["task.created", "task.claimed", "task.succeeded"]
    await require_nothing_pending(app)


# X1, criterion 2 -------------------------------------------------------------------------------------


async def test_a_failing_job_is_retried_to_the_limit_and_then_dead_lettered(app: Holdfast) -> None:
    runs: list[tuple[int, int, str]] = []

    @app.task(retry=Retry(max_retries=3, base=0, jitter=None))
    async def fail(ctx: Context) -> None:
        runs.append((ctx.attempt, ctx.retry_count, ctx.run_key))
        raise RuntimeError(f"run {ctx.attempt} failed")

    async with working(app):
        job = await fail.submit()
        with pytest.raises(JobFailed):
            await job.result(timeout=TIMEOUT_S)
        assert runs == [(number + 1, number, f"{job.id}:{number}") for number in range(4)]
        assert await job.state() is State.FAILED
        assert await list_event_types(app, job.id) == [
            "task.created",
            *["task.claimed", "task.retrying"] * 3,
            "task.claimed",
            "task.dlq_pending",
            "task.dlq",
            "task.failed",
        ]
    dead_letter = await app.ledger.queries.dead_letter_of((await app.ledger.queries.job(job.id)).key)
    assert dead_letter is not None
    assert (dead_letter.error_code, dead_letter.error, dead_letter.retry_count) == ("TASK_ERROR", "run 4 failed", 3)
    assert [attempt["number"] for attempt in dead_letter.history.value] == [1, 2, 3, 4]
    history = await job.history()
    assert [attempt.number for attempt in history] == [1, 2, 3, 4]
    assert [attempt.failure.message for attempt in history if attempt.failure] == [
        f"run {n} failed" for n in range(1, 5)
    ]
    assert (await app.engine.stats(QUEUE)).dead_letters == 1
    await require_nothing_pending(app)


async def test_a_fatal_error_dead_letters_the_job_at_once(app: Holdfast) -> None:
    @app.task
    async def fail() -> None:
        raise Fatal("this will never work")

    async with working(app):
        job = await fail.submit()
        with pytest.raises(JobFailed, match="never work"):
            await job.result(timeout=TIMEOUT_S)
        assert (await list_event_types(app, job.id))[1:] == [
            "task.claimed",
            "task.dlq_pending",
            "task.dlq",
            "task.failed",
        ]


# X1, criterion 3 -------------------------------------------------------------------------------------


async def test_a_dead_workers_job_is_reclaimed_and_finished(
    app: Holdfast, engine_url: str, ledger_of_engine: str | None, namespace: str
) -> None:
    @app.task(name="double")
    async def double(number: int) -> int:
        return number * 2

    job = await double.submit(21)
    old_worker = await kill_worker_during_run(engine_url, namespace, ledger_of_engine)
    assert await job.state() is State.RUNNING

    async with working(app) as worker:
        assert await job.result(timeout=TIMEOUT_S) == 42
        history = await read_events(app, job.id)
    assert [event.type for event in history] == ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"]
    _, claimed, reclaimed, succeeded = history
    assert (claimed.worker, claimed.attempt) == (old_worker, 1)
    assert (reclaimed.worker, reclaimed.attempt) == (worker.incarnation, 2)
    assert reclaimed.data is not None
    assert reclaimed.data["old_worker"] == old_worker
    assert succeeded.worker == worker.incarnation
    await require_nothing_pending(app)


async def kill_worker_during_run(url: str, namespace: str, ledger: str | None) -> str:
    """Start a worker process and kill it with SIGKILL during the job. Return its incarnation."""
    arguments = [sys.executable, "-m", "tests.acceptance.stuck_worker", url, namespace, *([ledger] if ledger else [])]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            incarnation = (await process.stdout.readline()).decode().strip()
            assert (await process.stdout.readline()) == b"begun\n"
    finally:
        process.kill()
        await process.communicate()
    return incarnation


# X1, criterion 4 -------------------------------------------------------------------------------------


async def test_an_effect_happens_once_for_one_key(app: Holdfast) -> None:
    paid: list[str] = []
    runs: list[int] = []

    async def pay(order: str) -> str:
        paid.append(order)
        return f"receipt for {order}"

    @app.task(retry=Retry(max_retries=2, base=0, jitter=None))
    async def charge(ctx: Context, order: str) -> str:
        receipt = await ctx.effect(f"pay:{order}", pay, order)
        runs.append(ctx.attempt)
        if len(runs) == 1:
            raise RuntimeError("the first run fails after it has paid")
        return str(receipt)

    async with working(app):
        # A retry of one job, and a second job with the same effect.
        first = await charge.submit("17")
        assert await first.result(timeout=TIMEOUT_S) == "receipt for 17"
        again = await charge.submit("17")
        assert await again.result(timeout=TIMEOUT_S) == "receipt for 17"
        types = await list_event_types(app, first.id)
    assert types == ["task.created", "task.claimed", "task.retrying", "task.claimed", "task.succeeded"]
    assert (paid, len(runs)) == (["17"], 3)
    (effect,) = await app.ledger.queries.effects((await app.ledger.queries.job(first.id)).key)
    assert (effect.key, effect.state) == ("pay:17", "done")


# E1 --------------------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_job_and_runs_once(app: Holdfast) -> None:
    runs: list[str] = []

    @app.task
    async def charge(order: str) -> str:
        runs.append(order)
        return f"charged {order}"

    paid = charge.options(idempotency_key="order-17")
    first = await paid.submit("17")
    again = await paid.submit("17")
    assert (first.duplicate, again.duplicate, again.id) == (False, True, first.id)
    async with working(app):
        assert await again.result(timeout=TIMEOUT_S) == "charged 17"
        late = await paid.submit("17")
        assert (late.id, late.duplicate) == (first.id, True)
        assert await late.result(timeout=TIMEOUT_S) == "charged 17"
        assert await list_event_types(app, first.id) == ["task.created", "task.claimed", "task.succeeded"]
    assert runs == ["17"]


async def test_keys_of_tenants_and_queues_do_not_collide(app: Holdfast) -> None:
    @app.task
    async def charge() -> None:
        return None

    jobs = [
        await charge.options(idempotency_key="k").submit(),
        await charge.options(idempotency_key="k", tenant_id="acme").submit(),
        await charge.options(idempotency_key="k", queue="mail").submit(),
        await charge.submit(),
        await charge.submit(),
    ]
    assert len({job.id for job in jobs}) == 5
    assert not any(job.duplicate for job in jobs)


async def test_concurrent_submissions_of_one_key_are_one_job(app: Holdfast) -> None:
    runs = 0

    @app.task
    async def charge() -> None:
        nonlocal runs
        runs += 1

    paid = charge.options(idempotency_key="order-18")
    jobs = await asyncio.gather(*(paid.submit() for _ in range(50)))
    assert len({job.id for job in jobs}) == 1
    assert sum(not job.duplicate for job in jobs) == 1
    async with working(app):
        await jobs[0].result(timeout=TIMEOUT_S)
        await eventually(lambda: runs, "the job to run")
    assert runs == 1


async def test_the_envelope_carries_a_context_that_the_task_can_read(app: Holdfast) -> None:
    @app.task
    async def read_context(ctx: Context) -> dict[str, Any]:
        return {"user": (ctx.context or {}).get("user"), "tenant": ctx.tenant_id, "trace": ctx.trace_id}

    async with working(app):
        job = await read_context.options(context={"user": "u1"}, tenant_id="acme", trace_id="t-1").submit()
        assert await job.result(timeout=TIMEOUT_S) == {"user": "u1", "tenant": "acme", "trace": "t-1"}
