"""Guards at the worker: a job that no guard has allowed is reviewed before it runs, in every execution mode."""

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
from tests.guard.support import ANN, event_types, vote, wait_approval
from tests.worker.support import eventually, working

AT_ONCE = Retry(max_retries=1, base=0, jitter=None)


class Shop:
    """An app with guards, and one without guards on the same stores."""

    def __init__(self, app: Holdfast, unguarded: Holdfast) -> None:
        self.app = app
        self.unguarded = unguarded
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
        return await self.unguarded.submit_raw(task, b'{"to":"%s"}' % to.encode())


@pytest.fixture
def shop(app: Holdfast, stores: dict[str, Any], make_app: MakeApp) -> Shop:
    return Shop(app, make_app(**stores))


@pytest.mark.parametrize("task", ["on_loop", "in_thread"])
async def test_a_job_that_was_not_reviewed_is_reviewed_before_it_runs(shop: Shop, task: str) -> None:
    requests: list[GuardRequest] = []

    @shop.app.guard
    def recorder(request: GuardRequest) -> Decision | None:
        requests.append(request)
        return Deny("an enemy") if request.arguments["to"] == "eve" else None

    shop.app.guard.rule("large", when=lambda args: args["to"] == "bob", then=RequireApproval("is bob fine?"))
    async with working(shop.app):
        allowed, denied, held = [await shop.push(task, to) for to in ("ann", "eve", "bob")]
        assert await allowed.result(60) == "paid ann"
        with pytest.raises(JobFailed) as caught:
            await denied.result(60)
        assert caught.value.error_code == GUARD_DENIED
        row = await wait_approval(shop.app, held)
        assert await held.state() is State.WAITING_APPROVAL
        assert shop.runs == ["ann"]
        await vote(shop.app, ANN, row.approval_id)
        assert await held.result(60) == "paid bob"
        types = await event_types(shop.app, held)
    assert {(request.task, request.source) for request in requests} == {(task, "claim")}
    info = await denied.info()
    assert (info.attempt, info.state) == (1, State.FAILED)
    assert info.failure is not None
    assert "an enemy" in info.failure.message
    assert "recorder" in info.failure.message
    assert types == [
        "task.created",
        "task.claimed",
        "approval.requested",
        "approval.approved",
        "task.claimed",
        "task.succeeded",
    ]


async def test_a_job_allowed_at_submission_is_not_reviewed_again(shop: Shop) -> None:
    sources: list[str] = []

    @shop.app.guard
    async def recorder(request: GuardRequest) -> Decision | None:
        sources.append(request.source)
        return None

    async with working(shop.app):
        job = await shop.app.submit_raw("on_loop", b'{"to":"ann"}')
        assert await job.result(60) == "paid ann"
    assert sources == ["submit"]


async def test_a_foreign_message_is_reviewed(redis_url: str, namespace: str, make_app: MakeApp) -> None:
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


async def test_a_denied_job_does_not_start_its_child_process(
    stores: dict[str, Any], make_app: MakeApp, tmp_path: Path
) -> None:
    app = process_tasks.app
    # The app is a module global: an earlier test may have configured a ledger.
    app.configure(**({"ledger": ""} | stores))
    unguarded = make_app(**stores)
    try:
        async with working(app):
            for name, runs in (("forbidden", False), ("fine", True)):
                mark = tmp_path / name
                job = await unguarded.submit_raw("in_child", b'{"mark":"%s"}' % str(mark).encode())
                if runs:
                    await job.result(60)
                else:
                    with pytest.raises(JobFailed, match="forbidden file"):
                        await job.result(60)
                assert mark.exists() is runs
    finally:
        await app.close()


async def test_a_guard_that_raises_fails_the_attempt(shop: Shop) -> None:
    calls: list[int] = []

    @shop.app.guard
    async def shaky(request: GuardRequest) -> Decision | None:
        calls.append(len(calls))
        if len(calls) == 1:
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


async def test_a_guard_that_times_out_fails_the_attempt(stores: dict[str, Any], make_app: MakeApp) -> None:
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


async def test_an_unavailable_guard_uses_up_no_retries(shop: Shop) -> None:
    calls: list[int] = []

    @shop.app.guard
    async def remote(request: GuardRequest) -> Decision | None:
        calls.append(len(calls))
        if len(calls) <= 3:
            raise Unavailable("the policy server is unreachable")
        return None

    async with working(shop.app):
        job = await shop.push("on_loop", "ann")
        assert await job.result(60) == "paid ann"
    info = await job.info()
    assert info.attempt == 4
    assert {attempt.failure.code for attempt in info.meta.history if attempt.failure} <= {DEPENDENCY_UNAVAILABLE}


async def test_without_a_ledger_a_job_that_needs_approval_is_dead_lettered(
    app_without_ledger: Holdfast, make_app: MakeApp
) -> None:
    unguarded = make_app(url=app_without_ledger.settings.url, namespace=app_without_ledger.settings.namespace)
    shop = Shop(app_without_ledger, unguarded)
    app_without_ledger.guard.rule("always", then=RequireApproval("sure?"))
    async with working(app_without_ledger):
        job = await shop.push("on_loop", "ann")
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == NoLedger.code
    assert shop.runs == []


async def test_an_invalid_payload_fails_before_the_guards(shop: Shop) -> None:
    shop.app.guard.rule("none", then=Deny("no"))
    async with working(shop.app):
        job = await shop.unguarded.submit_raw("on_loop", b'{"unknown":1}')
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == "INVALID_PAYLOAD"


async def test_draining_releases_a_job_under_review(shop: Shop) -> None:
    called = asyncio.Event()

    @shop.app.guard
    async def slow(request: GuardRequest) -> Decision | None:
        called.set()
        await asyncio.Event().wait()
        return None

    job = await shop.push("on_loop", "ann")
    async with working(shop.app) as worker:
        await asyncio.wait_for(called.wait(), 20)
        worker.drain()
    info = await job.info()
    assert (info.state, info.attempt) == (State.QUEUED, 0)
    assert shop.runs == []


async def test_a_job_cancelled_during_review_never_runs(shop: Shop) -> None:
    called, proceed = threading.Event(), threading.Event()

    @shop.app.guard
    def slow(request: GuardRequest) -> Decision | None:
        called.set()
        proceed.wait(20)
        return None

    async with working(shop.app) as worker:
        job = await shop.push("in_thread", "ann")
        await eventually(called.is_set, "the guard to be called")
        await job.cancel("not any more")
        await eventually(lambda: worker.in_flight == 0, "the claim to be released")
        proceed.set()
        await eventually(lambda: worker.running == 0, "the slot to be free")
    assert await job.state() is State.CANCELLED
    assert shop.runs == []


async def test_a_guard_that_swallows_its_cancellation_does_not_start_the_job(shop: Shop) -> None:
    called = asyncio.Event()

    @shop.app.guard
    async def stubborn(request: GuardRequest) -> Decision | None:
        called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return None
        return None

    async with working(shop.app) as worker:
        job = await shop.push("in_thread", "ann")
        await asyncio.wait_for(called.wait(), 20)
        await job.cancel("not any more")
        await eventually(lambda: worker.in_flight == 0 and worker.running == 0, "the claim to be released")
    assert await job.state() is State.CANCELLED
    assert shop.runs == []
