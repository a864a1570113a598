"""A small deployment with people in it, on either pair of stores: an app, its offices, and a ledger that keeps up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from holdfast import Context, Fatal, Holdfast, Retry
from holdfast.core.job import JobInfo
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.core.states import State
from holdfast.execution.backend import backend_of
from holdfast.operations.operations import Operations
from holdfast.testing import drain
from holdfast.upkeep.ledger_tasks import LedgerTasks


def person(name: str, role: Role = Role.OPERATOR, *tenants: str, proven: bool = True) -> Principal:
    """Somebody; of every tenant unless told."""
    return Principal(name=name, role=role, tenants=frozenset(tenants or {ALL_TENANTS}), verified=proven)


ADA: Final = person("ada")
BOB: Final = person("bob")
VIEWER: Final = person("vic", Role.VIEWER)
APPROVER: Final = person("ann", Role.APPROVER)
ADMIN: Final = person("root", Role.ADMIN)
LOCAL: Final = person("local:me", Role.ADMIN, proven=False)
OF_ACME: Final = person("olga", Role.OPERATOR, "acme")
OF_GLOBEX: Final = person("gus", Role.OPERATOR, "globex")


class World:
    """An app whose task fails until it is mended."""

    def __init__(self, url: str, ledger: str | None, namespace: str) -> None:
        self.app = Holdfast(url, ledger=ledger, namespace=namespace)
        self.broken = True
        #: What each run saw: amount, idempotency key.
        self.runs: list[tuple[int, str]] = []
        self.paid: list[str] = []

        @self.app.task
        async def charge(ctx: Context, amount: int, currency: str = "EUR") -> str:
            self.runs.append((amount, ctx.idempotency_key))
            if self.broken:
                raise Fatal(f"card {amount} refused")
            await ctx.effect(f"pay:{ctx.idempotency_key}", self._pay, ctx.idempotency_key)
            return f"{amount} {currency}"

        @self.app.task(retry=Retry(max_retries=0), on_exhausted="suspend")
        async def fetch(ctx: Context, what: str = "it") -> int:
            if self.broken:
                raise RuntimeError(f"{what} is not there")
            return ctx.retry_count

        self.charge = charge
        self.fetch = fetch

    async def _pay(self, key: str) -> str:
        self.paid.append(key)
        return key

    @property
    def offices(self) -> Operations:
        return Operations.for_app(self.app)

    async def dead(self, count: int = 1, **options: Any) -> list[str]:
        """Dead letters of the task, by id, oldest first."""
        jobs = [await self.charge.options(**options).submit(10 + number) for number in range(count)]
        await self.run()
        ended = [await self.app.engine.wait_final(job.queue, job.id, 30_000) for job in jobs]
        await self.caught_up()
        assert {view.state for view in ended if view is not None} == {State.FAILED}
        return [view.meta.dlq_id for view in ended if view is not None]

    async def suspended(self, count: int = 1, **options: Any) -> list[str]:
        jobs = [await self.fetch.options(**options).submit() for _ in range(count)]
        await self.run()
        assert [await job.state() for job in jobs] == [State.SUSPENDED] * count
        return [job.id for job in jobs]

    async def run(self, queues: Sequence[str] | None = None) -> None:
        """All that is due, and the ledger has it."""
        await drain(self.app, queues)
        await self.caught_up()

    async def caught_up(self) -> None:
        await self.app.ledger.wait_caught_up(timeout=30)

    async def view(self, job_id: str, queue: str = "default") -> JobInfo:
        (view,) = await self.app.engine.get(queue, [job_id])
        assert view is not None
        return view

    async def log(self, kind: str) -> list[Any]:
        """The operators' log of one kind, oldest first."""
        from holdfast.ledger.queries.operator_filters import AuditFilter

        await self.caught_up()
        page = await self.offices.audit.list(ADMIN, AuditFilter(types=frozenset({kind})), 100)
        return list(reversed(page.entries))


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[World]:
    """Open, with a projector where one is needed."""
    async with world.app as app:
        ledger = backend_of(app).ledger
        bookkeeping = None if ledger is None else LedgerTasks(app.engine, ledger, app.settings)
        if bookkeeping is not None:
            bookkeeping.start()
        try:
            yield world
        finally:
            if bookkeeping is not None:
                await bookkeeping.stop()
