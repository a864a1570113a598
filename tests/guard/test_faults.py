"""Faults between a vote and its job: the decision is applied once, and every decision is delivered."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Context, Holdfast, Job, RequireApproval, State
from holdfast.core.job import Approval, ApprovalRequest, Meta
from holdfast.core.verdict import with_approval
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable, LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import ApprovalStatus
from holdfast.operations.operations import Operations
from holdfast.upkeep.dispatch import ApprovalDelivery
from tests.conftest import MakePostgres, MakeServer
from tests.guard.conftest import MakeApp
from tests.guard.support import ANN, BOB, event_types, vote, wait_approval
from tests.worker.support import eventually, working

APPROVED = ApprovalStatus.APPROVED


class Bank:
    def __init__(self, app: Holdfast) -> None:
        self.app = app
        self.paid: list[int] = []
        app.guard.rule("always", then=RequireApproval("sure?"))

        @app.task
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        self.pay = pay


VOTER = """
import asyncio, os, signal, sys
from holdfast import Holdfast
from holdfast.engine.port import Engine
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.operations.operations import Operations

url, ledger, namespace, approval_id = sys.argv[1:]


async def main() -> None:
    app = Holdfast(url, ledger=ledger or None, namespace=namespace)
    await app.open()

    async def kill_self(*args: object, **kwargs: object) -> None:
        # The vote is committed, the decision is not delivered.
        os.kill(os.getpid(), signal.SIGKILL)

    app.engine.move = kill_self
    ann = Principal(name="ann", role=Role.APPROVER, tenants=frozenset({ALL_TENANTS}))
    await Operations.for_app(app).approvals.vote(ann, approval_id, approve=True, reason="")


