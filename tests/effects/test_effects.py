"""Effects as tasks see them (requirement E2): once for each key, or in doubt; on every pair of engine and ledger."""

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


class World:
    """What effects act on."""

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
def world() -> World:
    return World()


def effects(app: Holdfast) -> EffectStore:
    backend = backend_of(app)
    assert backend.ledger is not None
    return backend.ledger.effects


async def settled(app: Holdfast, job: Job[Any], state: State) -> JobInfo:
    # With a ledger a dead letter waits for its record, which is not the point here.
    wanted = (State.DLQ_PENDING, State.DLQ_RECORDED, State.FAILED) if state is State.FAILED else (state,)

    async def look() -> JobInfo | None:
        (view,) = await app.engine.get(job.queue, [job.id])
        return view if view is not None and view.state in wanted else None

    view: JobInfo = await eventually(look, f"the job to be {state}")
    return view


async def test_it_runs_once_and_whoever_comes_later_gets_its_result(app: Holdfast, world: World) -> None:
    @app.task
    async def publish(ctx: Context, text: str) -> list[str]:
        first = await ctx.effect(f"publish:{text}", world.publish, text)
        if ctx.attempt == 1 and text == "a":
            raise ConnectionError("after the effect")
        return [first, await ctx.effect(f"publish:{text}", world.publish, text)]

    async with working(app):
        retried, plain = await publish.submit("a"), await publish.submit("b")
        assert await retried.result(60) == ["published a"] * 2
        assert await plain.result(60) == ["published b"] * 2
        again = await publish.submit("a")
        assert await again.result(60) == ["published a"] * 2
    assert sorted(world.acts) == ["a", "b"]


async def test_duplicates_at_once_on_two_workers_are_one_act(app: Holdfast, world: World) -> None:
    gate = asyncio.Event()

    async def slow(text: str) -> str:
        world.acts.append(text)
        await gate.wait()
        return text.upper()

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("one", slow, "x")

    async with working(app, concurrency=5), working(app, concurrency=5):
        jobs = [await publish.submit() for _ in range(10)]
        await eventually(lambda: world.acts, "the effect to begin")
        await asyncio.sleep(0.1)
        gate.set()
        assert [await job.result(60) for job in jobs] == ["X"] * 10
    assert world.acts == ["x"]


async def test_a_key_belongs_to_a_tenant(app: Holdfast, world: World) -> None:
    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("same", world.publish, ctx.tenant_id)

    async with working(app):
        jobs = [await publish.options(tenant_id=name).submit() for name in ("a", "b")]
        assert [await job.result(60) for job in jobs] == ["published a", "published b"]
    assert sorted(world.acts) == ["a", "b"]


async def test_results_have_their_types_the_first_time_and_later(embedded: Holdfast, world: World) -> None:
    @embedded.task
    async def charge(ctx: Context) -> list[str]:
        first = await ctx.effect("charge", world.charge, 5)
        second = await ctx.effect("charge", world.charge, 5)
        return [type(first).__name__, type(second).__name__, str(first == second)]

    async with working(embedded):
        assert await (await charge.submit()).result(60) == ["Receipt", "Receipt", "True"]


async def test_a_plain_function_runs_in_a_thread(embedded: Holdfast, world: World) -> None:
    @embedded.task
    async def post(ctx: Context) -> str:
        return await ctx.effect("post", world.post, "x")

    async with working(embedded):
        assert (await (await post.submit()).result(60)).startswith("holdfast-effect")


async def test_a_plain_task_acts_by_the_blocking_door_in_its_own_thread(app: Holdfast, world: World) -> None:
    @app.task
    def post(ctx: Context, fail: bool) -> list[str]:
        name = ctx.blocking.effect("post", world.post, "x")
        if fail and ctx.attempt == 1:
            raise ConnectionError("after the effect")
        return [name, threading.current_thread().name[:12]]

    async with working(app):
        first = await (await post.submit(True)).result(60)
        second = await (await post.submit(False)).result(60)
    assert first[0] == second[0]
    assert first[0].startswith("holdfast-job")
    assert world.acts == ["x"]


async def test_the_blocking_door_says_when_it_is_the_wrong_one(embedded: Holdfast, world: World) -> None:
    @embedded.task
    async def post(ctx: Context) -> str:
        return ctx.blocking.effect("post", world.post, "x")

    async with working(embedded):
        view = await settled(embedded, await post.submit(), State.FAILED)
    assert view.failure is not None
    assert "would block the running event loop" in view.failure.message


