"""A run that is over begins nothing any more, and what it left in doubt is not buried in a dead letter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context as Variables
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, Job, Retry, State
from holdfast.effects import api, functions
from holdfast.effects.runtime import EffectBatcher
from holdfast.errors import InvalidOption, LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.effects import EffectOutcome, EffectState, EffectStore, Reservation
from tests.effects.test_effects import break_ledger, effects, settled
from tests.worker.support import eventually, working

SOON = Retry(max_retries=3, base=0.01, cap=0.01, jitter=None)
NEVER = Retry(max_retries=0)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Holdfast]:
    app = Holdfast(
        f"sqlite:///{tmp_path / 'holdfast.db'}", retry=SOON, visibility_timeout_s=1, heartbeat_interval_s=0.2
    )
    async with app:
        yield app


class Late:
    """A task's thread that is held until its run is over."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.acts: list[str] = []
        self.errors: list[str] = []

    def act(self) -> str:
        self.acts.append("act")
        return "acted"

    def run(self, work: Callable[[], Any]) -> Any:
        self.begun.set()
        self.go_on.wait(20)
        try:
            return work()
        except BaseException as exc:
            self.errors.append(getattr(exc, "code", repr(exc)))
            raise
        finally:
            self.ended.set()

    async def over(self) -> None:
        self.go_on.set()
        await eventually(self.ended.is_set, "the thread to end")


# Nothing is begun ----------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["effect", "step", "sleep"])
async def test_a_thread_whose_run_timed_out_begins_nothing(app: Holdfast, door: str) -> None:
    late = Late()

    @app.task(timeout=0.1, retry=NEVER)
    def act(ctx: Context) -> None:
        blocking = ctx.blocking
        works: dict[str, Callable[[], Any]] = {
            "effect": lambda: blocking.effect("k", late.act),
            "step": lambda: blocking.step("s", late.act),
            "sleep": lambda: blocking.sleep(0.01),
        }
        late.run(works[door])

    async with working(app):
        await settled(app, await act.submit(), State.FAILED)
        await late.over()
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])
    assert await effects(app).get([("default", "k")]) == [None]


async def test_a_thread_whose_job_was_cancelled_begins_no_effect(app: Holdfast) -> None:
    late = Late()

    @app.task
    def act(ctx: Context) -> str:
        return str(late.run(lambda: ctx.blocking.effect("k", late.act)))

    async with working(app) as worker:
        job = await act.submit()
        await eventually(late.begun.is_set, "the task to begin")
        (run,) = worker._runner._in_flight  # type: ignore[union-attr]
        await job.cancel()
        await eventually(lambda: run.stopped, "the worker to hear of it")
        await late.over()
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])


async def test_a_run_that_ends_while_its_key_is_reserved_gives_the_key_back(app: Holdfast) -> None:
    late, reserving, answer = Late(), asyncio.Event(), asyncio.Event()
    late.go_on.set()
    ledger: Any = backend_of(app).ledger
    real: EffectStore = ledger.effects

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def reserve(self, wishes: list[Reservation]) -> Any:
            held = await real.reserve(wishes)
            reserving.set()
            await answer.wait()
            return held

    ledger.effects = Slow()

    @app.task(timeout=3.0, retry=NEVER)
    def act(ctx: Context) -> str:
        return str(late.run(lambda: ctx.blocking.effect("k", late.act)))

    async with working(app):
        job = await act.submit()
        await asyncio.wait_for(reserving.wait(), 20)
        await settled(app, job, State.FAILED)
        answer.set()
        await late.over()

        async def free() -> bool:
            return await real.get([("default", "k")]) == [None]

        await eventually(free, "the key to be free again")
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])


@pytest.mark.parametrize("door", ["effect", "step", "sleep", "transaction"])
async def test_an_async_task_that_swallows_its_cancellation_begins_nothing(app: Holdfast, door: str) -> None:
    acts: list[str] = []
    errors: list[str] = []

    async def act(*_: object) -> None:
        acts.append("act")

    @app.task(timeout=0.1, retry=NEVER)
    async def stubborn(ctx: Context) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        works: dict[str, Callable[[], Any]] = {
            "effect": lambda: ctx.effect("k", act),
            "step": lambda: ctx.step("s", act),
            "sleep": lambda: ctx.sleep(0.01),
            "transaction": lambda: ctx.transaction(object(), "k", act),
        }
        try:
            await works[door]()
        except Exception as exc:
            errors.append(getattr(exc, "code", repr(exc)))
            raise

    async with working(app):
        await settled(app, await stubborn.submit(), State.FAILED)
    assert (acts, errors) == ([], ["RUN_ENDED"])


