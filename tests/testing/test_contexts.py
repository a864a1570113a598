"""`make_context`: unit tests of task functions without an app."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast import Context, Holdfast
from holdfast.errors import EffectInDoubt, EffectMismatch, InvalidOption, RunEnded, StepMismatch, UsageError
from holdfast.testing import ApprovalInterrupt, ManualClock, make_context

app = Holdfast("redis://127.0.0.1:1")
acts: list[str] = []


@pytest.fixture(autouse=True)
def _no_acts() -> None:
    acts.clear()


async def charge(order: str) -> str:
    acts.append(order)
    return f"charge {len(acts)}"


@app.task
async def pay(ctx: Context, order: str) -> str:
    receipt = await ctx.effect(f"charge {order}", charge, order)
    if ctx.attempt == 1:
        raise ConnectionError("after the charge")
    return receipt


def test_a_context_has_the_given_values() -> None:
    ctx = make_context(
        task="mail.send",
        job_id="j1",
        queue="mail",
        tenant_id="acme",
        attempt=3,
        idempotency_key="order-7",
        trace_id="t",
        context={"user": "ada"},
    )
    assert (ctx.task, ctx.job_id, ctx.queue, ctx.tenant_id) == ("mail.send", "j1", "mail", "acme")
    assert (ctx.attempt, ctx.retry_count, ctx.idempotency_key, ctx.run_key) == (3, 2, "order-7", "j1:2")
    assert (ctx.trace_id, ctx.context, ctx.cancelled) == ("t", {"user": "ada"}, False)
    plain = make_context(attempt=2, retry_count=0)
    assert (plain.retry_count, plain.idempotency_key, plain.context) == (0, plain.job_id, {})
    assert plain.job_id != make_context().job_id


async def test_an_effect_runs_once_across_attempts() -> None:
    first = make_context()
    with pytest.raises(ConnectionError):
        await pay(first, "7")
    second = first.next_attempt()
    assert (second.attempt, second.retry_count, second.job_id) == (2, 1, first.job_id)
    assert await pay(second, "7") == "charge 1"
    # Another context shares no state.
    assert await pay(make_context(attempt=2), "7") == "charge 2"
    with pytest.raises(EffectMismatch):
        await second.effect("charge 7", charge, "8")


async def test_an_effect_that_fails_is_in_doubt() -> None:
    async def fail() -> None:
        raise ConnectionError("lost")

    ctx = make_context()
    with pytest.raises(ConnectionError):
        await ctx.effect("k", fail)
    assert list(ctx._effects_in_doubt) == ["k"]
    with pytest.raises(EffectInDoubt):
        await ctx.next_attempt().effect("k", fail)


async def test_steps_and_sleeps_are_kept_for_the_next_attempt() -> None:
    clock, taken = ManualClock(), list[str]()

    def take(name: str) -> str:
        taken.append(name)
        return name

    async def work(ctx: Context) -> str:
        name = await ctx.step("take", take, "a")
        await ctx.sleep(timedelta(days=300))
        await ctx.sleep(0.5)
        return name

    start_ms, ctx = clock.now_ms(), make_context(clock=clock)
    for _ in range(2):
        assert await work(ctx) == "a"
        ctx = ctx.next_attempt()
    assert taken == ["a"]
    assert clock.now_ms() - start_ms == 300 * 86_400_000 + 500
    with pytest.raises(StepMismatch):
        await ctx.step("another", take, "b")


async def test_approvals_are_returned_or_interrupt_the_run() -> None:
    ctx = make_context(approvals={"refund": "ada"})
    assert (await ctx.approval("refund", {"cents": 100})).by == ("ada",)
    with pytest.raises(ApprovalInterrupt, match="'close'"):
        await ctx.approval("close")
    assert (await make_context(approvals=["close"]).approval("close")).by == ("test",)
    with pytest.raises(InvalidOption):
        await ctx.approval("refund", quorum=0)


async def test_an_ended_run_cannot_start_an_operation() -> None:
    ctx = make_context(cancelled=True)
    assert ctx.cancelled
    with pytest.raises(RunEnded):
        await ctx.effect("k", charge, "7")
    with pytest.raises(RunEnded):
        await ctx.step("s", charge, "7")
    later = make_context()
    later._end()
    assert later.cancelled
    assert acts == []


def _run_blocking(ctx: Context) -> tuple[str, str]:
    ctx.blocking.effect("k", acts.append, "acted")
    ctx.blocking.sleep(3600)
    return ctx.blocking.step("s", str.upper, "taken"), ctx.blocking.approval("ok").by[0]


def test_a_plain_function_works_without_an_event_loop() -> None:
    ctx = make_context(approvals=["ok"])
    assert _run_blocking(ctx) == ("TAKEN", "test")
    assert _run_blocking(ctx.next_attempt()) == ("TAKEN", "test")
    assert acts == ["acted"]


async def test_a_plain_function_works_in_a_thread_of_an_event_loop() -> None:
    ctx = make_context(approvals=["ok"])
    assert await asyncio.to_thread(_run_blocking, ctx) == ("TAKEN", "test")
    with pytest.raises(UsageError, match=r"await ctx\.effect"):
        ctx.blocking.effect("other", acts.append, "acted")


def test_a_context_can_be_created_before_the_event_loop() -> None:
    ctx = make_context(attempt=2)
    assert asyncio.run(pay.function(ctx, "7")) == "charge 1"
    assert asyncio.run(pay.function(ctx, "7")) == "charge 1"


async def test_a_context_without_stores_names_make_context_in_its_error() -> None:
    ctx = make_context()
    with pytest.raises(UsageError, match="make_context"):
        _ = Context(ctx._claim).effect
