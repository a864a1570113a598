"""Steps and sleep (requirement E4): a recorded step is not repeated when the job runs again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, Job, Retry, State
from holdfast.core.job import JobInfo
from holdfast.execution.backend import backend_of
from holdfast.testing import ManualClock, drain, inline
from tests.execution import process_tasks
from tests.worker.support import eventually, working

SOON = Retry(max_retries=3, base=0.01, cap=0.01, jitter=None)


@dataclass
class Draft:
    text: str


@pytest.fixture(params=["embedded", "redis+postgres", "redis+sqlite"])
async def app(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Holdfast]:
    url, ledger = f"sqlite:///{tmp_path / 'holdfast.db'}", None
    if request.param != "embedded":
        url = request.getfixturevalue("redis_url")
        postgres = request.param == "redis+postgres"
        ledger = request.getfixturevalue("postgres_url") if postgres else f"sqlite:///{tmp_path / 'ledger.db'}"
    async with Holdfast(url, ledger=ledger, namespace=namespace, retry=SOON) as app:
        yield app


@pytest.fixture
async def embedded() -> AsyncIterator[Holdfast]:
    async with Holdfast("sqlite://", retry=SOON) as app:
        yield app


async def wait_state(app: Holdfast, job: Job[Any], *states: State) -> JobInfo:
    async def find_info() -> JobInfo | None:
        (info,) = await app.engine.get(job.queue, [job.id])
        return info if info is not None and info.state in states else None

    info: JobInfo = await eventually(find_info, f"the job to be one of {states}")
    return info


DEAD_LETTERED = (State.DLQ_PENDING, State.DLQ_RECORDED, State.FAILED)


async def test_a_recorded_step_does_not_run_again(app: Holdfast) -> None:
    runs: list[str] = []

    async def write(title: str) -> Draft:
        runs.append("write")
        return Draft(f"{title}!")

    def check(draft: Draft) -> bool:
        runs.append("check")
        return draft.text == "hello!"

    @app.task
    async def article(ctx: Context, title: str) -> list[str]:
        draft = await ctx.step("draft", write, title)
        if ctx.attempt == 1:
            raise ConnectionError("between the steps")
        assert await ctx.step("check", check, draft)
        if ctx.attempt == 2:
            raise ConnectionError("after both")
        return [type(draft).__name__, draft.text]

    async with working(app):
        assert await (await article.submit("hello")).result(60) == ["Draft", "hello!"]
        assert runs == ["write", "check"]
        # Another job has its own steps.
        await (await article.submit("hello")).result(60)
    assert runs == ["write", "check"] * 2


async def test_a_recorded_step_of_a_plain_task_does_not_run_again(app: Holdfast) -> None:
    runs: list[str] = []

    def write(title: str) -> Draft:
        runs.append("write")
        return Draft(title)

    @app.task
    def article(ctx: Context) -> str:
        draft = ctx.blocking.step("draft", write, "x")
        if ctx.attempt == 1:
            raise ConnectionError("after the step")
        return draft.text

    async with working(app):
        assert await (await article.submit()).result(60) == "x"
    assert runs == ["write"]


async def test_steps_that_differ_from_the_recorded_ones_suspend_the_job(app: Holdfast) -> None:
    @app.task(retry=SOON, on_exhausted="dead_letter")
    async def article(ctx: Context) -> None:
        names = ["draft", "check"] if ctx.attempt == 1 else ["check", "draft"]
        for name in names:
            await ctx.step(name, lambda: 1)
        raise ConnectionError("again")

    async with working(app):
        info = await wait_state(app, await article.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "STEP_MISMATCH"
    assert "recorded as 'draft'" in info.failure.message
    assert "'check'" in info.failure.message


async def test_a_step_whose_result_is_not_json_is_fatal(app: Holdfast) -> None:
    @app.task
    async def article(ctx: Context) -> None:
        await ctx.step("draft", object)

    async with working(app):
        info = await wait_state(app, await article.submit(), *DEAD_LETTERED)
    assert info.failure is not None
    assert info.failure.code == "TASK_FATAL"
    assert "the result of step 'draft' cannot be written as JSON" in info.failure.message


async def test_a_step_that_fails_is_not_recorded(embedded: Holdfast) -> None:
    @embedded.task
    async def article(ctx: Context) -> int:
        async def flaky() -> int:
            if ctx.attempt == 1:
                raise ConnectionError("not yet")
            return ctx.attempt

        return await ctx.step("flaky", flaky)

    async with working(embedded):
        assert await (await article.submit()).result(60) == 2


async def test_concurrent_steps_have_the_order_of_their_calls(embedded: Holdfast) -> None:
    runs: list[int] = []

    async def part(number: int) -> int:
        runs.append(number)
        await asyncio.sleep(0.01 * (3 - number))
        return number

    @embedded.task
    async def fan_out(ctx: Context) -> list[int]:
        found = await asyncio.gather(*(ctx.step(f"part {number}", part, number) for number in range(3)))
        if ctx.attempt == 1:
            raise ConnectionError("again")
        return list(found)

    async with working(embedded):
        assert await (await fan_out.submit()).result(60) == [0, 1, 2]
    assert sorted(runs) == [0, 1, 2]


@pytest.mark.parametrize("inner", ["step", "sleep"])
@pytest.mark.parametrize("outer", ["step", "effect"])
async def test_steps_cannot_be_nested(embedded: Holdfast, outer: str, inner: str) -> None:
    @embedded.task
    async def nested(ctx: Context) -> None:
        async def inside() -> None:
            await (ctx.step("inner", lambda: 1) if inner == "step" else ctx.sleep(100))

        await (ctx.step("outer", inside) if outer == "step" else ctx.effect("outer", inside))

    with inline(embedded):
        job = await nested.submit()
        submitter = backend_of(embedded).connections.inline_submitter
        assert submitter is not None
        found = await submitter.get(job.queue, job.id)
    assert found is not None
    # The effect may have acted before the error, so it is in doubt.
    assert found.state is (State.SUSPENDED if outer == "effect" else State.FAILED)
    assert found.failure is not None
    assert f"inside the function of a ctx.{outer}" in found.failure.message


async def test_an_effect_inside_a_step_is_allowed(embedded: Holdfast) -> None:
    acts: list[str] = []

    async def act() -> str:
        acts.append("act")
        return "done"

    @embedded.task
    async def both(ctx: Context) -> str:
        async def inside() -> str:
            return await ctx.effect("key", act)

        result = await ctx.step("outer", inside)
        if ctx.attempt == 1:
            raise ConnectionError("again")
        return result

    with inline(embedded):
        assert await (await both.submit()).result() == "done"
    assert acts == ["act"]


# Sleep -----------------------------------------------------------------------------------------------


async def test_a_sleeping_job_uses_no_worker_and_starts_again_when_due() -> None:
    clock = ManualClock()
    app = Holdfast("sqlite://", clock=clock, retry=SOON)
    seen: list[tuple[int, str]] = []

    @app.task
    async def nap(ctx: Context) -> int:
        seen.append((ctx.attempt, "before"))
        try:
            await ctx.sleep(timedelta(hours=1))
            seen.append((ctx.attempt, "between"))
            await ctx.sleep(60)
        except Exception:  # noqa: BLE001 - must not catch the interrupt of `ctx.sleep`
            seen.append((ctx.attempt, "caught"))
        seen.append((ctx.attempt, "after"))
        return ctx.retry_count

    async with app:
        job = await nap.submit()
        await drain(app)
        assert seen == [(1, "before")]
        info = await wait_state(app, job, State.QUEUED)
        assert info.next_attempt_at_ms == clock.now_ms() + 3_600_000
        clock.advance(3_599)
        await drain(app)
        assert len(seen) == 1
        clock.advance(1)
        await drain(app)
        assert seen[1:] == [(2, "before"), (2, "between")]
        clock.advance(60)
        await drain(app)
        assert seen[3:] == [(3, "before"), (3, "between"), (3, "after")]
        assert await job.result(60) == 0


async def test_a_short_sleep_is_waited_for_and_not_repeated(app: Holdfast) -> None:
    @app.task
    async def nap(ctx: Context) -> int:
        await ctx.sleep(0.05)
        if ctx.attempt == 1:
            raise ConnectionError("again")
        return ctx.attempt

    async with working(app):
        assert await (await nap.submit()).result(60) == 2


async def test_a_long_sleep_ends_the_attempt_on_a_real_worker(app: Holdfast) -> None:
    @app.task
    async def nap(ctx: Context) -> int:
        await ctx.sleep(1.2)
        return ctx.attempt

    @app.task
    def blocking_nap(ctx: Context) -> int:
        ctx.blocking.sleep(1.2)
        return ctx.attempt

    async with working(app):
        jobs = [await nap.submit(), await blocking_nap.submit()]
        assert [await job.result(60) for job in jobs] == [2, 2]


async def test_in_a_task_group_the_shortest_sleep_decides(embedded: Holdfast) -> None:
    @embedded.task
    async def naps(ctx: Context) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.sleep(3_000))
            group.create_task(ctx.sleep(50))
        return ctx.attempt

    with inline(embedded):
        assert await (await naps.submit()).result() == 3


async def test_inline_mode_does_not_wait(embedded: Holdfast) -> None:
    @embedded.task
    async def nap(ctx: Context) -> int:
        await ctx.sleep(timedelta(days=300))
        return ctx.attempt

    with inline(embedded):
        async with asyncio.timeout(5):
            assert await (await nap.submit()).result() == 2


# Child processes -------------------------------------------------------------------------------------


async def test_steps_in_a_child_process_are_an_error(tmp_path: Path) -> None:
    process_tasks.app.configure(url=f"sqlite:///{tmp_path / 'holdfast.db'}")
    async with process_tasks.app as app, working(app):
        info = await wait_state(app, await process_tasks.take_step.submit(), *DEAD_LETTERED)
    assert info.failure is not None
    assert "process=True" in info.failure.message