# What is left in doubt -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{"retry": NEVER}, {"fatal_on": ConnectionError}])
async def test_a_doubt_of_the_last_attempt_suspends_the_job(
    app: Holdfast, policy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(**policy)
    async def act(ctx: Context) -> None:
        await ctx.effect("it's", breaks)

    async with working(app):
        view = await settled(app, await act.submit(), State.SUSPENDED)
        await eventually(lambda: "is suspended: EFFECT_IN_DOUBT" in caplog.text, "the log to say so")
    assert view.failure is not None
    assert (view.failure.code, view.failure.type) == ("EFFECT_IN_DOUBT", "ConnectionError")
    assert "ConnectionError: the answer was lost" in view.failure.message
    # As a shell takes it.
    assert """holdfast effects resolve 'it'"'"'s' --done""" in view.failure.message
    assert "breaks" in view.failure.stack


async def test_a_later_error_of_the_same_run_is_told_beside_the_doubt(app: Holdfast) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(retry=NEVER)
    async def act(ctx: Context) -> None:
        try:
            await ctx.effect("k", breaks)
        except ConnectionError:
            raise ValueError("and then this") from None

    async with working(app):
        view = await settled(app, await act.submit(), State.SUSPENDED)
    assert view.failure is not None
    assert "the answer was lost" in view.failure.message
    assert "ValueError: and then this" in view.failure.message


@pytest.mark.parametrize("policy", [{"in_doubt": "run_again"}, {"not_done": ConnectionError}])
async def test_where_nobody_has_to_decide_the_policy_of_retries_holds(app: Holdfast, policy: dict[str, Any]) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(retry=NEVER)
    async def act(ctx: Context) -> None:
        await ctx.effect.options(**policy)("k", breaks)

    async with working(app):
        view = await settled(app, await act.submit(), State.FAILED)
    assert view.failure is not None
    assert view.failure.code == "TASK_ERROR"


async def test_an_act_that_is_under_way_when_the_last_attempt_times_out_suspends_the_job(app: Holdfast) -> None:
    late = Late()

    @app.task(timeout=3.0, retry=NEVER)
    def act(ctx: Context) -> None:
        ctx.blocking.effect("k", lambda: late.run(late.act))

    async with working(app):
        view = await settled(app, await act.submit(), State.SUSPENDED)
        await late.over()

        async def done() -> bool:
            (held,) = await effects(app).get([("default", "k")])
            return held is not None and held.state is EffectState.DONE

        await eventually(done, "the late end to be recorded")
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert "TASK_TIMEOUT" in view.failure.message or "longer than its timeout" in view.failure.message


async def test_a_group_of_errors_names_every_key_in_doubt(app: Holdfast) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task
    async def act(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.effect("one", breaks))
        raise AssertionError("unreachable")

    async with working(app):
        view = await settled(app, await act.submit(), State.SUSPENDED)
    assert view.failure is not None
    assert "the effect 'one' happened" in view.failure.message


# A doubt that was taken over --------------------------------------------------------------------------


async def test_not_done_says_nothing_of_the_call_before(app: Holdfast) -> None:
    """Run again, and this time nothing happened: what the first one did is as unknown as before."""
    acts: list[str] = []

    async def act() -> None:
        acts.append("act")
        raise ConnectionError("lost") if len(acts) == 1 else ConnectionRefusedError("nobody there")

    @app.task(retry=Retry(max_retries=1, base=0.01, jitter=None))
    async def publish(ctx: Context) -> None:
        await ctx.effect.options(in_doubt="run_again", not_done=ConnectionRefusedError)("k", act)

    async with working(app):
        await settled(app, await publish.submit(), State.FAILED)
    (held,) = await effects(app).get([("default", "k")])
    assert held is not None
    assert (held.state, len(acts)) == (EffectState.IN_DOUBT, 2)


async def test_a_doubt_survives_a_reservation_that_is_given_back(app: Holdfast) -> None:
    acts: list[str] = []
    ledger: Any = backend_of(app).ledger
    real: EffectStore = ledger.effects

    class LosesTheAnswer:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def reserve(self, wishes: list[Reservation]) -> Any:
            held = await real.reserve(wishes)
            if any(wish.replaces_token for wish in wishes):
                raise LedgerUnavailable("the answer was lost")
            return held

    ledger.effects = LosesTheAnswer()

    async def act() -> str:
        acts.append("act")
        raise ConnectionError("lost")

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(in_doubt="run_again")("k", act)

    @app.task
    async def careful(ctx: Context) -> str:
        return await ctx.effect("k", act)

    async with working(app):
        job = await publish.submit()

        async def backed_off() -> bool:
            (view,) = await app.engine.get(job.queue, [job.id])
            return view is not None and view.meta.unavailable_count > 0

        await eventually(backed_off, "the reservation's answer to be lost")
        await job.cancel()

        async def given_back() -> bool:
            (held,) = await effects(app).get([("default", "k")])
            return held is None or held.state is EffectState.IN_DOUBT

        await eventually(given_back, "the reservation to be given back")
        view = await settled(app, await careful.submit(), State.SUSPENDED)
    assert view.failure is not None
    assert (view.failure.code, len(acts)) == ("EFFECT_IN_DOUBT", 1)


# Batches -------------------------------------------------------------------------------------------


async def test_a_time_to_live_has_a_limit(app: Holdfast) -> None:
    from holdfast.effects.functions import make_options

    with pytest.raises(InvalidOption, match="ttl must be at most"):
        make_options("suspend", (), timedelta(days=999_999_999))


@pytest.mark.postgres
async def test_one_that_the_ledger_cannot_take_fails_alone(redis_url: str, postgres_url: str, namespace: str) -> None:
    async with Holdfast(redis_url, ledger=postgres_url, namespace=namespace) as app:
        desk = EffectBatcher(effects(app))

        async def act(number: int) -> bool:
            token = f"token-{number}"
            wish = Reservation(
                tenant_id="t", key=f"k{number}", function="f", fingerprint="x", token=token, queue="q", job_id="j",
                attempt=1, worker="w", replaces_token="",
            )  # fmt: skip
            await desk.reserve(wish)
            ttl_ms = 10**18 if number == 0 else None
            return await desk.conclude(
                EffectOutcome(
                    tenant_id="t", key=f"k{number}", token=token, state=EffectState.DONE, value=b"1", ttl_ms=ttl_ms
                )
            )

        answers = await asyncio.gather(*(act(number) for number in range(5)), return_exceptions=True)
    assert isinstance(answers[0], Exception)
    assert answers[1:] == [True] * 4


async def test_an_outage_is_not_tried_once_for_each(app: Holdfast) -> None:
    broken = break_ledger(app)
    asked: list[int] = []
    look = broken.get

    async def away(batch: list[Any]) -> Any:
        asked.append(len(batch))
        raise LedgerUnavailable("away")

    broken.get = away  # type: ignore[attr-defined]
    desk = EffectBatcher(effects(app))
    answers = await asyncio.gather(*(desk.get("t", str(number)) for number in range(5)), return_exceptions=True)
    assert all(isinstance(answer, LedgerUnavailable) for answer in answers)
    assert asked == [5]
    assert look is not None


# Corners -------------------------------------------------------------------------------------------


async def test_an_answer_that_comes_as_the_look_ends_is_taken(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    class Just(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if timeout is not None:
                raise TimeoutError
            return "done"

    def answered(work: Any, _loop: object) -> Future[str]:
        work.close()
        future = Just()
        future.set_result("done")
        return future

    async def work() -> str:
        return "never run"

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", answered)
    tools: Any = type("T", (), {"loop": asyncio.get_running_loop()})()
    assert await asyncio.to_thread(api.run_on_loop, tools, work) == "done"


def test_a_coroutine_may_be_closed_in_another_context() -> None:
    block = functions.inside_step("effect")
    Variables().run(block.__enter__)
    Variables().run(block.__exit__, None, None, None)


async def test_an_effect_that_is_thrown_away_is_written_down_as_in_doubt(app: Holdfast) -> None:
    """As the worker does with a coroutine that ignores its cancellation: closed from another context."""
    begun = asyncio.Event()
    runs: list[Any] = []

    async def hang() -> None:
        begun.set()
        await asyncio.sleep(60)

    @app.task
    async def act(ctx: Context) -> None:
        runs.append(ctx.effect("k", hang))
        await asyncio.Event().wait()

    async with working(app):
        job: Job[None] = await act.submit()
        await eventually(lambda: runs, "the task to begin")

        async def by_hand(coroutine: Any) -> None:
            await coroutine

        task = asyncio.create_task(by_hand(runs[0]))
        await asyncio.wait_for(begun.wait(), 20)
        task.get_coro().close()

        async def in_doubt() -> bool:
            (held,) = await effects(app).get([("default", "k")])
            return held is not None and held.state is EffectState.IN_DOUBT

        await eventually(in_doubt, "the doubt to be written down")
        task.cancel()
        await job.cancel()
