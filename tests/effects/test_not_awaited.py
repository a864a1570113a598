"""An operation of the context that a task started and did not await fails the job instead of being lost silently."""

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


def discard(_: object) -> None:
    """Discard an awaitable."""


async def wait_failed(app: Holdfast, job: Any) -> str:
    info = await app.engine.wait_final(job.queue, job.id, WAIT_MS)
    assert info is not None
    assert (info.state, info.attempt) == (State.FAILED, 1)
    assert info.failure is not None
    assert info.failure.code == EFFECT_NOT_AWAITED
    # holdfast must not cause "coroutine was never awaited": warnings are errors here.
    gc.collect()
    return info.failure.message


async def test_an_effect_that_was_not_awaited_fails_the_job(both: Holdfast) -> None:
    acts: list[str] = []

    @both.task
    async def charge(ctx: Context) -> str:
        discard(ctx.effect("charge:1", acts.append, "charged"))
        return "done"

    async with both, working(both):
        message = await wait_failed(both, await charge.submit())
    assert message.startswith("ctx.effect('charge:1') was not awaited when the function returned")
    assert acts == []


@pytest.mark.parametrize("operation", ["step", "sleep", "approval", "transaction", "options"])
async def test_any_other_operation_that_was_not_awaited_fails_the_job(app: Holdfast, operation: str) -> None:
    @app.task
    async def discard_operation(ctx: Context) -> None:
        match operation:
            case "step":
                discard(ctx.step("one", print))
            case "sleep":
                discard(ctx.sleep(60))
            case "approval":
                discard(ctx.approval("ship it?"))
            case "transaction":
                discard(ctx.transaction(None, "write:1", _do_nothing))
            case "options":
                discard(ctx.effect.options(in_doubt="run_again")("charge:1", print))

    async with app, working(app):
        message = await wait_failed(app, await discard_operation.submit())
    assert f"ctx.{'effect' if operation == 'options' else operation}" in message


async def _do_nothing(connection: Any) -> None:
    return None


async def test_a_plain_function_gets_a_hint_to_the_blocking_form(app: Holdfast) -> None:
    @app.task
    def charge(ctx: Context) -> None:
        discard(ctx.effect("charge:1", print))

    async with app, working(app):
        message = await wait_failed(app, await charge.submit())
    assert "ctx.blocking" in message


async def test_an_effect_that_still_runs_when_the_function_returns_is_in_doubt(app: Holdfast) -> None:
    may_end = asyncio.Event()
    started = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def act() -> None:
        started.set()
        await may_end.wait()

    @app.task
    async def charge(ctx: Context) -> None:
        tasks.append(asyncio.create_task(ctx.effect("charge:1", act)))
        await started.wait()

    async with app, working(app):
        job = await charge.submit()

        # Not a final state, so `wait_final` cannot be used.
        async def is_suspended() -> bool:
            return await job.state() is State.SUSPENDED

        await eventually(is_suspended, "the job to be suspended")
        info = await job.info()
        may_end.set()
        await asyncio.wait(tasks)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert "EFFECT_NOT_AWAITED: ctx.effect('charge:1') was still running when the function ret" in info.failure.message


async def test_operations_awaited_in_any_way_succeed(app: Holdfast) -> None:
    @app.task
    async def charge(ctx: Context) -> list[int]:
        unused = ctx.step("not taken", print)
        unused.close()
        for number in range(200):
            await ctx.step(f"step {number}", int, number)
        gathered = await asyncio.gather(*(ctx.effect(f"gathered:{n}", int, n) for n in range(3)))
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(ctx.effect("grouped", int, 3))
        return [*gathered, grouped.result(), await ctx.effect("awaited", int, 4)]

    async with app, working(app):
        assert await (await charge.submit()).result(60) == [0, 1, 2, 3, 4]


async def test_an_exception_of_the_function_takes_precedence(app: Holdfast) -> None:
    @app.task
    async def charge(ctx: Context) -> None:
        not_awaited = ctx.effect("charge:1", print)
        raise Fatal(f"with {type(not_awaited).__name__}")

    async with app, working(app):
        job = await charge.submit()
        info = await app.engine.wait_final(job.queue, job.id, WAIT_MS)
    assert info is not None
    assert info.failure is not None
    assert info.failure.code == "TASK_FATAL"
    gc.collect()


async def test_an_operation_that_was_not_awaited_fails_inline_and_in_a_child_process(app: Holdfast, url: str) -> None:
    @app.task
    async def charge(ctx: Context) -> None:
        discard(ctx.effect("charge:1", print))

    with inline(app):
        job = await charge.submit()
        info = await job.info()
    assert info.failure is not None
    assert info.failure.code == EFFECT_NOT_AWAITED
    process_tasks.app.configure(url=url, heartbeat_interval_s=0.1, reclaim_interval_s=0.1)
    async with process_tasks.app, working(process_tasks.app):
        message = await wait_failed(process_tasks.app, await process_tasks.drop_approval.submit())
    assert "ctx.approval('ship it?')" in message
    assert "write `await`" in message
