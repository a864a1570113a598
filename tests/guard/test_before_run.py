"""Guards at the worker: what nobody has cleared is shown to them before it runs, wherever its code would run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Deny, GuardRequest, Holdfast, Job, RequireApproval, Retry, State
from holdfast.core.verdict import DEPENDENCY_UNAVAILABLE, GUARD_DENIED
from holdfast.errors import GuardFailed, JobFailed, NoLedger, Unavailable
from holdfast.guard.decisions import Decision
from tests.guard import process_tasks
from tests.guard.conftest import MakeApp
from tests.guard.support import ANN, events, question, vote
from tests.worker.support import eventually, working

AT_ONCE = Retry(max_retries=1, base=0, jitter=None)


class Shop:
    """An app with guards, and another program that has none on the same stores."""

    def __init__(self, app: Holdfast, stranger: Holdfast) -> None:
        self.app = app
        self.stranger = stranger
        self.runs: list[str] = []

        @app.task(retry=AT_ONCE)
        async def on_loop(to: str) -> str:
            self.runs.append(to)
            return f"paid {to}"

        @app.task(retry=AT_ONCE)
        def in_thread(to: str) -> str:
            self.runs.append(to)
            return f"paid {to}"

    async def push(self, task: str, to: str) -> Job[Any]:
        return await self.stranger.submit_raw(task, b'{"to":"%s"}' % to.encode())


@pytest.fixture
def shop(app: Holdfast, stores: dict[str, Any], make_app: MakeApp) -> Shop:
    return Shop(app, make_app(**stores))


@pytest.mark.parametrize("task", ["on_loop", "in_thread"])
async def test_what_nobody_cleared_is_shown_to_the_guards(shop: Shop, task: str) -> None:
    seen: list[GuardRequest] = []

    @shop.app.guard
    def watcher(request: GuardRequest) -> Decision | None:
        seen.append(request)
        return Deny("an enemy") if request.arguments["to"] == "eve" else None

    shop.app.guard.rule("large", when=lambda args: args["to"] == "bob", then=RequireApproval("is bob fine?"))
    async with working(shop.app):
        allowed, denied, asked = [await shop.push(task, to) for to in ("ann", "eve", "bob")]
        assert await allowed.result(60) == "paid ann"
        with pytest.raises(JobFailed) as caught:
            await denied.result(60)
        assert caught.value.error_code == GUARD_DENIED
        row = await question(shop.app, asked)
        assert await asked.state() is State.WAITING_APPROVAL
        assert shop.runs == ["ann"]
        await vote(shop.app, ANN, row.approval_id)
        assert await asked.result(60) == "paid bob"
        told = await events(shop.app, asked)
    assert {(request.task, request.source) for request in seen} == {(task, "claim")}
    view = await denied.info()
    assert (view.attempt, view.state) == (1, State.FAILED)
    assert view.failure is not None
    assert "an enemy" in view.failure.message
    assert "watcher" in view.failure.message
    assert told == [
        "task.created",
        "task.claimed",
        "approval.requested",
        "approval.approved",
        "task.claimed",
        "task.succeeded",
    ]


async def test_what_was_cleared_is_not_asked_about_again(shop: Shop) -> None:
    sources: list[str] = []

    @shop.app.guard
    async def watcher(request: GuardRequest) -> Decision | None:
        sources.append(request.source)
        return None

    async with working(shop.app):
        job = await shop.app.submit_raw("on_loop", b'{"to":"ann"}')
        assert await job.result(60) == "paid ann"
    assert sources == ["submit"]


async def test_a_foreign_message_is_shown_to_the_guards(redis_url: str, namespace: str, make_app: MakeApp) -> None:
    app = make_app(url=redis_url, namespace=namespace)
    shop = Shop(app, app)
    app.guard.rule("no enemies", when=lambda args: args["to"] == "eve", then=Deny("an enemy"))
    async with working(app) as worker, Redis.from_url(redis_url) as redis:
        for job_id, payload in (("j1", '["eve"]'), ("j2", '["ann"]')):
            await redis.xadd(f"{namespace}:stream:task", {"task_id": job_id, "type": "on_loop", "payload": payload})
        await eventually(lambda: worker.finished == 2, "the worker to see both")
        assert await app.job("j2").result(60) == "paid ann"
        with pytest.raises(JobFailed, match="enemy"):
            await app.job("j1").result(60)
    assert shop.runs == ["ann"]


async def test_a_child_process_is_not_even_started(stores: dict[str, Any], make_app: MakeApp, tmp_path: Path) -> None:
    app = process_tasks.app
    # The module's own app: an earlier test may have left it a ledger.
    app.configure(**({"ledger": ""} | stores))
    stranger = make_app(**stores)
    try:
        async with working(app):
            for name, runs in (("forbidden", False), ("fine", True)):
                mark = tmp_path / name
                job = await stranger.submit_raw("in_child", b'{"mark":"%s"}' % str(mark).encode())
                if runs:
                    await job.result(60)
                else:
                    with pytest.raises(JobFailed, match="forbidden file"):
                        await job.result(60)
                assert mark.exists() is runs
    finally:
        await app.close()


async def test_a_guard_that_fails_is_a_failure_of_the_run(shop: Shop) -> None:
    tries: list[int] = []

    @shop.app.guard
    async def shaky(request: GuardRequest) -> Decision | None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return None

    async with working(shop.app):
        job = await shop.push("on_loop", "ann")
        assert await job.result(60) == "paid ann"
    failed = [attempt.failure for attempt in await job.history()]
    assert failed[0] is not None
    assert failed[0].code == GuardFailed.code
    assert "not yet" in failed[0].message
    assert shop.runs == ["ann"]


async def test_a_guard_that_never_answers_lets_nothing_run(stores: dict[str, Any], make_app: MakeApp) -> None:
    shop = Shop(make_app(**stores, guard_timeout_s=0.05), make_app(**stores))

    @shop.app.guard
    async def stuck(request: GuardRequest) -> Decision | None:
        await asyncio.Event().wait()
        return None

    async with working(shop.app):
        job = await shop.push("in_thread", "ann")
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == GuardFailed.code
    assert (await job.info()).attempt == 2
    assert shop.runs == []


async def test_a_guard_whose_server_is_down_uses_up_no_retries(shop: Shop) -> None:
    tries: list[int] = []

    @shop.app.guard
    async def remote(request: GuardRequest) -> Decision | None:
        tries.append(len(tries))
        if len(tries) <= 3:
            raise Unavailable("the policy server is away")
        return None

    async with working(shop.app):
        job = await shop.push("on_loop", "ann")
        assert await job.result(60) == "paid ann"
    view = await job.info()
    assert view.attempt == 4
    assert {attempt.failure.code for attempt in view.meta.history if attempt.failure} <= {DEPENDENCY_UNAVAILABLE}


async def test_without_a_ledger_a_question_is_a_dead_letter(lonely: Holdfast, make_app: MakeApp) -> None:
    stranger = make_app(url=lonely.settings.url, namespace=lonely.settings.namespace)
    shop = Shop(lonely, stranger)
    lonely.guard.rule("always", then=RequireApproval("sure?"))
    async with working(lonely):
        job = await shop.push("on_loop", "ann")
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == NoLedger.code
    assert shop.runs == []


async def test_a_payload_that_does_not_fit_is_what_it_was(shop: Shop) -> None:
    shop.app.guard.rule("none", then=Deny("no"))
    async with working(shop.app):
        job = await shop.stranger.submit_raw("on_loop", b'{"nobody":1}')
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == "INVALID_PAYLOAD"


async def test_a_drained_worker_gives_back_what_its_guards_look_at(shop: Shop) -> None:
    looking = asyncio.Event()

    @shop.app.guard
    async def slow(request: GuardRequest) -> Decision | None:
        looking.set()
        await asyncio.Event().wait()
        return None

    job = await shop.push("on_loop", "ann")
    async with working(shop.app) as worker:
        await asyncio.wait_for(looking.wait(), 20)
        worker.drain()
    view = await job.info()
    assert (view.state, view.attempt) == (State.QUEUED, 0)
    assert shop.runs == []


async def test_a_job_that_is_cancelled_while_its_guards_look_never_runs(shop: Shop) -> None:
    looking, go_on = threading.Event(), threading.Event()

    @shop.app.guard
    def slow(request: GuardRequest) -> Decision | None:
        looking.set()
        go_on.wait(20)
        return None

    async with working(shop.app) as worker:
        job = await shop.push("in_thread", "ann")
        await eventually(looking.is_set, "the guard to look")
        await job.cancel("not any more")
        await eventually(lambda: worker.in_flight == 0, "the worker to let go")
        go_on.set()
        await eventually(lambda: worker.running == 0, "the slot to be free")
    assert await job.state() is State.CANCELLED
    assert shop.runs == []


async def test_a_guard_that_swallows_its_cancellation_lets_nothing_run(shop: Shop) -> None:
    looking = asyncio.Event()

    @shop.app.guard
    async def stubborn(request: GuardRequest) -> Decision | None:
        looking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return None
        return None

    async with working(shop.app) as worker:
        job = await shop.push("in_thread", "ann")
        await asyncio.wait_for(looking.wait(), 20)
        await job.cancel("not any more")
        await eventually(lambda: worker.in_flight == 0 and worker.running == 0, "the worker to let go")
    assert await job.state() is State.CANCELLED
    assert shop.runs == []
