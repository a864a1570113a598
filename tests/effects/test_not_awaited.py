"""What a task began through its context and did not await fails the job, instead of not happening in silence."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from holdfast import Context, Fatal, Holdfast, State
from holdfast.core.verdict import EFFECT_NOT_AWAITED
from holdfast.testing import inline
from tests.execution import process_tasks
from tests.worker.support import eventually, working

WAIT_MS = 20_000


def drop(_: object) -> None:
    """As if nobody had looked at it."""


async def failed(app: Holdfast, job: Any) -> str:
    view = await app.engine.wait_final(job.queue, job.id, WAIT_MS)
    assert view is not None
    assert (view.state, view.attempt) == (State.FAILED, 1)
    assert view.failure is not None
    assert view.failure.code == EFFECT_NOT_AWAITED
    # No "coroutine was never awaited" of ours: warnings are errors here.
    gc.collect()
    return view.failure.message


async def test_an_effect_that_was_not_awaited_fails_the_job(both: Holdfast) -> None:
    acts: list[str] = []

    @both.task
    async def charge(ctx: Context) -> str:
        drop(ctx.effect("charge:1", acts.append, "charged"))
        return "done"

    async with both, working(both):
        message = await failed(both, await charge.submit())
    assert message.startswith("ctx.effect('charge:1') was not awaited when the function returned")
    assert acts == []


@pytest.mark.parametrize("what", ["step", "sleep", "approval", "transaction", "options"])
async def test_so_does_everything_else_that_is_awaited(app: Holdfast, what: str) -> None:
    @app.task
    async def forget(ctx: Context) -> None:
        match what:
            case "step":
                drop(ctx.step("one", print))
            case "sleep":
                drop(ctx.sleep(60))
            case "approval":
                drop(ctx.approval("ship it?"))
            case "transaction":
                drop(ctx.transaction(None, "write:1", _nothing))
            case "options":
                drop(ctx.effect.options(in_doubt="run_again")("charge:1", print))

    async with app, working(app):
        message = await failed(app, await forget.submit())
    assert f"ctx.{'effect' if what == 'options' else what}" in message


async def _nothing(connection: Any) -> None:
    return None


async def test_a_plain_function_is_told_of_the_blocking_form(app: Holdfast) -> None:
    @app.task
    def charge(ctx: Context) -> None:
        drop(ctx.effect("charge:1", print))

    async with app, working(app):
        message = await failed(app, await charge.submit())
    assert "ctx.blocking" in message


async def test_an_effect_that_still_runs_when_the_function_returns_is_in_doubt(app: Holdfast) -> None:
    ended = asyncio.Event()
    began = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def act() -> None:
        began.set()
        await ended.wait()

    @app.task
    async def charge(ctx: Context) -> None:
        tasks.append(asyncio.create_task(ctx.effect("charge:1", act)))
        await began.wait()

    async with app, working(app):
        job = await charge.submit()

        # Not a final state, which could be waited for.
        async def is_suspended() -> bool:
            return await job.state() is State.SUSPENDED

        await eventually(is_suspended, "the job to be suspended")
        view = await job.info()
        ended.set()
        await asyncio.wait(tasks)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert "EFFECT_NOT_AWAITED: ctx.effect('charge:1') was still running when the function ret" in view.failure.message


async def test_what_was_awaited_in_any_way_is_well(app: Holdfast) -> None:
    @app.task
    async def charge(ctx: Context) -> list[int]:
        unused = ctx.step("not taken", print)
        unused.close()
        for number in range(200):
            await ctx.step(f"step {number}", int, number)
        together = await asyncio.gather(*(ctx.effect(f"gathered:{n}", int, n) for n in range(3)))
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(ctx.effect("grouped", int, 3))
        return [*together, grouped.result(), await ctx.effect("awaited", int, 4)]

    async with app, working(app):
        assert await (await charge.submit()).result(60) == [0, 1, 2, 3, 4]


async def test_a_function_that_raises_fails_by_what_it_raised(app: Holdfast) -> None:
    @app.task
    async def charge(ctx: Context) -> None:
        forgotten = ctx.effect("charge:1", print)
        raise Fatal(f"with {type(forgotten).__name__}")

    async with app, working(app):
        job = await charge.submit()
        view = await app.engine.wait_final(job.queue, job.id, WAIT_MS)
    assert view is not None
    assert view.failure is not None
    assert view.failure.code == "TASK_FATAL"
    gc.collect()


async def test_inline_and_in_a_child_process(app: Holdfast, url: str) -> None:
    @app.task
    async def charge(ctx: Context) -> None:
        drop(ctx.effect("charge:1", print))

    with inline(app):
        job = await charge.submit()
        view = await job.info()
    assert view.failure is not None
    assert view.failure.code == EFFECT_NOT_AWAITED
    process_tasks.app.configure(url=url, heartbeat_interval_s=0.1, reclaim_interval_s=0.1)
    async with process_tasks.app, working(process_tasks.app):
        message = await failed(process_tasks.app, await process_tasks.forget_approval.submit())
    assert "ctx.approval('ship it?')" in message
    assert "write `await`" in message
