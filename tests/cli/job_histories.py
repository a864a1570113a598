"""Jobs that have been through everything, for tests of `holdfast explain`: the same on every pair of stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any, Final

from holdfast import Context, Fatal, Holdfast, RequireApproval, Retry
from holdfast.client.job import Job
from holdfast.client.task import Task
from holdfast.core.job import Claim, Envelope, new_job_ids
from holdfast.core.principal import Role
from holdfast.core.verdict import Release, Settlement
from holdfast.errors import Unavailable
from holdfast.operations.operations import Operations
from holdfast.testing import drain
from tests.operations.deployment import ADA, APPROVER, BOB, principal

CAROL: Final = principal("carol", Role.APPROVER)


#: Does something, yields the job that it is about, and goes on once what is due has run.
Hihistory = Callable[["Histories", str], AsyncIterator[Job[Any]]]


class Histories:
    """An app, and what its jobs go through."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app
        self.broken = True

        @app.task(name="look_up", retry=Retry(max_retries=2, base=3_600, jitter=None))
        async def fetch(what: str = "it") -> str:
            if self.broken:
                raise RuntimeError(f"{what} is not there")
            return what

        @app.task(retry=Retry(max_retries=1, base=0, jitter=None))
        async def second_time(ctx: Context) -> int:
            if ctx.retry_count == 0:
                raise ValueError("not yet")
            return ctx.attempt

        @app.task(name="bill")
        async def charge(amount: int) -> None:
            raise Fatal(f"card {amount} refused")

        @app.task(retry=Retry(base=3_600))
        async def call() -> None:
            raise Unavailable("the bank is closed")

        @app.task(retry=Retry(max_retries=0), on_exhausted="suspend")
        async def order() -> None:
            raise LookupError("no such order")

        @app.task(retry=Retry(max_retries=1, base=0, jitter=None))
        async def publish(ctx: Context, key: str) -> None:
            await ctx.effect(key, self._lose)

        @app.task
        async def nap(ctx: Context) -> None:
            await ctx.sleep(3_600)

        @app.task
        async def ask(ctx: Context) -> str:
            consent = await ctx.approval("send it?", {"to": "all"}, reason="many people get it", quorum=2)
            return ", ".join(consent.by)

        @app.task
        async def transfer(amount: int) -> int:
            return amount

        app.guard.rule("transfers", task="transfer", then=RequireApproval("it is money", deadline=timedelta(days=1)))
        self.fetch, self.second_time, self.charge, self.call, self.order = fetch, second_time, charge, call, order
        self.publish, self.nap, self.ask, self.transfer = publish, nap, ask, transfer

    async def _lose(self) -> None:
        raise ConnectionError("the answer was lost")

    @property
    def offices(self) -> Operations:
        return Operations.for_app(self.app)

    async def make_all(self) -> dict[str, str]:
        """All histories side by side, each in a queue of its own; the ids of their jobs."""
        histories = {name: history(self, name) for name, history in HISTORIES.items()}
        ids: dict[str, str] = {}
        while histories:
            for name, history in list(histories.items()):
                job = await anext(history, None)
                if job is None:
                    del histories[name]
                else:
                    ids[name] = job.id
            await drain(self.app, sorted(HISTORIES.keys() - UNSERVED))
            await self.app.ledger.wait_caught_up(timeout=60)
        return ids

    async def approval_of(self, job: Job[Any]) -> str:
        ask = (await job.info()).meta.approval_request
        assert ask is not None
        return ask.approval_id

    async def letter_of(self, job: Job[Any]) -> str:
        return (await job.info()).meta.dlq_id

    async def claim(self, queue: str) -> Claim:
        (claim,) = await self.app.engine.claim("worker-1", [queue], 1, 10_000)
        return claim


async def _once(task: Task[Any, Any], queue: str, *arguments: Any, **options: Any) -> AsyncIterator[Job[Any]]:
    yield await task.options(queue=queue, **options).submit(*arguments)


async def _cancelled(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue, delay=3_600).submit()
    await at.offices.operating.cancel(ADA, job.id, queue=queue, reason="customer withdrew")
    yield job


async def _cancelled_while_running(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue).submit()
    await at.claim(queue)
    await at.offices.operating.cancel(ADA, job.id, queue=queue, reason="")
    yield job


async def _expedited(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue, delay=3_600).submit()
    await at.offices.operating.expedite(ADA, job.id, queue=queue, reason="it is urgent")
    yield job


async def _suspended_by_an_operator(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue, delay=3_600).submit()
    await at.offices.operating.suspend(ADA, job.id, queue=queue, reason="let us wait")
    yield job


