"""An ended run cannot start effects or steps; an effect that it left in doubt suspends the job."""

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
from tests.effects.test_effects import break_ledger, effects, wait_settled
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
    """Blocks a task's thread until its run has ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.resume = threading.Event()
        self.ended = threading.Event()
        self.acts: list[str] = []
        self.errors: list[str] = []

    def act(self) -> str:
        self.acts.append("act")
        return "acted"

    def run(self, work: Callable[[], Any]) -> Any:
        self.begun.set()
        self.resume.wait(20)
        try:
            return work()
        except BaseException as exc:
            self.errors.append(getattr(exc, "code", repr(exc)))
            raise
        finally:
            self.ended.set()

    async def finish(self) -> None:
        self.resume.set()
        await eventually(self.ended.is_set, "the thread to end")


# An ended run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["effect", "step", "sleep"])
async def test_a_thread_whose_run_timed_out_cannot_start_an_operation(app: Holdfast, operation: str) -> None:
    late = Late()

    @app.task(timeout=0.1, retry=NEVER)
    def act(ctx: Context) -> None:
        blocking = ctx.blocking
        operations: dict[str, Callable[[], Any]] = {
            "effect": lambda: blocking.effect("k", late.act),
            "step": lambda: blocking.step("s", late.act),
            "sleep": lambda: blocking.sleep(0.01),
        }
        late.run(operations[operation])

    async with working(app):
        await wait_settled(app, await act.submit(), State.FAILED)
        await late.finish()
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])
    assert await effects(app).get([("default", "k")]) == [None]


async def test_a_thread_whose_job_was_cancelled_cannot_start_an_effect(app: Holdfast) -> None:
    late = Late()

    @app.task
    def act(ctx: Context) -> str:
        return str(late.run(lambda: ctx.blocking.effect("k", late.act)))

    async with working(app) as worker:
        job = await act.submit()
        await eventually(late.begun.is_set, "the task to begin")
        (run,) = worker._runner._in_flight  # type: ignore[union-attr]
        await job.cancel()
        await eventually(lambda: run.stopped, "the worker to stop the run")
        await late.finish()
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])


async def test_a_run_that_ends_during_a_reservation_releases_the_key(app: Holdfast) -> None:
    late, reserving, answer = Late(), asyncio.Event(), asyncio.Event()
    late.resume.set()
    ledger: Any = backend_of(app).ledger
    real: EffectStore = ledger.effects

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def reserve(self, reservations: list[Reservation]) -> Any:
            reserved = await real.reserve(reservations)
            reserving.set()
            await answer.wait()
            return reserved

    ledger.effects = Slow()

    @app.task(timeout=3.0, retry=NEVER)
    def act(ctx: Context) -> str:
        return str(late.run(lambda: ctx.blocking.effect("k", late.act)))

    async with working(app):
        job = await act.submit()
        await asyncio.wait_for(reserving.wait(), 20)
        await wait_settled(app, job, State.FAILED)
        answer.set()
        await late.finish()

        async def is_released() -> bool:
            return await real.get([("default", "k")]) == [None]

        await eventually(is_released, "the key to be released")
    assert (late.acts, late.errors) == ([], ["RUN_ENDED"])


@pytest.mark.parametrize("operation", ["effect", "step", "sleep", "transaction"])
async def test_an_async_task_that_swallows_its_cancellation_cannot_start_an_operation(
    app: Holdfast, operation: str
) -> None:
    acts: list[str] = []
    errors: list[str] = []

    async def act(*_: object) -> None:
        acts.append("act")

    @app.task(timeout=0.1, retry=NEVER)
    async def stubborn(ctx: Context) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        operations: dict[str, Callable[[], Any]] = {
            "effect": lambda: ctx.effect("k", act),
            "step": lambda: ctx.step("s", act),
            "sleep": lambda: ctx.sleep(0.01),
            "transaction": lambda: ctx.transaction(object(), "k", act),
        }
        try:
            await operations[operation]()
        except Exception as exc:
            errors.append(getattr(exc, "code", repr(exc)))
            raise

    async with working(app):
        await wait_settled(app, await stubborn.submit(), State.FAILED)
    assert (acts, errors) == ([], ["RUN_ENDED"])


# In doubt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{"retry": NEVER}, {"fatal_on": ConnectionError}])
async def test_an_effect_in_doubt_in_the_last_attempt_suspends_the_job(
    app: Holdfast, policy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(**policy)
    async def act(ctx: Context) -> None:
        await ctx.effect("it's", breaks)

    async with working(app):
        info = await wait_settled(app, await act.submit(), State.SUSPENDED)
        await eventually(lambda: "is suspended: EFFECT_IN_DOUBT" in caplog.text, "the log record")
    assert info.failure is not None
    assert (info.failure.code, info.failure.type) == ("EFFECT_IN_DOUBT", "ConnectionError")
    assert "ConnectionError: the answer was lost" in info.failure.message
    # Quoted for a shell.
    assert """holdfast effects resolve 'it'"'"'s' --done""" in info.failure.message
    assert "breaks" in info.failure.stack


async def test_a_later_error_of_the_same_run_is_reported_with_the_effect_in_doubt(app: Holdfast) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(retry=NEVER)
    async def act(ctx: Context) -> None:
        try:
            await ctx.effect("k", breaks)
        except ConnectionError:
            raise ValueError("and then this") from None

    async with working(app):
        info = await wait_settled(app, await act.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert "the answer was lost" in info.failure.message
    assert "ValueError: and then this" in info.failure.message


@pytest.mark.parametrize("policy", [{"in_doubt": "run_again"}, {"not_done": ConnectionError}])
async def test_without_a_decision_to_make_the_retry_policy_applies(app: Holdfast, policy: dict[str, Any]) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task(retry=NEVER)
    async def act(ctx: Context) -> None:
        await ctx.effect.options(**policy)("k", breaks)

    async with working(app):
        info = await wait_settled(app, await act.submit(), State.FAILED)
    assert info.failure is not None
    assert info.failure.code == "TASK_ERROR"


async def test_an_effect_that_runs_when_the_last_attempt_times_out_suspends_the_job(app: Holdfast) -> None:
    late = Late()

    @app.task(timeout=3.0, retry=NEVER)
    def act(ctx: Context) -> None:
        ctx.blocking.effect("k", lambda: late.run(late.act))

    async with working(app):
        info = await wait_settled(app, await act.submit(), State.SUSPENDED)
        await late.finish()

        async def is_done() -> bool:
            (effect,) = await effects(app).get([("default", "k")])
            return effect is not None and effect.state is EffectState.DONE

        await eventually(is_done, "the late end to be recorded")
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert "TASK_TIMEOUT" in info.failure.message or "longer than its timeout" in info.failure.message


async def test_a_group_of_errors_names_every_key_in_doubt(app: Holdfast) -> None:
    async def breaks() -> None:
        raise ConnectionError("the answer was lost")

    @app.task
    async def act(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.effect("one", breaks))
        raise AssertionError("unreachable")

    async with working(app):
        info = await wait_settled(app, await act.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert "the effect 'one' happened" in info.failure.message


# Keys in doubt that run again --------------------------------------------------------------------


async def test_not_done_does_not_resolve_the_call_before(app: Holdfast) -> None:
    """The second call did nothing: whether the first one did is still unknown."""
    acts: list[str] = []

    async def act() -> None:
        acts.append("act")
        raise ConnectionError("lost") if len(acts) == 1 else ConnectionRefusedError("refused")

    @app.task(retry=Retry(max_retries=1, base=0.01, jitter=None))
    async def publish(ctx: Context) -> None:
        await ctx.effect.options(in_doubt="run_again", not_done=ConnectionRefusedError)("k", act)

    async with working(app):
        await wait_settled(app, await publish.submit(), State.FAILED)
    (effect,) = await effects(app).get([("default", "k")])
    assert effect is not None
    assert (effect.state, len(acts)) == (EffectState.IN_DOUBT, 2)


async def test_an_effect_stays_in_doubt_when_a_later_reservation_is_released(app: Holdfast) -> None:
    acts: list[str] = []
    ledger: Any = backend_of(app).ledger
    real: EffectStore = ledger.effects

    class LosesTheReply:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        async def reserve(self, reservations: list[Reservation]) -> Any:
            reserved = await real.reserve(reservations)
            if any(reservation.replaces_token for reservation in reservations):
                raise LedgerUnavailable("the answer was lost")
            return reserved

    ledger.effects = LosesTheReply()

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

        async def has_backed_off() -> bool:
            (info,) = await app.engine.get(job.queue, [job.id])
            return info is not None and info.meta.unavailable_count > 0

        await eventually(has_backed_off, "the reservation's answer to be lost")
        await job.cancel()

        async def is_released() -> bool:
            (effect,) = await effects(app).get([("default", "k")])
            return effect is None or effect.state is EffectState.IN_DOUBT

        await eventually(is_released, "the reservation to be released")
        info = await wait_settled(app, await careful.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert (info.failure.code, len(acts)) == ("EFFECT_IN_DOUBT", 1)


# Batches -----------------------------------------------------------------------------------------


async def test_ttl_has_a_limit(app: Holdfast) -> None:
    from holdfast.effects.functions import make_options

    with pytest.raises(InvalidOption, match="ttl must be at most"):
        make_options("suspend", (), timedelta(days=999_999_999))


@pytest.mark.postgres
async def test_an_outcome_that_the_ledger_refuses_fails_alone(
    redis_url: str, postgres_url: str, namespace: str
) -> None:
    async with Holdfast(redis_url, ledger=postgres_url, namespace=namespace) as app:
        batcher = EffectBatcher(effects(app))

        async def act(number: int) -> bool:
            token = f"token-{number}"
            reservation = Reservation(
                tenant_id="t", key=f"k{number}", function="f", fingerprint="x", token=token, queue="q", job_id="j",
                attempt=1, worker="w", replaces_token="",
            )  # fmt: skip
            await batcher.reserve(reservation)
            ttl_ms = 10**18 if number == 0 else None
            return await batcher.conclude(
                EffectOutcome(
                    tenant_id="t", key=f"k{number}", token=token, state=EffectState.DONE, value=b"1", ttl_ms=ttl_ms
                )
            )

        results = await asyncio.gather(*(act(number) for number in range(5)), return_exceptions=True)
    assert isinstance(results[0], Exception)
    assert results[1:] == [True] * 4


async def test_an_outage_does_not_split_the_batch(app: Holdfast) -> None:
    faulty_effects = break_ledger(app)
    batch_sizes: list[int] = []

    async def fail(batch: list[Any]) -> Any:
        batch_sizes.append(len(batch))
        raise LedgerUnavailable("unreachable")

    faulty_effects.get = fail  # type: ignore[attr-defined]
    batcher = EffectBatcher(effects(app))
    results = await asyncio.gather(*(batcher.get("t", str(number)) for number in range(5)), return_exceptions=True)
    assert all(isinstance(answer, LedgerUnavailable) for answer in results)
    assert batch_sizes == [5]


# Edge cases --------------------------------------------------------------------------------------


async def test_a_result_that_arrives_as_the_wait_ends_is_returned(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AnswersAtOnce(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if timeout is not None:
                raise TimeoutError
            return "done"

    def run_answered(work: Any, _loop: object) -> Future[str]:
        work.close()
        future = AnswersAtOnce()
        future.set_result("done")
        return future

    async def work() -> str:
        return "never run"

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_answered)
    tools: Any = type("T", (), {"loop": asyncio.get_running_loop()})()
    assert await asyncio.to_thread(api.run_on_loop, tools, work) == "done"


def test_a_coroutine_may_be_closed_in_another_context() -> None:
    block = functions.inside_step("effect")
    Variables().run(block.__enter__)
    Variables().run(block.__exit__, None, None, None)


async def test_an_abandoned_effect_is_recorded_as_in_doubt(app: Holdfast) -> None:
    """The worker closes a coroutine that ignores its cancellation from another context."""
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

        async def await_it(coroutine: Any) -> None:
            await coroutine

        task = asyncio.create_task(await_it(runs[0]))
        await asyncio.wait_for(begun.wait(), 20)
        task.get_coro().close()

        async def is_in_doubt() -> bool:
            (effect,) = await effects(app).get([("default", "k")])
            return effect is not None and effect.state is EffectState.IN_DOUBT

        await eventually(is_in_doubt, "the effect to be recorded as in doubt")
        task.cancel()
        await job.cancel()