# Wrong use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["function", "arguments"])
async def test_another_function_or_other_arguments_under_a_key_are_an_error(
    app: Holdfast, world: World, change: str
) -> None:
    @app.task
    async def publish(ctx: Context) -> str:
        await ctx.effect("key", world.publish, "a")
        if change == "function":
            return await ctx.effect("key", world.post, "a")
        return await ctx.effect("key", world.publish, "b")

    async with working(app):
        view = await settled(app, await publish.submit(), State.FAILED)
    assert view.failure is not None
    assert view.failure.code == "TASK_FATAL"
    assert "EffectMismatch" in view.failure.type
    assert world.acts == ["a"]


@pytest.mark.parametrize("key", ["", "x" * 1001, "nul\0", 3])
async def test_a_key_must_be_a_text(embedded: Holdfast, world: World, key: Any) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect(key, world.publish, "a")

    with inline(embedded):
        job = await publish.submit()
        assert await job.state() is State.FAILED
    assert world.acts == []


async def test_without_a_ledger_it_says_what_to_set(redis_url: str, namespace: str, world: World) -> None:
    app = Holdfast(redis_url, namespace=namespace)

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("key", world.publish, "a")

    async with app, working(app):
        view = await settled(app, await publish.submit(), State.FAILED)
    assert view.failure is not None
    assert "HOLDFAST_LEDGER" in view.failure.message
    assert view.failure.code == "TASK_FATAL"
    assert world.acts == []


async def test_options_are_checked(embedded: Holdfast) -> None:
    seen: list[str] = []

    @embedded.task
    async def wrong(ctx: Context) -> None:
        for options in ({"in_doubt": "retry"}, {"not_done": ValueError()}, {"ttl": 0}, {"ttl": -1}):
            try:
                ctx.effect.options(**options)
            except InvalidOption as exc:
                seen.append(str(exc))

    with inline(embedded):
        await (await wrong.submit()).result()
    assert len(seen) == 4


# In doubt ------------------------------------------------------------------------------------------