asyncio.run(main())
"""


async def test_upkeep_delivers_the_decision_of_a_voter_that_was_killed(app: Holdfast, tmp_path: Path) -> None:
    bank = Bank(app)
    script = tmp_path / "voter.py"
    script.write_text(VOTER)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
        settings = app.settings
        command = [
            sys.executable,
            str(script),
            settings.url,
            settings.ledger or "",
            settings.namespace,
            row.approval_id,
        ]
        done = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False)
        assert done.returncode == -9
        # Upkeep in the worker delivers the decision.
        assert await job.result(60) == "paid 5"
        decided = await wait_approval(app, job, APPROVED)
        assert [each.voter for each in decided.votes] == ["ann"]
        await _wait_all_delivered(app)
    assert bank.paid == [5]


async def test_a_decision_is_delivered_when_the_engine_is_reachable_again(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
        move, calls = app.engine.move, list[str]()

        async def unreachable(queue: str, job_id: str, *rest: Any, **named: Any) -> State:
            calls.append(job_id)
            if len(calls) == 1:
                raise EngineUnavailable("made to fail by the test")
            return await move(queue, job_id, *rest, **named)

        monkeypatch.setattr(app.engine, "move", unreachable)
        assert (await vote(app, ANN, row.approval_id)).status is APPROVED
        assert await job.result(60) == "paid 5"
        await _wait_all_delivered(app)
    assert bank.paid == [5]


async def test_a_lost_reply_does_not_repeat_the_move(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
        move, calls = app.engine.move, list[str]()

        async def lossy(queue: str, job_id: str, *rest: Any, **named: Any) -> State:
            calls.append(job_id)
            moved = await move(queue, job_id, *rest, **named)
            if len(calls) == 1:
                raise EngineUnavailable("the reply was lost")
            return moved

        monkeypatch.setattr(app.engine, "move", lossy)
        await vote(app, ANN, row.approval_id)
        assert await job.result(60) == "paid 5"
        await _wait_all_delivered(app)
        types = await event_types(app, job)
    assert types == ["approval.requested", "approval.approved", "task.claimed", "task.succeeded"]


async def test_a_decision_delivered_twice_does_not_decide_another_request(app: Holdfast) -> None:
    """The job has continued and waits for another decision."""
    ran: list[str] = []

    @app.task
    async def needs_approval(ctx: Context) -> None:
        await ctx.approval("first")
        await ctx.approval("second")
        ran.append("continued")

    async with working(app):
        job = await needs_approval.submit()
        first = await wait_approval(app, job)
        decided = await vote(app, ANN, first.approval_id)
        second = await eventually(lambda: _wait_other(app, job, first.approval_id), "the second request")
        await Operations.for_app(app).approvals._deliver(decided)
        assert await job.state() is State.WAITING_APPROVAL
        assert ran == []
        await vote(app, BOB, second)
        await job.result(60)


async def _wait_other(app: Holdfast, job: Job[Any], first: str) -> str | None:
    request = (await job.info()).meta.approval_request
    if request is None or request.approval_id == first:
        return None
    return (await wait_approval(app, job)).approval_id


def test_an_approval_applies_only_to_its_own_request() -> None:
    """The engine checks it again in its atomic step."""
    meta = Meta(approval_request=ApprovalRequest("two", "hash", name="second"))
    late = Approval("one", ("ann",), 1)
    assert with_approval(meta, late) == Meta()
    assert with_approval(meta, Approval("two", ("ann",), 1)).approvals == {"second": Approval("two", ("ann",), 1)}


async def test_a_request_stays_open_without_a_worker(app: Holdfast) -> None:
    ran: list[str] = []

    @app.task
    async def needs_approval(ctx: Context) -> str:
        ran.append("began")
        return (await ctx.approval("sure?")).by[0]

    async with working(app) as worker:
        job = await needs_approval.submit()
        row = await wait_approval(app, job)
        await eventually(lambda: worker.in_flight == 0, "the claim to be released")
    # No worker runs: the request stays open and can be decided.
    assert (await vote(app, ANN, row.approval_id)).status is APPROVED
    async with working(app):
        assert await job.result(60) == "ann"
    assert ran == ["began", "began"]


async def test_a_ledger_that_is_down_refuses_votes(
    make_postgres: MakePostgres, redis_url: str, namespace: str, make_app: MakeApp
) -> None:
    server = make_postgres()
    app = make_app(url=redis_url, ledger=server.url, namespace=namespace)
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
        server.kill()
        for approve in (True, False):
            with pytest.raises(LedgerUnavailable):
                await vote(app, ANN, row.approval_id, approve=approve)
        assert await job.state() is State.WAITING_APPROVAL
        server.start()

        async def voted() -> bool:
            try:
                return (await vote(app, ANN, row.approval_id)).status is APPROVED
            except LedgerUnavailable:
                return False

        await eventually(voted, "the ledger to accept the vote")
        assert await job.result(60) == "paid 5"
    assert bank.paid == [5]


async def test_a_decision_is_delivered_again_after_a_wipe(
    make_redis: MakeServer, postgres_url: str, namespace: str, make_app: MakeApp
) -> None:
    """Redis is wiped after delivery and before projection: the job is restored as waiting, then continues."""
    server = make_redis()
    app = make_app(url=server.url, ledger=postgres_url, namespace=namespace, reconcile_interval_s=0.5)
    other_app = make_app(url=server.url, ledger=postgres_url, namespace=namespace)
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
    # No projector runs from here on.
    await other_app.open()
    assert (await vote(other_app, ANN, row.approval_id)).status is APPROVED
    assert (await other_app.engine.get(job.queue, [job.id]))[0].state is State.QUEUED  # type: ignore[union-attr]
    async with Redis.from_url(server.url) as redis:
        await redis.flushall()
    await app.close()
    async with working(app):
        await eventually(lambda: bank.paid == [5], "the job to be restored and to continue")
        await _wait_all_delivered(app)


async def test_a_decision_is_delivered_again_to_a_stale_replica(
    make_redis: MakeServer, postgres_url: str, namespace: str, make_app: MakeApp
) -> None:
    """The ledger has the job's next move; then a replica takes over on which the job still waits."""
    server = make_redis()
    app = make_app(url=server.url, ledger=postgres_url, namespace=namespace, reconcile_interval_s=0.5)
    bank = Bank(app)
    async with working(app), Redis.from_url(server.url) as redis:
        job = await bank.pay.submit(5)
        row = await wait_approval(app, job)
        # Paused, because delivery to a job that has ended could not be observed.
        await app.engine.set_control(job.queue, QueueControl(paused=True))
        copy = {key: await redis.dump(key) or b"" for key in await redis.keys()}
        assert (await vote(app, ANN, row.approval_id)).status is APPROVED
        await _wait_all_delivered(app)
        async with redis.pipeline(transaction=True) as step:
            step.flushall()
            for key, value in copy.items():
                step.restore(key, 0, value)
            await step.execute()
        assert await job.state() is State.WAITING_APPROVAL
        await app.engine.set_control(job.queue, QueueControl())
        await eventually(lambda: bank.paid == [5], "the job to continue")
        await _wait_all_delivered(app)


async def test_upkeep_logs_an_unreachable_ledger_once(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await app.open()
    backend = backend_of(app)
    assert backend.ledger is not None

    async def unreachable(*_: Any) -> None:
        raise LedgerUnavailable("made to fail by the test")

    delivery = ApprovalDelivery(app.engine, backend.ledger)
    assert await delivery.run_once() >= 1.0
    monkeypatch.setattr(backend.ledger.operators, "expire_approvals", unreachable)
    for _ in range(3):
        assert await delivery.run_once() >= 1.0
    assert caplog.text.count("approvals are delayed") == 1


async def _wait_all_delivered(app: Holdfast) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    operators = backend.ledger.operators

    async def all_delivered() -> bool:
        return not await operators.undelivered_approvals(10)

    await eventually(all_delivered, "all decisions to be marked as delivered")
