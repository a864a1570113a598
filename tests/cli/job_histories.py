"""Jobs with every kind of history, for tests of `holdfast explain`: the same on every pair of stores."""

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
from holdfast.execution.backend import backend_of
from holdfast.operations.operations import Operations
from holdfast.testing import drain
from tests.operations.deployment import ADA, APPROVER, BOB, principal

CAROL: Final = principal("carol", Role.APPROVER)


#: Makes moves, yields the job that it is about, and continues after due jobs have run.
History = Callable[["Histories", str], AsyncIterator[Job[Any]]]


class Histories:
    """An app, and the histories of its jobs."""

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
        async def send(ctx: Context) -> str:
            approval = await ctx.approval("send it?", {"to": "all"}, reason="it has many recipients", quorum=2)
            return ", ".join(approval.by)

        @app.task
        async def transfer(amount: int) -> int:
            return amount

        app.guard.rule("transfers", task="transfer", then=RequireApproval("it is money", deadline=timedelta(days=1)))
        self.fetch, self.second_time, self.charge, self.call, self.order = fetch, second_time, charge, call, order
        self.publish, self.nap, self.send, self.transfer = publish, nap, send, transfer

    async def _lose(self) -> None:
        raise ConnectionError("the answer was lost")

    @property
    def operations(self) -> Operations:
        return Operations.for_app(self.app)

    async def make_all(self) -> dict[str, str]:
        """Make all histories concurrently, each in its own queue; return the ids of their jobs."""
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

    async def get_approval_id(self, job: Job[Any]) -> str:
        request = (await job.info()).meta.approval_request
        assert request is not None
        return request.approval_id

    async def get_dlq_id(self, job: Job[Any]) -> str:
        return (await job.info()).meta.dlq_id

    async def claim(self, queue: str) -> Claim:
        (claim,) = await self.app.engine.claim("worker-1", [queue], 1, 10_000)
        return claim


async def _once(task: Task[Any, Any], queue: str, *arguments: Any, **options: Any) -> AsyncIterator[Job[Any]]:
    yield await task.options(queue=queue, **options).submit(*arguments)


async def _cancelled(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue, delay=3_600).submit()
    await histories.operations.jobs.cancel(ADA, job.id, queue=queue, reason="customer withdrew")
    yield job


async def _cancelled_while_running(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue).submit()
    await histories.claim(queue)
    await histories.operations.jobs.cancel(ADA, job.id, queue=queue, reason="")
    yield job


async def _expedited(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue, delay=3_600).submit()
    await histories.operations.jobs.expedite(ADA, job.id, queue=queue, reason="it is urgent")
    yield job


async def _suspended_by_an_operator(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue, delay=3_600).submit()
    await histories.operations.jobs.suspend(ADA, job.id, queue=queue, reason="let us wait")
    yield job


async def _resumed(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.order.options(queue=queue).submit()
    yield job
    await histories.operations.jobs.resume(ADA, job.id, queue=queue, reason="it is there now")
    yield job


async def _released(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue).submit()
    claim = await histories.claim(queue)
    await histories.app.engine.renew([claim.lease], [claim.lease])
    release = Release("its worker drains", delay_ms=3_600_000, started=True)
    await histories.app.engine.settle([Settlement(claim, release, await histories.app.engine.now_ms())])
    # Otherwise it counts as a worker of the queue until its last sign of life is too old.
    await histories.app.engine.deregister_worker("worker-1", [queue])
    yield job


async def _running(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue).submit()
    await histories.claim(queue)
    yield job


async def _paused(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    await histories.operations.queues.update_control(ADA, queue, reason="moves", verb="pause", paused=True)
    yield await histories.fetch.options(queue=queue).submit()


async def _retrying_and_paused(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.fetch.options(queue=queue).submit()
    yield job
    await histories.operations.queues.update_control(ADA, queue, reason="", verb="pause", paused=True)
    yield job


async def _approved(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.transfer.options(queue=queue).submit(1)
    await histories.app.ledger.wait_caught_up(timeout=60)
    await histories.operations.approvals.vote(
        APPROVER, await histories.get_approval_id(job), approve=True, reason="fine"
    )
    yield job


async def _rejected(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.transfer.options(queue=queue).submit(1)
    await histories.app.ledger.wait_caught_up(timeout=60)
    await histories.operations.approvals.vote(
        APPROVER, await histories.get_approval_id(job), approve=False, reason="too much"
    )
    yield job


async def _one_of_two(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.send.options(queue=queue).submit()
    yield job
    await histories.operations.approvals.vote(APPROVER, await histories.get_approval_id(job), approve=True, reason="")
    yield job


async def _two_of_two(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.send.options(queue=queue).submit()
    yield job
    for voter in (APPROVER, CAROL):
        await histories.operations.approvals.vote(voter, await histories.get_approval_id(job), approve=True, reason="")
    yield job


async def _replayed(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.charge.options(queue=queue).submit(5)
    yield job
    await histories.operations.dead_letters.replay(ADA, await histories.get_dlq_id(job), reason="the bank is back")
    yield job


async def _replay(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.charge.options(queue=queue).submit(5)
    yield job
    done = await histories.operations.dead_letters.replay(ADA, await histories.get_dlq_id(job), reason="")
    yield histories.app.job(done.job_id, queue)


async def _discarded(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.charge.options(queue=queue).submit(5)
    yield job
    await histories.operations.dead_letters.discard(ADA, await histories.get_dlq_id(job), "nothing to do")
    await histories.operations.dead_letters.confirm(BOB, await histories.get_dlq_id(job))
    yield job


async def _kept(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    job = await histories.charge.options(queue=queue).submit(5)
    yield job
    await histories.operations.dead_letters.discard(ADA, await histories.get_dlq_id(job), "nothing to do")
    await histories.operations.dead_letters.keep(BOB, await histories.get_dlq_id(job), "there is")
    yield job


async def _unknown_task(histories: Histories, queue: str) -> AsyncIterator[Job[Any]]:
    envelope = Envelope(job_id=new_job_ids(1)[0], task="no.such.task", payload=b"{}", queue=queue)
    receipt = await (await backend_of(histories.app).connections.submitter()).submit(envelope)
    yield histories.app.job(receipt.job_id, queue)


#: By the names of their queues.
HISTORIES: Final[dict[str, History]] = {
    "succeeded": lambda histories, queue: _once(histories.second_time, queue),
    "delayed": lambda histories, queue: _once(histories.fetch, queue, delay=3_600),
    "retrying": lambda histories, queue: _once(histories.fetch, queue),
    "outage": lambda histories, queue: _once(histories.call, queue),
    "failed": lambda histories, queue: _once(histories.charge, queue, 7),
    "unknown-task": _unknown_task,
    "suspended": lambda histories, queue: _once(histories.order, queue),
    "suspended-by-an-operator": _suspended_by_an_operator,
    "resumed": _resumed,
    "in-doubt": lambda histories, queue: _once(histories.publish, queue, "publish 1"),
    "asleep": lambda histories, queue: _once(histories.nap, queue),
    "held": lambda histories, queue: _once(histories.fetch, queue, hold=True),
    "guarded": lambda histories, queue: _once(histories.transfer, queue, 5),
    "approved": _approved,
    "rejected": _rejected,
    "approval-requested": lambda histories, queue: _once(histories.send, queue),
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
    "idle": lambda histories, queue: _once(histories.fetch, queue),
}
#: Queues that no worker serves.
UNSERVED: Final = frozenset({"idle", "running"})
