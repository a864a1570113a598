"""The task protocol's acceptance criteria, through the public API, on both engines (X1: 1 to 4, E1).

What happened is read from the ledger: the engine's own file on SQLite, PostgreSQL beside Redis. The whole ledger is
verified with every look at it.
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
#: Longer than any of these jobs should take, shorter than the test's own limit.
PATIENCE_S = 60


@pytest.fixture
def ledger_of_engine(engine_url: str, request: pytest.FixtureRequest) -> str | None:
    """PostgreSQL for Redis; SQLite is its own."""
    return request.getfixturevalue("postgres_url") if engine_url.startswith("redis") else None


@pytest.fixture
async def app(engine_url: str, ledger_of_engine: str | None, namespace: str) -> AsyncIterator[Holdfast]:
    app = Holdfast(
        engine_url, ledger=ledger_of_engine, namespace=namespace, visibility_timeout_s=1, heartbeat_interval_s=0.25
    )
    async with app:
        yield app


async def events(app: Holdfast, job_id: str) -> list[Event]:
    """The job's story in the ledger. A worker runs: it projects."""
    await app.ledger.wait_caught_up(PATIENCE_S)
    queries = app.ledger.queries
    (await verify_ledger(queries)).assert_valid()
    job = await queries.job(job_id)
    return [event.event() for event in await queries.events(job.key) if event.type != HEARTBEAT_EVENT]


async def story(app: Holdfast, job_id: str) -> list[str]:
    return [event.type for event in await events(app, job_id)]


async def nothing_is_pending(app: Holdfast) -> None:
    assert sum((await app.engine.stats(QUEUE)).states.values()) == 0
    if app.settings.url.startswith("redis"):
        async with Redis.from_url(app.settings.url) as redis:
            stream = f"{app.settings.namespace}:stream:task"
            assert await redis.xlen(stream) == 0
            assert (await redis.xpending(stream, "cg:workers"))["pending"] == 0


# X1, criterion 1 -------------------------------------------------------------------------------------


async def test_success_is_created_claimed_succeeded_and_nothing_is_pending(app: Holdfast) -> None:
    @app.task
    async def add(left: int, right: int) -> int:
        return left + right

    async with working(app):
        job = await add.submit(2, right=3)
        assert await job.result(timeout=PATIENCE_S) == 5
        assert await job.state() is State.SUCCEEDED
        assert await story(app, job.id) == ["task.created", "task.claimed", "task.succeeded"]
    await nothing_is_pending(app)


# X1, criterion 2 -------------------------------------------------------------------------------------


async def test_failure_is_retried_to_the_limit_and_then_a_dead_letter(app: Holdfast) -> None:
    runs: list[tuple[int, int, str]] = []

    @app.task(retry=Retry(max_retries=3, base=0, jitter=None))
    async def fail(ctx: Context) -> None:
        runs.append((ctx.attempt, ctx.retry_count, ctx.run_key))
        raise RuntimeError(f"run {ctx.attempt} failed")

    async with working(app):
        job = await fail.submit()
        with pytest.raises(JobFailed):
            await job.result(timeout=PATIENCE_S)
        assert runs == [(number + 1, number, f"{job.id}:{number}") for number in range(4)]
        assert await job.state() is State.FAILED
        assert await story(app, job.id) == [
            "task.created",
            *["task.claimed", "task.retrying"] * 3,
            "task.claimed",
            "task.dlq_pending",
            "task.dlq",
            "task.failed",
        ]
    letter = await app.ledger.queries.dead_letter_of((await app.ledger.queries.job(job.id)).key)
    assert letter is not None
    assert (letter.error_code, letter.error, letter.retry_count) == ("TASK_ERROR", "run 4 failed", 3)
    assert [attempt["number"] for attempt in letter.history.value] == [1, 2, 3, 4]
    history = await job.history()
    assert [attempt.number for attempt in history] == [1, 2, 3, 4]
    assert [attempt.failure.message for attempt in history if attempt.failure] == [
        f"run {n} failed" for n in range(1, 5)
    ]
    assert (await app.engine.stats(QUEUE)).dead_letters == 1
    await nothing_is_pending(app)


