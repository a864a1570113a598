"""A small deployment on either pair of stores: an app, its operator actions, and ledger tasks that run."""

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


def principal(name: str, role: Role = Role.OPERATOR, *tenants: str, verified: bool = True) -> Principal:
    """Build a principal; of all tenants unless some are given."""
    return Principal(name=name, role=role, tenants=frozenset(tenants or {ALL_TENANTS}), verified=verified)


ADA: Final = principal("ada")
BOB: Final = principal("bob")
VIEWER: Final = principal("vic", Role.VIEWER)
APPROVER: Final = principal("ann", Role.APPROVER)
ADMIN: Final = principal("root", Role.ADMIN)
LOCAL: Final = principal("local:me", Role.ADMIN, verified=False)
OF_ACME: Final = principal("olga", Role.OPERATOR, "acme")
OF_GLOBEX: Final = principal("gus", Role.OPERATOR, "globex")


class SampleDeployment:
    """An app whose tasks fail while `broken` is set."""

    def __init__(self, url: str, ledger: str | None, namespace: str) -> None:
        self.app = Holdfast(url, ledger=ledger, namespace=namespace)
        self.broken = True
        #: One item per run: amount, idempotency key.
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
    def operations(self) -> Operations:
        return Operations.for_app(self.app)

    async def make_dead_letters(self, count: int = 1, **options: Any) -> list[str]:
        """Fail `count` jobs; the ids of their dead letters, oldest first."""
        jobs = [await self.charge.options(**options).submit(10 + number) for number in range(count)]
        await self.run()
        infos = [await self.app.engine.wait_final(job.queue, job.id, 30_000) for job in jobs]
        await self.wait_caught_up()
        assert {info.state for info in infos if info is not None} == {State.FAILED}
        return [info.meta.dlq_id for info in infos if info is not None]

    async def make_suspended(self, count: int = 1, **options: Any) -> list[str]:
        jobs = [await self.fetch.options(**options).submit() for _ in range(count)]
        await self.run()
        assert [await job.state() for job in jobs] == [State.SUSPENDED] * count
        return [job.id for job in jobs]

    async def run(self, queues: Sequence[str] | None = None) -> None:
        """Run all due jobs and wait until the ledger has their events."""
        await drain(self.app, queues)
        await self.wait_caught_up()

    async def wait_caught_up(self) -> None:
        await self.app.ledger.wait_caught_up(timeout=30)

    async def info(self, job_id: str, queue: str = "default") -> JobInfo:
        (info,) = await self.app.engine.get(queue, [job_id])
        assert info is not None
        return info

    async def audit_log(self, kind: str) -> list[Any]:
        """The audit entries of one type, oldest first."""
        from holdfast.ledger.queries.operator_filters import AuditFilter

        await self.wait_caught_up()
        page = await self.operations.audit.list(ADMIN, AuditFilter(types=frozenset({kind})), 100)
        return list(reversed(page.entries))


@asynccontextmanager
async def run_deployment(deployment: SampleDeployment) -> AsyncIterator[SampleDeployment]:
    """Open the deployment, with ledger tasks if it has a ledger."""
    async with deployment.app as app:
        ledger = backend_of(app).ledger
        ledger_tasks = None if ledger is None else LedgerTasks(app.engine, ledger, app.settings)
        if ledger_tasks is not None:
            ledger_tasks.start()
        try:
            yield deployment
        finally:
            if ledger_tasks is not None:
                await ledger_tasks.stop()
