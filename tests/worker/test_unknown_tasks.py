"""Jobs that a worker cannot run but another may: the task is unknown here, or has another schema."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
import redis.asyncio

from holdfast import Holdfast, Retry, State
from holdfast.core.verdict import Release, Settlement
from holdfast.errors import JobFailed
from holdfast.execution.backend import backend_of
from holdfast.testing.inline import ManualClock, drain
from tests.worker.support import eventually, working


def app_like(app: Holdfast, **settings: Any) -> Holdfast:
    """Another app on the same store, as another deployment of the service would be."""
    same = {"namespace": app.settings.namespace, "heartbeat_interval_s": 0.1, "reclaim_interval_s": 0.1}
    return Holdfast(app.settings.url, clock=backend_of(app).clock, **{**same, **settings})


async def released(app: Holdfast, job: Any) -> bool:
    """Whether a worker has released the job because it cannot run it."""
    info = await app.engine.get(job.queue, [job.id])
    return info[0] is not None and info[0].state is State.QUEUED and info[0].next_attempt_at_ms > 0


async def test_two_apps_on_one_queue_lose_no_job(both: Holdfast) -> None:
    other = app_like(both)

    @both.task
    async def first() -> str:
        return "first"

    @other.task
    async def second() -> str:
        return "second"

    async with other, working(both):
        jobs = [await second.submit() for _ in range(15)]
        await eventually(lambda: released(both, jobs[-1]), "the release of a job")
        async with working(other):
            jobs += [await (first if number % 2 else second).submit() for number in range(30)]
            results = await asyncio.gather(*(job.result(180) for job in jobs))
        assert results.count("second") == 30
        for job in jobs:
            info = await job.info()
            # Unstarted: no attempt is used, nothing is in its history but the run.
            assert (info.attempt, len(info.meta.history), info.meta.retry_count) == (1, 1, 0)


async def test_a_new_optional_argument_waits_for_a_worker_that_has_it(both: Holdfast) -> None:
    newer = app_like(both)

    @both.task(name="greet", retry=Retry(max_retries=0))
    async def greet(name: str) -> str:
        return name

    @newer.task(name="greet", retry=Retry(max_retries=0))
    async def greet_newer(name: str, title: str | None = None) -> str:
        return f"{title} {name}"

    async with newer, working(both):
        fits = await greet_newer.submit("ada")
        jobs = [await greet_newer.submit("ada", title="countess") for _ in range(5)]
        jobs.append(await greet_newer.options(tenant_id="acme", trace_id="t").submit("ada", title="countess"))
        jobs.append(await greet_newer.options(delay=0.01).submit("ada", title="countess"))
        assert await fits.result(60) == "ada"
        for job in jobs:
            await eventually(partial(released, both, job), "the release of the job")
    async with newer:
        async with working(newer):
            assert await asyncio.gather(*(job.result(180) for job in jobs)) == ["countess ada"] * 7
        assert {(await job.info()).attempt for job in jobs} == {1}


async def test_the_delay_grows_and_the_grace_time_ends(app: Holdfast, clock: ManualClock) -> None:
    sender = app_like(app)
    async with sender:
        job = await sender.submit_raw("unknown", b"{}")
        delays: list[float] = []
        while (info := await job.info()).state is State.QUEUED:
            if info.next_attempt_at_ms:
                delays.append((info.next_attempt_at_ms - clock.now_ms()) / 1000)
                clock.advance(delays[-1])
            await drain(app)
        assert delays[:6] == [1, 1, 1, 1, 1, 1.25]
        assert delays == sorted(delays[:-1]) + delays[-1:]
        assert (max(delays), sum(delays)) == (30, 600)
        assert info.failure is not None
        assert (info.state, info.failure.code, info.attempt) == (State.FAILED, "UNKNOWN_TASK", 1)
        assert "no task named 'unknown'" in info.failure.message
        assert len(info.meta.history) == 1


async def test_without_grace_an_unknown_task_is_a_dead_letter_at_once(both: Holdfast) -> None:
    both.configure(unknown_task_grace_s=0)
    sender = app_like(both)
    async with working(both), sender:
        job = await sender.submit_raw("unknown", b"{}")
        with pytest.raises(JobFailed, match="UNKNOWN_TASK"):
            await job.result(60)
        assert (await job.info()).attempt == 1


async def test_a_started_attempt_ends_the_count(app: Holdfast, clock: ManualClock) -> None:
    knows = app_like(app)
    failing = True

    @knows.task(retry=Retry(delays=[60], jitter=None))
    async def flaky() -> None:
        if failing:
            raise ValueError("not yet")

    async with knows:
        job = await flaky.submit()
        await drain(app)
        assert (await job.info()).meta.unknown_since_ms == clock.now_ms()
        clock.advance(1)
        await drain(knows)
        info = await job.info()
        assert (info.state, info.meta.unknown_since_ms, info.attempt) == (State.RETRYING, 0, 1)
        clock.advance(700)
        await drain(app)
        # Counted from now: an hour ago another worker did not know it either, but it has run since.
        assert (await job.info()).state is State.QUEUED
        failing = False
        clock.advance(1)
        await drain(knows)
        assert (await job.info()).state is State.SUCCEEDED


async def test_a_payload_that_does_not_fit_stays_fatal(both: Holdfast) -> None:
    @both.task
    async def strict(number: int) -> int:
        return number

    sender = app_like(both)

    @sender.task(name="strict")
    async def same_schema(number: int) -> int:
        return number

    backend = backend_of(sender)
    async with working(both), sender, app_like(both) as without_schema:
        old = await without_schema.submit_raw("strict", b'{"number": "seven"}')
        # As if another program had changed the payload after it was checked.
        envelope = backend.envelope("strict", b'{"number": 7}')
        forged = msgspec.structs.replace(envelope, payload=b'{"number": "seven"}')
        receipt = await (await backend.connections.submitter()).submit(forged)
        for job_id in (old.id, receipt.job_id):
            info = await both.engine.wait_final("default", job_id, 30_000)
            assert info is not None
            assert info.failure is not None
            assert (info.state, info.failure.code) == (State.FAILED, "INVALID_PAYLOAD")


async def test_the_schema_stays_with_a_job_that_is_released_and_retried(both: Holdfast) -> None:
    newer, seen = app_like(both), 0

    @both.task(name="greet")
    async def greet(name: str) -> str:
        return name

    @newer.task(name="greet", retry=Retry(delays=[0.01], jitter=None))
    async def greet_newer(name: str, title: str | None = None) -> str:
        nonlocal seen
        seen += 1
        if seen == 1:
            raise ValueError("not yet")
        return f"{title} {name}"

    async with newer:
        job = await greet_newer.submit("ada", title="countess")
        (claim,) = await newer.engine.claim("w", ["default"], 1, 1_000)
        now_ms = await newer.engine.now_ms()
        await newer.engine.settle([Settlement(claim, Release("the worker drains"), now_ms)])
        async with working(newer):
            await eventually(lambda: seen == 1, "the first attempt")
        async with working(both):
            await eventually(lambda: released(both, job), "the release")
        async with working(newer):
            assert await job.result(180) == "countess ada"


async def test_a_foreign_message_of_an_unknown_task_is_released(redis_url: str, namespace: str) -> None:
    app, other = (Holdfast(redis_url, namespace=namespace) for _ in range(2))

    @other.task
    async def second(number: int) -> int:
        return number

    client = redis.asyncio.Redis.from_url(redis_url)
    async with app, other, client:
        fields: Any = {"task_id": "7f3a", "type": "second", "payload": '{"number": 7}'}
        await client.xadd(f"{namespace}:stream:task", fields)
        job = app.job("7f3a")
        async with working(app):
            await eventually(lambda: released(app, job), "the release")
            assert (await job.info()).meta.unknown_since_ms > 0
        async with working(other):
            assert await job.result(60) == 7
