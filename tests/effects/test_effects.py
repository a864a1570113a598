"""Effects in tasks (requirement E2): once for each key, or in doubt; on every pair of engine and ledger."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast import Context, Holdfast, Job, Retry, State
from holdfast.core.job import JobInfo
from holdfast.effects import Done, NotDone
from holdfast.errors import InvalidOption, LedgerUnavailable, Unavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.effects import EffectOutcome, EffectState, EffectStore
from holdfast.testing import inline
from tests.worker.support import eventually, working

SOON = Retry(max_retries=3, base=0.01, cap=0.01, jitter=None)


class Receipt(BaseModel):
    number: int


class ExternalSystem:
    """The external system that effects act on."""

    def __init__(self) -> None:
        self.acts: list[Any] = []

    async def publish(self, text: str) -> str:
        self.acts.append(text)
        return f"published {text}"

    def post(self, text: str) -> str:
        self.acts.append(text)
        return threading.current_thread().name

    async def charge(self, cents: int) -> Receipt:
        self.acts.append(cents)
        return Receipt(number=cents)


@pytest.fixture(params=["embedded", "redis+postgres", "redis+sqlite"])
async def app(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Holdfast]:
    url, ledger = f"sqlite:///{tmp_path / 'holdfast.db'}", None
    if request.param != "embedded":
        url = request.getfixturevalue("redis_url")
        postgres = request.param == "redis+postgres"
        ledger = request.getfixturevalue("postgres_url") if postgres else f"sqlite:///{tmp_path / 'ledger.db'}"
    app = Holdfast(
        url, ledger=ledger, namespace=namespace, retry=SOON, visibility_timeout_s=1, heartbeat_interval_s=0.2
    )
    async with app:
        yield app


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[Holdfast]:
    app = Holdfast(
        f"sqlite:///{tmp_path / 'holdfast.db'}", retry=SOON, visibility_timeout_s=1, heartbeat_interval_s=0.2
    )
    async with app:
        yield app


@pytest.fixture
def external() -> ExternalSystem:
    return ExternalSystem()


def effects(app: Holdfast) -> EffectStore:
    backend = backend_of(app)
    assert backend.ledger is not None
    return backend.ledger.effects


async def wait_settled(app: Holdfast, job: Job[Any], state: State) -> JobInfo:
    # With a ledger, a dead letter waits to be recorded; these tests do not wait for that.
    accepted_states = (State.DLQ_PENDING, State.DLQ_RECORDED, State.FAILED) if state is State.FAILED else (state,)

    async def find_info() -> JobInfo | None:
        (info,) = await app.engine.get(job.queue, [job.id])
        return info if info is not None and info.state in accepted_states else None

    info: JobInfo = await eventually(find_info, f"the job to be {state}")
    return info


async def test_an_effect_runs_once_and_later_calls_get_its_result(app: Holdfast, external: ExternalSystem) -> None:
    @app.task
    async def publish(ctx: Context, text: str) -> list[str]:
        first = await ctx.effect(f"publish:{text}", external.publish, text)
        if ctx.attempt == 1 and text == "a":
            raise ConnectionError("after the effect")
        return [first, await ctx.effect(f"publish:{text}", external.publish, text)]

    async with working(app):
        retried, plain = await publish.submit("a"), await publish.submit("b")
        assert await retried.result(60) == ["published a"] * 2
        assert await plain.result(60) == ["published b"] * 2
        again = await publish.submit("a")
        assert await again.result(60) == ["published a"] * 2
    assert sorted(external.acts) == ["a", "b"]


async def test_concurrent_duplicates_on_two_workers_act_once(app: Holdfast, external: ExternalSystem) -> None:
    gate = asyncio.Event()

    async def slow(text: str) -> str:
        external.acts.append(text)
        await gate.wait()
        return text.upper()

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("one", slow, "x")

    async with working(app, concurrency=5), working(app, concurrency=5):
        jobs = [await publish.submit() for _ in range(10)]
        await eventually(lambda: external.acts, "the effect to begin")
        await asyncio.sleep(0.1)
        gate.set()
        assert [await job.result(60) for job in jobs] == ["X"] * 10
    assert external.acts == ["x"]


async def test_a_key_belongs_to_a_tenant(app: Holdfast, external: ExternalSystem) -> None:
    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("same", external.publish, ctx.tenant_id)

    async with working(app):
        jobs = [await publish.options(tenant_id=name).submit() for name in ("a", "b")]
        assert [await job.result(60) for job in jobs] == ["published a", "published b"]
    assert sorted(external.acts) == ["a", "b"]


async def test_results_have_their_types_the_first_time_and_later(embedded: Holdfast, external: ExternalSystem) -> None:
    @embedded.task
    async def charge(ctx: Context) -> list[str]:
        first = await ctx.effect("charge", external.charge, 5)
        second = await ctx.effect("charge", external.charge, 5)
        return [type(first).__name__, type(second).__name__, str(first == second)]

    async with working(embedded):
        assert await (await charge.submit()).result(60) == ["Receipt", "Receipt", "True"]


async def test_a_plain_function_runs_in_a_thread(embedded: Holdfast, external: ExternalSystem) -> None:
    @embedded.task
    async def post(ctx: Context) -> str:
        return await ctx.effect("post", external.post, "x")

    async with working(embedded):
        assert (await (await post.submit()).result(60)).startswith("holdfast-effect")


async def test_a_blocking_effect_runs_in_the_thread_of_its_task(app: Holdfast, external: ExternalSystem) -> None:
    @app.task
    def post(ctx: Context, fail: bool) -> list[str]:
        name = ctx.blocking.effect("post", external.post, "x")
        if fail and ctx.attempt == 1:
            raise ConnectionError("after the effect")
        return [name, threading.current_thread().name[:12]]

    async with working(app):
        first = await (await post.submit(True)).result(60)
        second = await (await post.submit(False)).result(60)
    assert first[0] == second[0]
    assert first[0].startswith("holdfast-job")
    assert external.acts == ["x"]


async def test_a_blocking_effect_on_the_event_loop_is_an_error(embedded: Holdfast, external: ExternalSystem) -> None:
    @embedded.task
    async def post(ctx: Context) -> str:
        return ctx.blocking.effect("post", external.post, "x")

    async with working(embedded):
        info = await wait_settled(embedded, await post.submit(), State.FAILED)
    assert info.failure is not None
    assert "would block the running event loop" in info.failure.message


# Wrong use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["function", "arguments"])
async def test_another_function_or_other_arguments_under_a_key_are_an_error(
    app: Holdfast, external: ExternalSystem, change: str
) -> None:
    @app.task
    async def publish(ctx: Context) -> str:
        await ctx.effect("key", external.publish, "a")
        if change == "function":
            return await ctx.effect("key", external.post, "a")
        return await ctx.effect("key", external.publish, "b")

    async with working(app):
        info = await wait_settled(app, await publish.submit(), State.FAILED)
    assert info.failure is not None
    assert info.failure.code == "TASK_FATAL"
    assert "EffectMismatch" in info.failure.type
    assert external.acts == ["a"]


@pytest.mark.parametrize("key", ["", "x" * 1001, "nul\0", 3])
async def test_a_key_must_be_a_valid_string(embedded: Holdfast, external: ExternalSystem, key: Any) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect(key, external.publish, "a")

    with inline(embedded):
        job = await publish.submit()
        assert await job.state() is State.FAILED
    assert external.acts == []


async def test_an_effect_without_a_ledger_fails_with_the_setting_to_add(
    redis_url: str, namespace: str, external: ExternalSystem
) -> None:
    app = Holdfast(redis_url, namespace=namespace)

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("key", external.publish, "a")

    async with app, working(app):
        info = await wait_settled(app, await publish.submit(), State.FAILED)
    assert info.failure is not None
    assert "HOLDFAST_LEDGER" in info.failure.message
    assert info.failure.code == "TASK_FATAL"
    assert external.acts == []


async def test_options_are_checked(embedded: Holdfast) -> None:
    errors: list[str] = []

    @embedded.task
    async def wrong(ctx: Context) -> None:
        for options in ({"in_doubt": "retry"}, {"not_done": ValueError()}, {"ttl": 0}, {"ttl": -1}):
            try:
                ctx.effect.options(**options)
            except InvalidOption as exc:
                errors.append(str(exc))

    with inline(embedded):
        await (await wrong.submit()).result()
    assert len(errors) == 4


# In doubt ------------------------------------------------------------------------------------------


async def test_an_exception_leaves_the_effect_in_doubt_and_suspends_the_job(
    app: Holdfast, external: ExternalSystem
) -> None:
    async def publish_and_break(text: str) -> str:
        await external.publish(text)
        raise ConnectionError("the answer was lost")

    @app.task(retry_on=ConnectionError, on_exhausted="dead_letter")
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", publish_and_break, "a")

    async with working(app):
        info = await wait_settled(app, await publish.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert "ConnectionError: the answer was lost" in info.failure.message
    assert "holdfast effects resolve k" in info.failure.message
    assert (info.meta.retry_count, external.acts) == (1, ["a"])


async def test_an_exception_listed_in_not_done_releases_the_key(app: Holdfast, external: ExternalSystem) -> None:
    async def refused(text: str) -> str:
        if not external.acts:
            external.acts.append("refused")
            raise ConnectionRefusedError("refused")
        return await external.publish(text)

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(not_done=ConnectionRefusedError)("k", refused, "a")

    async with working(app):
        assert await (await publish.submit()).result(60) == "published a"
    assert external.acts == ["refused", "a"]


async def test_run_again_acts_at_least_once(app: Holdfast, external: ExternalSystem) -> None:
    async def breaks_once(text: str) -> str:
        await external.publish(text)
        if len(external.acts) == 1:
            raise ConnectionError("the answer was lost")
        return "second"

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(in_doubt="run_again")("k", breaks_once, "a")

    async with working(app):
        assert await (await publish.submit()).result(60) == "second"
    assert external.acts == ["a", "a"]


@pytest.mark.parametrize("happened", [True, False])
async def test_a_check_resolves_an_effect_in_doubt(app: Holdfast, external: ExternalSystem, happened: bool) -> None:
    checked_keys: list[str] = []

    async def check(key: str) -> Done[Receipt] | NotDone:
        checked_keys.append(key)
        return Done(Receipt(number=7)) if happened else NotDone()

    async def charge(cents: int) -> Receipt:
        external.acts.append(cents)
        if len(external.acts) == 1:
            raise TimeoutError("no answer")
        return Receipt(number=cents)

    @app.task
    async def pay(ctx: Context) -> int:
        return (await ctx.effect.options(in_doubt=check)("pay", charge, 9)).number

    async with working(app):
        assert await (await pay.submit()).result(60) == (7 if happened else 9)
        assert await (await pay.submit()).result(60) == (7 if happened else 9)
    assert (checked_keys, external.acts) == (["pay"], [9] if happened else [9, 9])


async def test_a_timeout_of_the_task_leaves_the_effect_in_doubt(app: Holdfast, external: ExternalSystem) -> None:
    async def hang(text: str) -> str:
        await external.publish(text)
        await asyncio.sleep(60)
        return "never"

    @app.task(timeout=0.2)
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", hang, "a")

    async with working(app):
        info = await wait_settled(app, await publish.submit(), State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert "CancelledError" in info.failure.message
    assert external.acts == ["a"]


async def test_a_drain_records_the_effect_as_in_doubt(app: Holdfast, external: ExternalSystem) -> None:
    async def hang(text: str) -> str:
        await external.publish(text)
        await asyncio.sleep(60)
        return "never"

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", hang, "a")

    async with working(app) as worker:
        await publish.submit()
        await eventually(lambda: external.acts, "the effect to begin")
        worker.drain()
        worker.drain()
    (effect,) = await effects(app).get([("default", "k")])
    assert effect is not None
    assert (effect.state, external.acts) == (EffectState.IN_DOUBT, ["a"])


async def test_a_result_that_is_not_json_is_in_doubt_and_never_runs_again(
    app: Holdfast, external: ExternalSystem
) -> None:
    async def odd(text: str) -> object:
        await external.publish(text)
        return object()

    @app.task(retry_on=Exception)
    async def publish(ctx: Context) -> None:
        await ctx.effect("k", odd, "a")

    @app.task
    async def publish_without_retry_on(ctx: Context) -> None:
        await ctx.effect("k2", odd, "b")

    async with working(app):
        without_retry_on = await wait_settled(app, await publish_without_retry_on.submit(), State.SUSPENDED)
        suspended = await wait_settled(app, await publish.submit(), State.SUSPENDED)
    assert without_retry_on.failure is not None
    assert suspended.failure is not None
    assert without_retry_on.failure.code == suspended.failure.code == "EFFECT_IN_DOUBT"
    assert "has happened, but its result cannot be kept" in without_retry_on.failure.message
    assert external.acts == ["b", "a"]


async def test_a_job_continues_after_its_effect_is_resolved(app: Holdfast, external: ExternalSystem) -> None:
    async def lost(text: str) -> str:
        await external.publish(text)
        raise ConnectionError("the answer was lost")

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", lost, "a")

    async with working(app):
        job = await publish.submit()
        await wait_settled(app, job, State.SUSPENDED)
        (effect,) = await effects(app).get([("default", "k")])
        assert effect is not None
        value = b'"it is there"'
        outcome = EffectOutcome(tenant_id="default", key="k", token=effect.token, state=EffectState.DONE, value=value)
        await effects(app).conclude([outcome])
        await app.engine.move(job.queue, job.id, State.QUEUED, actor="me", reason="checked")
        assert await job.result(60) == "it is there"
    assert external.acts == ["a"]


async def test_a_late_result_resolves_an_effect_in_doubt(app: Holdfast, external: ExternalSystem) -> None:
    """A thread cannot be stopped: the effect ends after the task has timed out."""
    gate = threading.Event()

    def slow(text: str) -> str:
        external.acts.append(text)
        gate.wait(20)
        return "late"

    @app.task(timeout=0.2, retry=Retry(max_retries=0))
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", slow, "a")

    async with working(app):
        job = await publish.submit()
        await wait_settled(app, job, State.SUSPENDED)
        (effect,) = await effects(app).get([("default", "k")])
        assert effect is not None
        assert effect.state is EffectState.IN_DOUBT
        gate.set()

        async def is_done() -> bool:
            (effect,) = await effects(app).get([("default", "k")])
            return effect is not None and effect.state is EffectState.DONE

        await eventually(is_done, "the late end to be recorded")
        assert await (await publish.submit()).result(60) == "late"
    assert external.acts == ["a"]


async def test_a_late_result_of_a_key_reserved_again_is_logged_and_counted(
    embedded: Holdfast, external: ExternalSystem, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def slow(text: str) -> str:
        external.acts.append(text)
        if len(external.acts) == 1:
            gate.wait(20)
        return f"number {len(external.acts)}"

    @embedded.task(timeout=0.2)
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(in_doubt="run_again")("k", slow, "a")

    async with working(embedded):
        assert await (await publish.submit()).result(60) == "number 2"
        with caplog.at_level(logging.ERROR, "holdfast.effects"):
            gate.set()
            await eventually(lambda: embedded.engine.counters.effect_duplicates, "the duplicate to be counted")
    assert "effect.duplicate" in caplog.text


async def test_a_key_can_be_used_again_after_its_ttl(embedded: Holdfast, external: ExternalSystem) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(ttl=timedelta(milliseconds=1))("k", external.publish, "a")

    async with working(embedded):
        await (await publish.submit()).result(60)
        await asyncio.sleep(0.01)
        await (await publish.submit()).result(60)
    assert external.acts == ["a", "a"]


async def test_waiting_for_a_slow_holder_uses_up_no_retries(embedded: Holdfast, external: ExternalSystem) -> None:
    gate = asyncio.Event()

    async def slow(text: str) -> str:
        external.acts.append(text)
        await gate.wait()
        return "done"

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", slow, "a")

    async with working(embedded):
        first = await publish.submit()
        await eventually(lambda: external.acts, "the effect to begin")
        second = await publish.submit()

        async def has_backed_off() -> bool:
            (info,) = await embedded.engine.get(second.queue, [second.id])
            return info is not None and info.meta.unavailable_count > 0

        await eventually(has_backed_off, "the second job to back off")
        gate.set()
        assert [await first.result(60), await second.result(60)] == ["done", "done"]
        (info,) = await embedded.engine.get(second.queue, [second.id])
    assert info is not None
    assert (info.meta.retry_count, external.acts) == (0, ["a"])


# Unreachable ledger --------------------------------------------------------------------------------


class FaultyEffects:
    """An effect store that fails on demand: before a call, or after it (the reply is lost)."""

    def __init__(self, real: EffectStore) -> None:
        self._real = real
        self.before: set[str] = set()
        self.after: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(batch: Any) -> Any:
            if name in self.before:
                raise LedgerUnavailable(f"{name}: unreachable")
            reply = await getattr(self._real, name)(batch)
            if name in self.after:
                raise LedgerUnavailable(f"{name}: the answer was lost")
            return reply

        return call


def break_ledger(app: Holdfast) -> FaultyEffects:
    ledger: Any = backend_of(app).ledger
    ledger.effects = FaultyEffects(ledger.effects)
    faulty_effects: FaultyEffects = ledger.effects
    return faulty_effects


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_outage_at_the_reservation_does_nothing_and_uses_up_no_retry(
    embedded: Holdfast, external: ExternalSystem, when: str
) -> None:
    faulty_effects = break_ledger(embedded)

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", external.publish, "a")

    async with working(embedded):
        getattr(faulty_effects, when).add("reserve")
        job = await publish.submit()

        async def has_backed_off() -> bool:
            (info,) = await embedded.engine.get(job.queue, [job.id])
            return info is not None and info.meta.unavailable_count > 1

        await eventually(has_backed_off, "the job to back off")
        assert external.acts == []
        getattr(faulty_effects, when).clear()
        # A reservation whose reply was lost is known to be unused, so it does not put the effect in doubt.
        assert await job.result(60) == "published a"
        (info,) = await embedded.engine.get(job.queue, [job.id])
    assert info is not None
    assert (info.meta.retry_count, external.acts) == (0, ["a"])


async def test_a_short_outage_between_effect_and_record_is_waited_out(
    embedded: Holdfast, external: ExternalSystem
) -> None:
    faulty_effects = break_ledger(embedded)
    faulty_effects.before.add("conclude")

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", external.publish, "a")

    async with working(embedded):
        job = await publish.submit()
        await eventually(lambda: external.acts, "the effect to happen")
        faulty_effects.before.clear()
        assert await job.result(60) == "published a"
        (info,) = await embedded.engine.get(job.queue, [job.id])
    assert info is not None
    assert (info.attempt, external.acts) == (1, ["a"])


async def test_a_long_outage_between_effect_and_record_is_in_doubt(
    embedded: Holdfast, external: ExternalSystem
) -> None:
    faulty_effects = break_ledger(embedded)
    faulty_effects.before.add("conclude")

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", external.publish, "a")

    async with working(embedded):
        job = await publish.submit()

        async def has_backed_off() -> bool:
            (info,) = await embedded.engine.get(job.queue, [job.id])
            return info is not None and info.meta.unavailable_count > 0

        await eventually(has_backed_off, "the job to back off")
        faulty_effects.before.clear()
        info = await wait_settled(embedded, job, State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert external.acts == ["a"]


async def test_tasks_without_effects_run_while_the_ledger_is_unreachable(embedded: Holdfast) -> None:
    break_ledger(embedded).before.update({"reserve", "conclude", "get", "steps", "record_steps"})

    @embedded.task
    async def plain(ctx: Context) -> int:
        return ctx.attempt

    async with working(embedded):
        assert await (await plain.submit()).result(60) == 1


# Inline mode ---------------------------------------------------------------------------------------


async def test_inline_mode_supports_effects(embedded: Holdfast, external: ExternalSystem) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        value = await ctx.effect("k", external.publish, "a")
        if ctx.attempt == 1:
            raise ConnectionError("after")
        return value

    @embedded.task
    def post(ctx: Context) -> str:
        return ctx.blocking.effect("p", external.post, "b")

    @embedded.task
    async def doubtful(ctx: Context) -> None:
        async def fail() -> None:
            raise ConnectionError("lost")

        await ctx.effect("d", fail)

    with inline(embedded):
        assert await (await publish.submit()).result() == "published a"
        await (await post.submit()).result()
        assert await (await doubtful.submit()).state() is State.SUSPENDED
    assert external.acts == ["a", "b"]


async def test_unavailable_raised_by_a_task_is_still_handled(embedded: Holdfast) -> None:
    @embedded.task
    async def down(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise Unavailable("not now")
        return ctx.attempt

    async with working(embedded):
        assert await (await down.submit()).result(60) == 3
