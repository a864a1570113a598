"""Inline and drain modes: run an app's jobs inside a test."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast import Context, Fatal, Holdfast, Retry, State, Unavailable
from holdfast.core.job import Claim
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import InvalidPayload, JobCancelled, JobFailed, TransitionInvalid, UnknownJob, WaitTimeout
from holdfast.testing.inline import ManualClock, drain, inline
from tests.worker.support import eventually


@pytest.fixture
def unreachable() -> Holdfast:
    """An app whose store is unreachable: inline mode needs none."""
    return Holdfast("redis://127.0.0.1:1")


async def test_inline_runs_a_job_during_submit(unreachable: Holdfast) -> None:
    calls: list[Any] = []

    @unreachable.task(retry=Retry(max_retries=2, base=3600), queue="mail")
    async def flaky(ctx: Context, word: str) -> str:
        calls.append((ctx.attempt, ctx.retry_count, ctx.context, word))
        if len(calls) < 3:
            raise Unavailable("down") if len(calls) == 1 else ValueError("again")
        return word.upper()

    @unreachable.task
    def plain(number: int) -> int:
        return number + 1

    with inline(unreachable):
        job = await flaky.options(context={"user": "ada"}, delay=60).submit("hey")
        assert calls == [(1, 0, {"user": "ada"}, "hey"), (2, 0, {"user": "ada"}, "hey"), (3, 1, {"user": "ada"}, "hey")]
        assert await job.result() == "HEY"
        info = await job.info()
        assert (info.state, info.attempt, info.meta.retry_count) == (State.SUCCEEDED, 3, 1)
        assert [attempt.outcome for attempt in await job.history()] == ["retrying", "retrying", "succeeded"]
        assert [await job.result() for job in await plain.submit_many([(1,), (2,)])] == [2, 3]
        assert await asyncio.to_thread(lambda: plain.submit_sync(3).result_sync()) == 4
    await unreachable.close()


async def test_inline_ends_jobs_like_a_worker(unreachable: Holdfast) -> None:
    @unreachable.task
    async def fatal() -> None:
        raise Fatal("never")

    @unreachable.task(on_exhausted="suspend", retry=Retry(max_retries=0))
    async def park() -> None:
        raise ValueError

    @unreachable.task
    async def cancel_itself(ctx: Context) -> None:
        await unreachable.job(ctx.job_id).cancel("by itself")

    with inline(unreachable):
        failed = await fatal.submit()
        with pytest.raises(JobFailed, match="TASK_FATAL: never"):
            await failed.result()
        with pytest.raises(TransitionInvalid):
            await failed.cancel()
        parked = await park.submit()
        with pytest.raises(WaitTimeout, match="still suspended"):
            await parked.result()
        await parked.cancel("enough")
        with pytest.raises(JobCancelled):
            await parked.result()
        assert await (await cancel_itself.submit()).state() is State.CANCELLED
        on_hold = await fatal.options(hold=True).submit()
        assert await on_hold.state() is State.WAITING_APPROVAL
        with pytest.raises(UnknownJob):
            await unreachable.job("unknown").cancel()
        with pytest.raises(UnknownJob):
            await unreachable.job("unknown").result()
        anything: Any = fatal
        with pytest.raises(InvalidPayload):
            await anything.submit(1)


async def test_inline_handles_idempotency_keys_and_unknown_tasks(unreachable: Holdfast) -> None:
    ran: list[int] = []
    sender = Holdfast("redis://127.0.0.1:1")

    @unreachable.task
    async def once() -> None:
        ran.append(1)

    with inline(unreachable), inline(sender):
        first = await once.options(idempotency_key="k").submit()
        again = await once.options(idempotency_key="k").submit()
        assert (again.id, again.duplicate, ran) == (first.id, True, [1])
        unknown = await sender.submit_raw("unknown", b"{}")
        with pytest.raises(JobFailed, match="UNKNOWN_TASK"):
            await unknown.result()


async def test_drain_runs_due_jobs(clock: ManualClock) -> None:
    app = Holdfast("sqlite://", clock=clock)
    runs: list[str] = []

    @app.task(retry=Retry(delays=[60], jitter=None))
    async def flaky() -> str:
        runs.append("flaky")
        if len(runs) < 3:
            raise ValueError
        return "done"

    @app.task(queue="other")
    async def follow_up() -> None:
        runs.append("follow_up")
        await flaky.submit()

    async with app:
        assert await drain(app) == 0
        later = await flaky.options(delay=30).submit()
        await follow_up.submit()
        assert await drain(app) == 2
        assert runs == ["follow_up", "flaky"]
        clock.advance(30)
        assert await drain(app) == 1
        assert await later.state() is State.SUCCEEDED
        clock.advance(30)
        assert await drain(app, ["other"]) == 0
        assert await drain(app) == 1
        assert runs == ["follow_up", "flaky", "flaky", "flaky"]
        await app.engine.set_control("default", QueueControl(paused=True))
        await flaky.submit()
        assert await drain(app) == 0


async def test_drain_waits_for_a_claim_in_flight(
    engine_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Holdfast(engine_url, namespace=namespace)

    @app.task
    async def work() -> None: ...

    async with app:
        await work.submit()
        claim = app.engine.claim

        async def claim_slowly(*arguments: Any) -> list[Claim]:
            claims = await claim(*arguments)
            if claims:
                # Leased, but not yet known to the drain.
                await asyncio.sleep(0.1)
            return claims

        monkeypatch.setattr(app.engine, "claim", claim_slowly)
        assert await drain(app) == 1


async def test_drain_reclaims_jobs_of_a_lost_worker(clock: ManualClock) -> None:
    app = Holdfast("sqlite://", clock=clock)

    @app.task
    async def work(ctx: Context) -> int:
        return ctx.attempt

    async with app:
        jobs = [await work.submit() for _ in range(3)]
        await app.engine.claim("dead", ["default"], 3, 0)
        assert await drain(app) == 0
        clock.advance(31)
        assert await drain(app) == 3
        assert [await job.result(0) for job in jobs] == [2, 2, 2]


async def test_inline_does_not_swallow_the_cancellation_of_a_test(unreachable: Holdfast) -> None:
    runs: list[str] = []

    @unreachable.task
    async def hang() -> None:
        runs.append("hang")
        await asyncio.sleep(60)

    with inline(unreachable), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await hang.submit()
    assert runs == ["hang"]


@pytest.mark.parametrize("plain", [False, True])
async def test_inline_ends_a_run_at_its_timeout(unreachable: Holdfast, plain: bool) -> None:
    cancelled: list[bool] = []
    gate = threading.Event()

    @unreachable.task(timeout=0.1, retry=Retry(max_retries=1), name="plain")
    def in_thread(ctx: Context) -> None:
        gate.wait(0.3)
        cancelled.append(ctx.cancelled)

    @unreachable.task(timeout=0.1, retry=Retry(max_retries=1), name="async")
    async def on_loop(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(ctx.cancelled)

    with inline(unreachable):
        job = await (in_thread if plain else on_loop).submit()
        assert [attempt.failure.code for attempt in await job.history() if attempt.failure] == ["TASK_TIMEOUT"] * 2
        assert await job.state() is State.FAILED
    await eventually(lambda: len(cancelled) == 2, "the threads to end")
    assert cancelled == [True, True]


async def test_drain_runs_a_retry_that_is_due_as_soon_as_its_run_ends(
    engine_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between two checks: after due jobs were promoted, before running jobs were counted."""
    app, go = Holdfast(engine_url, namespace=namespace), asyncio.Event()

    @app.task(retry=Retry(max_retries=1, base=0, jitter=None))
    async def fail(ctx: Context) -> str:
        await go.wait()
        if ctx.retry_count == 0:
            raise ValueError("not yet")
        return "now"

    async with app:
        job = await fail.submit()
        read_stats, promote = app.engine.stats, app.engine.promote

        async def has_failed() -> bool:
            return (await job.info()).meta.retry_count == 1

        async def end_the_run() -> None:
            if not go.is_set() and await job.state() is State.RUNNING:
                go.set()
                await eventually(has_failed, "the first run to fail")

        async def read_stats_then_end(*arguments: Any) -> Any:
            stats = await read_stats(*arguments)
            await end_the_run()
            return stats

        async def promote_then_end(*arguments: Any) -> Any:
            promotion = await promote(*arguments)
            await end_the_run()
            return promotion

        monkeypatch.setattr(app.engine, "stats", read_stats_then_end)
        monkeypatch.setattr(app.engine, "promote", promote_then_end)
        await drain(app)
        assert await job.state() is State.SUCCEEDED
