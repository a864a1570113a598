"""Whatever dies between a vote and the job: the answer counts once, and nothing is left half done."""

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
from tests.guard.support import ANN, BOB, events, question, vote
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

    async def die(*args: object, **kwargs: object) -> None:
        # The vote is committed, the job is not told.
        os.kill(os.getpid(), signal.SIGKILL)

    app.engine.move = die
    ann = Principal(name="ann", role=Role.APPROVER, tenants=frozenset({ALL_TENANTS}))
    await Operations.for_app(app).approvals.vote(ann, approval_id, approve=True, reason="")


asyncio.run(main())
"""


async def test_a_voter_that_is_killed_before_the_job_is_told(app: Holdfast, tmp_path: Path) -> None:
    bank = Bank(app)
    script = tmp_path / "voter.py"
    script.write_text(VOTER)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await question(app, job)
        settings = app.settings
        words = [sys.executable, str(script), settings.url, settings.ledger or "", settings.namespace, row.approval_id]
        done = await asyncio.to_thread(subprocess.run, words, timeout=60, check=False)
        assert done.returncode == -9
        # Upkeep, in the worker, carries on.
        assert await job.result(60) == "paid 5"
        decided = await question(app, job, APPROVED)
        assert [each.voter for each in decided.votes] == ["ann"]
        await _nothing_left(app)
    assert bank.paid == [5]


async def test_an_engine_that_is_away_is_told_later(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await question(app, job)
        move, tries = app.engine.move, list[str]()

        async def away(queue: str, job_id: str, *rest: Any, **named: Any) -> State:
            tries.append(job_id)
            if len(tries) == 1:
                raise EngineUnavailable("made to fail by the test")
            return await move(queue, job_id, *rest, **named)

        monkeypatch.setattr(app.engine, "move", away)
        assert (await vote(app, ANN, row.approval_id)).status is APPROVED
        assert await job.result(60) == "paid 5"
        await _nothing_left(app)
    assert bank.paid == [5]


async def test_a_reply_that_is_lost_changes_nothing(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await question(app, job)
        move, tries = app.engine.move, list[str]()

        async def lossy(queue: str, job_id: str, *rest: Any, **named: Any) -> State:
            tries.append(job_id)
            moved = await move(queue, job_id, *rest, **named)
            if len(tries) == 1:
                raise EngineUnavailable("the reply was lost")
            return moved

        monkeypatch.setattr(app.engine, "move", lossy)
        await vote(app, ANN, row.approval_id)
        assert await job.result(60) == "paid 5"
        await _nothing_left(app)
        told = await events(app, job)
    assert told == ["approval.requested", "approval.approved", "task.claimed", "task.succeeded"]


async def test_an_answer_that_is_told_twice_answers_no_other_question(app: Holdfast) -> None:
    """The job has gone on meanwhile, and waits for another answer."""
    ran: list[str] = []

    @app.task
    async def ask(ctx: Context) -> None:
        await ctx.approval("first")
        await ctx.approval("second")
        ran.append("went on")

    async with working(app):
        job = await ask.submit()
        first = await question(app, job)
        decided = await vote(app, ANN, first.approval_id)
        second = await eventually(lambda: _other(app, job, first.approval_id), "the second question")
        await Operations.for_app(app).approvals._deliver(decided)
        assert await job.state() is State.WAITING_APPROVAL
        assert ran == []
        await vote(app, BOB, second)
        await job.result(60)


async def _other(app: Holdfast, job: Job[Any], first: str) -> str | None:
    ask = (await job.info()).meta.approval_request
    if ask is None or ask.approval_id == first:
        return None
    return (await question(app, job)).approval_id


def test_a_yes_to_one_question_is_none_to_another() -> None:
    """The last line of defence, in the engine's own step."""
    meta = Meta(approval_request=ApprovalRequest("two", "hash", name="second"))
    late = Approval("one", ("ann",), 1)
    assert with_approval(meta, late) == Meta()
    assert with_approval(meta, Approval("two", ("ann",), 1)).approvals == {"second": Approval("two", ("ann",), 1)}