async def test_a_fatal_error_is_a_dead_letter_at_once(app: Holdfast) -> None:
    @app.task
    async def fail() -> None:
        raise Fatal("this will never work")

    async with working(app):
        job = await fail.submit()
        with pytest.raises(JobFailed, match="never work"):
            await job.result(timeout=PATIENCE_S)
        assert (await story(app, job.id))[1:] == ["task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]


# X1, criterion 3 -------------------------------------------------------------------------------------


async def test_a_dead_workers_job_is_reclaimed_and_finished(
    app: Holdfast, engine_url: str, ledger_of_engine: str | None, namespace: str
) -> None:
    @app.task(name="letter")
    async def letter(number: int) -> int:
        return number * 2

    job = await letter.submit(21)
    old_worker = await die_in_mid_run(engine_url, namespace, ledger_of_engine)
    assert await job.state() is State.RUNNING

    async with working(app) as worker:
        assert await job.result(timeout=PATIENCE_S) == 42
        told = await events(app, job.id)
    assert [event.type for event in told] == ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"]
    _, claimed, reclaimed, succeeded = told
    assert (claimed.worker, claimed.attempt) == (old_worker, 1)
    assert (reclaimed.worker, reclaimed.attempt) == (worker.incarnation, 2)
    assert reclaimed.data is not None
    assert reclaimed.data["old_worker"] == old_worker
    assert succeeded.worker == worker.incarnation
    await nothing_is_pending(app)


async def die_in_mid_run(url: str, namespace: str, ledger: str | None) -> str:
    """A worker process begins the job and is killed with -9; its name."""
    arguments = [sys.executable, "-m", "tests.acceptance.stuck_worker", url, namespace, *([ledger] if ledger else [])]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            incarnation = (await process.stdout.readline()).decode().strip()
            assert (await process.stdout.readline()) == b"begun\n"
    finally:
        process.kill()
        await process.communicate()
    return incarnation


# X1, criterion 4 -------------------------------------------------------------------------------------


async def test_the_outside_effect_happens_once_for_one_key(app: Holdfast) -> None:
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
            raise RuntimeError("the first run dies after it has paid")
        return str(receipt)

    async with working(app):
        # A retry of one job, and a second job that wants the same effect.
        first = await charge.submit("17")
        assert await first.result(timeout=PATIENCE_S) == "receipt for 17"
        again = await charge.submit("17")
        assert await again.result(timeout=PATIENCE_S) == "receipt for 17"
        told = await story(app, first.id)
    assert told == ["task.created", "task.claimed", "task.retrying", "task.claimed", "task.succeeded"]
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
        assert await again.result(timeout=PATIENCE_S) == "charged 17"
        late = await paid.submit("17")
        assert (late.id, late.duplicate) == (first.id, True)
        assert await late.result(timeout=PATIENCE_S) == "charged 17"
        assert await story(app, first.id) == ["task.created", "task.claimed", "task.succeeded"]
    assert runs == ["17"]


async def test_keys_of_tenants_and_queues_do_not_collide(app: Holdfast) -> None:
    @app.task
    async def charge() -> None:
        return None

    jobs = [
        await charge.options(idempotency_key="k").submit(),
        await charge.options(idempotency_key="k", tenant_id="acme").submit(),
        await charge.options(idempotency_key="k", queue="letters").submit(),
        await charge.submit(),
        await charge.submit(),
    ]
    assert len({job.id for job in jobs}) == 5
    assert not any(job.duplicate for job in jobs)


async def test_many_submissions_of_one_key_at_once_are_one_job(app: Holdfast) -> None:
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
        await jobs[0].result(timeout=PATIENCE_S)
        await eventually(lambda: runs, "the job to run")
    assert runs == 1


async def test_the_envelope_carries_a_context_that_the_task_can_read(app: Holdfast) -> None:
    @app.task
    async def who(ctx: Context) -> dict[str, Any]:
        return {"user": (ctx.context or {}).get("user"), "tenant": ctx.tenant_id, "trace": ctx.trace_id}

    async with working(app):
        job = await who.options(context={"user": "u1"}, tenant_id="acme", trace_id="t-1").submit()
        assert await job.result(timeout=PATIENCE_S) == {"user": "u1", "tenant": "acme", "trace": "t-1"}