async def _resumed(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.order.options(queue=queue).submit()
    yield job
    await at.offices.operating.resume(ADA, job.id, queue=queue, reason="it is there now")
    yield job


async def _released(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue).submit()
    claim = await at.claim(queue)
    await at.app.engine.renew([claim.lease], [claim.lease])
    release = Release("its worker drains", delay_ms=3_600_000, started=True)
    await at.app.engine.settle([Settlement(claim, release, await at.app.engine.now_ms())])
    yield job


async def _running(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue).submit()
    await at.claim(queue)
    yield job


async def _paused(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    await at.offices.operating.update_control(ADA, queue, reason="moves", verb="pause", paused=True)
    yield await at.fetch.options(queue=queue).submit()


async def _retrying_and_paused(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.fetch.options(queue=queue).submit()
    yield job
    await at.offices.operating.update_control(ADA, queue, reason="", verb="pause", paused=True)
    yield job


async def _approved(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.transfer.options(queue=queue).submit(1)
    await at.app.ledger.wait_caught_up(timeout=60)
    await at.offices.approvals.vote(APPROVER, await at.approval_of(job), approve=True, reason="fine")
    yield job


async def _rejected(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.transfer.options(queue=queue).submit(1)
    await at.app.ledger.wait_caught_up(timeout=60)
    await at.offices.approvals.vote(APPROVER, await at.approval_of(job), approve=False, reason="too much")
    yield job


async def _one_of_two(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.ask.options(queue=queue).submit()
    yield job
    await at.offices.approvals.vote(APPROVER, await at.approval_of(job), approve=True, reason="")
    yield job


async def _two_of_two(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.ask.options(queue=queue).submit()
    yield job
    for voter in (APPROVER, CAROL):
        await at.offices.approvals.vote(voter, await at.approval_of(job), approve=True, reason="")
    yield job


async def _replayed(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.charge.options(queue=queue).submit(5)
    yield job
    await at.offices.dead_letters.replay(ADA, await at.letter_of(job), reason="the bank is back")
    yield job


async def _replay(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.charge.options(queue=queue).submit(5)
    yield job
    done = await at.offices.dead_letters.replay(ADA, await at.letter_of(job), reason="")
    yield at.app.job(done.job_id, queue)


async def _discarded(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.charge.options(queue=queue).submit(5)
    yield job
    await at.offices.dead_letters.discard(ADA, await at.letter_of(job), "nothing to do")
    await at.offices.dead_letters.confirm(BOB, await at.letter_of(job))
    yield job


async def _kept(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await at.charge.options(queue=queue).submit(5)
    yield job
    await at.offices.dead_letters.discard(ADA, await at.letter_of(job), "nothing to do")
    await at.offices.dead_letters.keep(BOB, await at.letter_of(job), "there is")
    yield job


async def _unknown_task(at: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    envelope = Envelope(job_id=new_job_ids(1)[0], task="no.such.task", payload=b"{}", queue=queue)
    receipt = await (await at.app.submitter()).submit(envelope)
    yield at.app.job(receipt.job_id, queue)


#: By the names of their queues.
HISTORIES: Final[dict[str, Hihistory]] = {
    "succeeded": lambda at, queue: _once(at.second_time, queue),
    "delayed": lambda at, queue: _once(at.fetch, queue, delay=3_600),
    "retrying": lambda at, queue: _once(at.fetch, queue),
    "outage": lambda at, queue: _once(at.call, queue),
    "failed": lambda at, queue: _once(at.charge, queue, 7),
    "unknown-task": _unknown_task,
    "suspended": lambda at, queue: _once(at.order, queue),
    "suspended-by-an-operator": _suspended_by_an_operator,
    "resumed": _resumed,
    "in-doubt": lambda at, queue: _once(at.publish, queue, "publish 1"),
    "asleep": lambda at, queue: _once(at.nap, queue),
    "held": lambda at, queue: _once(at.fetch, queue, hold=True),
    "guarded": lambda at, queue: _once(at.transfer, queue, 5),
    "approved": _approved,
    "rejected": _rejected,
    "asked": lambda at, queue: _once(at.ask, queue),
    "one-of-two": _one_of_two,
    "two-of-two": _two_of_two,
    "cancelled": _cancelled,
    "cancelled-while-running": _cancelled_while_running,
    "expedited": _expedited,
    "released": _released,
    "running": _running,
    "paused": _paused,
    "retrying-and-paused": _retrying_and_paused,
    "replayed": _replayed,
    "replay": _replay,
    "discarded": _discarded,
    "kept": _kept,
    "idle": lambda at, queue: _once(at.fetch, queue),
}
#: Queues that no worker serves.
UNSERVED: Final = frozenset({"idle", "running"})