async def test_an_exception_leaves_it_in_doubt_and_the_job_is_suspended(app: Holdfast, world: World) -> None:
    async def publish_and_break(text: str) -> str:
        await world.publish(text)
        raise ConnectionError("the answer was lost")

    @app.task(retry_on=ConnectionError, on_exhausted="dead_letter")
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", publish_and_break, "a")

    async with working(app):
        view = await settled(app, await publish.submit(), State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert "ConnectionError: the answer was lost" in view.failure.message
    assert "holdfast effects resolve k" in view.failure.message
    assert (view.meta.retry_count, world.acts) == (1, ["a"])


async def test_an_exception_that_proves_that_nothing_happened_frees_the_key(app: Holdfast, world: World) -> None:
    async def refused(text: str) -> str:
        if not world.acts:
            world.acts.append("refused")
            raise ConnectionRefusedError("nobody there")
        return await world.publish(text)

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(not_done=ConnectionRefusedError)("k", refused, "a")

    async with working(app):
        assert await (await publish.submit()).result(60) == "published a"
    assert world.acts == ["refused", "a"]


async def test_run_again_acts_at_least_once(app: Holdfast, world: World) -> None:
    async def breaks_once(text: str) -> str:
        await world.publish(text)
        if len(world.acts) == 1:
            raise ConnectionError("the answer was lost")
        return "second"

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(in_doubt="run_again")("k", breaks_once, "a")

    async with working(app):
        assert await (await publish.submit()).result(60) == "second"
    assert world.acts == ["a", "a"]


@pytest.mark.parametrize("happened", [True, False])
async def test_a_check_decides(app: Holdfast, world: World, happened: bool) -> None:
    asked: list[str] = []

    async def check(key: str) -> Done[Receipt] | NotDone:
        asked.append(key)
        return Done(Receipt(number=7)) if happened else NotDone()

    async def charge(cents: int) -> Receipt:
        world.acts.append(cents)
        if len(world.acts) == 1:
            raise TimeoutError("no answer")
        return Receipt(number=cents)

    @app.task
    async def pay(ctx: Context) -> int:
        return (await ctx.effect.options(in_doubt=check)("pay", charge, 9)).number

    async with working(app):
        assert await (await pay.submit()).result(60) == (7 if happened else 9)
        assert await (await pay.submit()).result(60) == (7 if happened else 9)
    assert (asked, world.acts) == (["pay"], [9] if happened else [9, 9])


async def test_a_timeout_of_the_task_leaves_it_in_doubt(app: Holdfast, world: World) -> None:
    async def hang(text: str) -> str:
        await world.publish(text)
        await asyncio.sleep(60)
        return "never"

    @app.task(timeout=0.2)
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", hang, "a")

    async with working(app):
        view = await settled(app, await publish.submit(), State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert "CancelledError" in view.failure.message
    assert world.acts == ["a"]


async def test_a_worker_that_drains_writes_the_doubt_down(app: Holdfast, world: World) -> None:
    async def hang(text: str) -> str:
        await world.publish(text)
        await asyncio.sleep(60)
        return "never"

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", hang, "a")

    async with working(app) as worker:
        await publish.submit()
        await eventually(lambda: world.acts, "the effect to begin")
        worker.drain()
        worker.drain()
    (held,) = await effects(app).get([("default", "k")])
    assert held is not None
    assert (held.state, world.acts) == (EffectState.IN_DOUBT, ["a"])


async def test_a_result_that_is_no_json_is_in_doubt_and_never_runs_again(app: Holdfast, world: World) -> None:
    async def odd(text: str) -> object:
        await world.publish(text)
        return object()

    @app.task(retry_on=Exception)
    async def publish(ctx: Context) -> None:
        await ctx.effect("k", odd, "a")

    @app.task
    async def plainly(ctx: Context) -> None:
        await ctx.effect("k2", odd, "b")

    async with working(app):
        unsaid = await settled(app, await plainly.submit(), State.SUSPENDED)
        suspended = await settled(app, await publish.submit(), State.SUSPENDED)
    assert unsaid.failure is not None
    assert suspended.failure is not None
    assert unsaid.failure.code == suspended.failure.code == "EFFECT_IN_DOUBT"
    assert "has happened, but its result cannot be kept" in unsaid.failure.message
    assert world.acts == ["b", "a"]


async def test_a_person_resolves_it_and_the_job_goes_on(app: Holdfast, world: World) -> None:
    async def lost(text: str) -> str:
        await world.publish(text)
        raise ConnectionError("the answer was lost")

    @app.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", lost, "a")

    async with working(app):
        job = await publish.submit()
        await settled(app, job, State.SUSPENDED)
        (held,) = await effects(app).get([("default", "k")])
        assert held is not None
        value = b'"it is there"'
        outcome = EffectOutcome(tenant_id="default", key="k", token=held.token, state=EffectState.DONE, value=value)
        await effects(app).conclude([outcome])
        await app.engine.move(job.queue, job.id, State.QUEUED, actor="me", reason="looked")
        assert await job.result(60) == "it is there"
    assert world.acts == ["a"]


async def test_a_holder_that_comes_back_late_resolves_the_doubt(app: Holdfast, world: World) -> None:
    """A thread cannot be stopped: the task times out, and the effect ends afterwards."""
    gate = threading.Event()

    def slow(text: str) -> str:
        world.acts.append(text)
        gate.wait(20)
        return "late"

    @app.task(timeout=0.2, retry=Retry(max_retries=0))
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", slow, "a")

    async with working(app):
        job = await publish.submit()
        await settled(app, job, State.SUSPENDED)
        (held,) = await effects(app).get([("default", "k")])
        assert held is not None
        assert held.state is EffectState.IN_DOUBT
        gate.set()

        async def done() -> bool:
            (held,) = await effects(app).get([("default", "k")])
            return held is not None and held.state is EffectState.DONE

        await eventually(done, "the late end to be recorded")
        assert await (await publish.submit()).result(60) == "late"
    assert world.acts == ["a"]


async def test_an_effect_that_was_reserved_again_meanwhile_is_loud(
    embedded: Holdfast, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def slow(text: str) -> str:
        world.acts.append(text)
        if len(world.acts) == 1:
            gate.wait(20)
        return f"number {len(world.acts)}"

    @embedded.task(timeout=0.2)
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(in_doubt="run_again")("k", slow, "a")

    async with working(embedded):
        assert await (await publish.submit()).result(60) == "number 2"
        with caplog.at_level(logging.ERROR, "holdfast.effects"):
            gate.set()
            await eventually(lambda: embedded.engine.counters.effect_duplicates, "the duplicate to be counted")
    assert "effect.duplicate" in caplog.text


async def test_an_effect_may_be_used_again_after_its_time(embedded: Holdfast, world: World) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect.options(ttl=timedelta(milliseconds=1))("k", world.publish, "a")

    async with working(embedded):
        await (await publish.submit()).result(60)
        await asyncio.sleep(0.01)
        await (await publish.submit()).result(60)
    assert world.acts == ["a", "a"]


async def test_a_holder_that_takes_too_long_is_waited_for_without_using_up_retries(
    embedded: Holdfast, world: World
) -> None:
    gate = asyncio.Event()

    async def slow(text: str) -> str:
        world.acts.append(text)
        await gate.wait()
        return "done"

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", slow, "a")

    async with working(embedded):
        first = await publish.submit()
        await eventually(lambda: world.acts, "the effect to begin")
        second = await publish.submit()

        async def backed_off() -> bool:
            (view,) = await embedded.engine.get(second.queue, [second.id])
            return view is not None and view.meta.unavailable_count > 0

        await eventually(backed_off, "the second job to back off")
        gate.set()
        assert [await first.result(60), await second.result(60)] == ["done", "done"]
        (view,) = await embedded.engine.get(second.queue, [second.id])
    assert view is not None
    assert (view.meta.retry_count, world.acts) == (0, ["a"])


# The ledger is away --------------------------------------------------------------------------------


class Broken:
    """Effects that are away when told so: before a call, or after it (the answer is lost)."""

    def __init__(self, real: EffectStore) -> None:
        self._real = real
        self.before: set[str] = set()
        self.after: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(batch: Any) -> Any:
            if name in self.before:
                raise LedgerUnavailable(f"{name}: away")
            answer = await getattr(self._real, name)(batch)
            if name in self.after:
                raise LedgerUnavailable(f"{name}: the answer was lost")
            return answer

        return call


def break_ledger(app: Holdfast) -> Broken:
    ledger: Any = backend_of(app).ledger
    ledger.effects = Broken(ledger.effects)
    broken: Broken = ledger.effects
    return broken


@pytest.mark.parametrize("when", ["before", "after"])
async def test_away_at_the_reservation_nothing_is_done_and_no_retry_used_up(
    embedded: Holdfast, world: World, when: str
) -> None:
    broken = break_ledger(embedded)

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", world.publish, "a")

    async with working(embedded):
        getattr(broken, when).add("reserve")
        job = await publish.submit()

        async def backed_off() -> bool:
            (view,) = await embedded.engine.get(job.queue, [job.id])
            return view is not None and view.meta.unavailable_count > 1

        await eventually(backed_off, "the job to back off")
        assert world.acts == []
        getattr(broken, when).clear()
        # A reservation whose answer was lost is known here to be unused: no doubt comes of it.
        assert await job.result(60) == "published a"
        (view,) = await embedded.engine.get(job.queue, [job.id])
    assert view is not None
    assert (view.meta.retry_count, world.acts) == (0, ["a"])


async def test_away_between_act_and_record_for_a_moment_is_waited_out(embedded: Holdfast, world: World) -> None:
    broken = break_ledger(embedded)
    broken.before.add("conclude")

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", world.publish, "a")

    async with working(embedded):
        job = await publish.submit()
        await eventually(lambda: world.acts, "the effect to happen")
        broken.before.clear()
        assert await job.result(60) == "published a"
        (view,) = await embedded.engine.get(job.queue, [job.id])
    assert view is not None
    assert (view.attempt, world.acts) == (1, ["a"])


async def test_away_for_long_between_act_and_record_is_in_doubt(embedded: Holdfast, world: World) -> None:
    broken = break_ledger(embedded)
    broken.before.add("conclude")

    @embedded.task
    async def publish(ctx: Context) -> str:
        return await ctx.effect("k", world.publish, "a")

    async with working(embedded):
        job = await publish.submit()

        async def backed_off() -> bool:
            (view,) = await embedded.engine.get(job.queue, [job.id])
            return view is not None and view.meta.unavailable_count > 0

        await eventually(backed_off, "the job to give up on the ledger")
        broken.before.clear()
        view = await settled(embedded, job, State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert world.acts == ["a"]


async def test_tasks_without_effects_go_on_while_the_ledger_is_away(embedded: Holdfast) -> None:
    break_ledger(embedded).before.update({"reserve", "conclude", "get", "steps", "record_steps"})

    @embedded.task
    async def plain(ctx: Context) -> int:
        return ctx.attempt

    async with working(embedded):
        assert await (await plain.submit()).result(60) == 1


# In tests of a user's own --------------------------------------------------------------------------


async def test_inline_mode_has_effects(embedded: Holdfast, world: World) -> None:
    @embedded.task
    async def publish(ctx: Context) -> str:
        value = await ctx.effect("k", world.publish, "a")
        if ctx.attempt == 1:
            raise ConnectionError("after")
        return value

    @embedded.task
    def post(ctx: Context) -> str:
        return ctx.blocking.effect("p", world.post, "b")

    @embedded.task
    async def doubtful(ctx: Context) -> None:
        async def fail() -> None:
            raise ConnectionError("lost")

        await ctx.effect("d", fail)

    with inline(embedded):
        assert await (await publish.submit()).result() == "published a"
        await (await post.submit()).result()
        assert await (await doubtful.submit()).state() is State.SUSPENDED
    assert world.acts == ["a", "b"]


async def test_an_outage_that_a_task_raises_still_passes_through(embedded: Holdfast) -> None:
    @embedded.task
    async def down(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise Unavailable("not now")
        return ctx.attempt

    async with working(embedded):
        assert await (await down.submit()).result(60) == 3