async def test_a_worker_that_dies_while_the_job_waits_changes_nothing(app: Holdfast) -> None:
    ran: list[str] = []

    @app.task
    async def ask(ctx: Context) -> str:
        ran.append("began")
        return (await ctx.approval("sure?")).by[0]

    async with working(app) as worker:
        job = await ask.submit()
        row = await question(app, job)
        await eventually(lambda: worker.in_flight == 0, "the worker to let go")
    # Nobody is there: the question stands, and so does the answer.
    assert (await vote(app, ANN, row.approval_id)).status is APPROVED
    async with working(app):
        assert await job.result(60) == "ann"
    assert ran == ["began", "began"]


async def test_a_ledger_that_is_down_takes_no_vote(
    make_postgres: MakePostgres, redis_url: str, namespace: str, make_app: MakeApp
) -> None:
    server = make_postgres()
    app = make_app(url=redis_url, ledger=server.url, namespace=namespace)
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await question(app, job)
        server.kill()
        for approve in (True, False):
            with pytest.raises(LedgerUnavailable):
                await vote(app, ANN, row.approval_id, approve=approve)
        assert await job.state() is State.WAITING_APPROVAL
        server.start()

        async def works() -> bool:
            try:
                return (await vote(app, ANN, row.approval_id)).status is APPROVED
            except LedgerUnavailable:
                return False

        await eventually(works, "the ledger to take the vote")
        assert await job.result(60) == "paid 5"
    assert bank.paid == [5]


async def test_an_engine_that_forgets_the_answer_is_told_again(
    make_redis: MakeServer, postgres_url: str, namespace: str, make_app: MakeApp
) -> None:
    """Wiped after it was told and before the ledger had seen it: the job is restored as waiting, and goes on."""
    server = make_redis()
    app = make_app(url=server.url, ledger=postgres_url, namespace=namespace, reconcile_interval_s=0.5)
    quiet = make_app(url=server.url, ledger=postgres_url, namespace=namespace)
    bank = Bank(app)
    async with working(app):
        job = await bank.pay.submit(5)
        row = await question(app, job)
    # No projector runs now.
    await quiet.open()
    assert (await vote(quiet, ANN, row.approval_id)).status is APPROVED
    assert (await quiet.engine.get(job.queue, [job.id]))[0].state is State.QUEUED  # type: ignore[union-attr]
    async with Redis.from_url(server.url) as redis:
        await redis.flushall()
    await app.close()
    async with working(app):
        await eventually(lambda: bank.paid == [5], "the job to be restored and to go on")
        await _nothing_left(app)


async def test_an_older_copy_of_the_engine_is_told_again(
    make_redis: MakeServer, postgres_url: str, namespace: str, make_app: MakeApp
) -> None:
    """The ledger has seen the job go on; then a replica takes over that has it waiting still."""
    server = make_redis()
    app = make_app(url=server.url, ledger=postgres_url, namespace=namespace, reconcile_interval_s=0.5)
    bank = Bank(app)
    async with working(app), Redis.from_url(server.url) as redis:
        job = await bank.pay.submit(5)
        row = await question(app, job)
        # Not yet: what has ended in the ledger would not show whether it is told.
        await app.engine.set_control(job.queue, QueueControl(paused=True))
        copy = {key: await redis.dump(key) or b"" for key in await redis.keys()}
        assert (await vote(app, ANN, row.approval_id)).status is APPROVED
        await _nothing_left(app)
        async with redis.pipeline(transaction=True) as step:
            step.flushall()
            for key, value in copy.items():
                step.restore(key, 0, value)
            await step.execute()
        assert await job.state() is State.WAITING_APPROVAL
        await app.engine.set_control(job.queue, QueueControl())
        await eventually(lambda: bank.paid == [5], "the job to go on")
        await _nothing_left(app)


async def test_upkeep_stays_quiet_while_the_ledger_is_away(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await app.open()
    backend = backend_of(app)
    assert backend.ledger is not None

    async def away(*_: Any) -> None:
        raise LedgerUnavailable("made to fail by the test")

    registrar = ApprovalDelivery(app.engine, backend.ledger)
    assert await registrar.run_once() >= 1.0
    monkeypatch.setattr(backend.ledger.operators, "expire_approvals", away)
    for _ in range(3):
        assert await registrar.run_once() >= 1.0
    assert caplog.text.count("approvals are delayed") == 1


async def _nothing_left(app: Holdfast) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    people = backend.ledger.operators

    async def none() -> bool:
        return not await people.undelivered_approvals(10)

    await eventually(none, "all answers to be marked as told")
