"""A holdfast process that runs one step at a time: the product's own parts, without the loops around them.

Every run therefore makes the same calls in the same order. A step catches an error and retries where the product's
loop would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Final

from holdfast import Holdfast
from holdfast.core.job import MAX_BATCH, JobInfo
from holdfast.core.verdict import Settlement, SettleResult
from holdfast.effects.runtime import EffectRuntime
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable, Unavailable
from holdfast.execution.backend import backend_of
from holdfast.execution.spec import TaskSpec
from holdfast.ledger.port.ledger import Ledger
from holdfast.operations.approvals import ApprovalOperations
from holdfast.operations.operations import Operations
from holdfast.upkeep.dispatch import ReplaySubmission
from holdfast.upkeep.engine_tasks import EnginePruner
from holdfast.upkeep.feed_cursor import FeedCursor
from holdfast.upkeep.loop import QueueSelection
from holdfast.upkeep.lost_leases import LostLeases
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler, ReconcileReport
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.in_flight import InFlight
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from tests.crash_points.stores import Stores

_ATTEMPTS: Final = 8


class StepFetcher(Fetcher):
    """Runs one round at a time, without waiting."""

    async def run_round(self) -> None:
        """Run rounds as `run` does, until one has succeeded."""
        self._reclaim_at = 0.0
        while True:
            try:
                await self._run_once()
            except EngineUnavailable:
                await self._recover()
            else:
                return

    def _wait_ms(self, again_s: float) -> int:
        return 0


class AtOnce:
    """Runs suspects in every round."""

    async def run_suspects(self, fetcher: Fetcher) -> float:
        await fetcher.run_suspect(60)
        return 0.0


class StepProjector(Projector):
    """Runs one round at a time, without waiting."""

    async def _wait(self, wait_ms: int) -> list[FeedCursor]:
        return await super()._wait(0)

    async def run_round(self) -> None:
        """Run one round as `run` does, and wait for its confirmations to the engine."""
        self._round_at = 0.0
        for cursor in self._cursors.values():
            cursor.read_at = 0.0
        try:
            await self._run_once()
        except Unavailable:
            await self._drop_all()
        confirming = [cursor.confirming for cursor in self._cursors.values() if cursor.confirming is not None]
        await asyncio.gather(*confirming, return_exceptions=True)
        for cursor in self._cursors.values():
            if cursor.confirm_at:
                cursor.confirm_at = 0.001
        self._confirmer._retry_at.clear()


class StepSettler(Settler):
    """Counts the verdicts that were answered *stale*."""

    stale = 0

    def _log_stale(self, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
        self.stale += answers.count(SettleResult.STALE)
        super()._log_stale(settlements, answers)


class Process:
    """All parts of a worker with upkeep."""

    def __init__(self, stores: Stores, app: Holdfast, number: int, specs: Mapping[str, TaskSpec]) -> None:
        """`specs`: tasks to run besides the app's own."""
        self.stores = stores
        self.app = app
        self.number = number
        self._specs = {**backend_of(app).specs, **specs}
        self.name = f"process-{number}"
        self._in_flight: InFlight = set()
        self._pruned = False

    @property
    def engine(self) -> Engine:
        return self.app.engine

    @property
    def ledger(self) -> Ledger:
        ledger = backend_of(self.app).ledger
        assert ledger is not None
        return ledger

    @property
    def operations(self) -> Operations:
        return Operations.for_app(self.app)

    async def open(self) -> None:
        await retry_call(self.app.open)

    async def close(self) -> None:
        if "_runner" in self.__dict__:
            await self._runner.close()
        await self.app.close()

    # A worker ---------------------------------------------------------------------------------------

    async def work(self, queues: Sequence[str] = ()) -> None:
        """Claim and run ready jobs, and wait for the settle results."""
        self._fetcher._queues = tuple(queues or await retry_call(self.engine.queues))
        if self._fetcher._queues:
            await self._fetcher.run_round()
            await self._settle_all()

    async def _settle_all(self) -> None:
        while self._in_flight:
            await asyncio.sleep(0)
            await self._settler.flush(10)
        # No process here outlives its leases: what it settles is applied, or was when the reply was lost.
        assert not self._settler.stale, "a worker that held its lease was answered *stale*"

    @cached_property
    def _settler(self) -> StepSettler:
        return StepSettler(self.engine, self._in_flight)

    @cached_property
    def _runner(self) -> Runner:
        app = self.app

        async def ledger() -> Ledger | None:
            return backend_of(app).ledger

        async def find(queue: str, job_id: str) -> JobInfo | None:
            return (await app.engine.get(queue, [job_id]))[0]

        tools = EffectRuntime(
            ledger,
            find,
            lambda: self._runner.now_ms(),
            app.engine.counters,
            lease_s=app.settings.visibility_timeout_s,
            payload_limit=app.settings.payload_limit,
        )
        backend = backend_of(app)
        return Runner(
            self._specs,
            self._settler,
            self._in_flight,
            1,
            tools=tools,
            guards=backend.guard_runner(backend.ledger),
        )

    @cached_property
    def _fetcher(self) -> StepFetcher:
        lost = LostLeases(self.engine, self.name)
        common = (self.engine, self.name, ["default"], self._runner, self._in_flight, self.app.settings)
        return StepFetcher(*common, lost, AtOnce())

    # Upkeep -----------------------------------------------------------------------------------------

    async def run_upkeep(self) -> None:
        """Run one round of each upkeep duty."""
        queues = await retry_call(self.engine.queues)
        if queues:
            await retry_call(lambda: self.engine.promote(queues, MAX_BATCH))
            if not self._pruned:
                # Pruning has many small steps; one round covers them.
                await retry_call(lambda: EnginePruner(self.engine, QueueSelection(self.engine, queues))._run_once())
                self._pruned = True
        if self.stores.separate_ledger:
            await self.project()
        if self.stores.has_ledger:
            await retry_call(lambda: ReplaySubmission(self.engine, self.ledger)._dead_letters.submit_pending(100))
            approvals = ApprovalOperations(self.engine, self.ledger)
            await retry_call(lambda: approvals.expire(100))
            await retry_call(lambda: approvals.deliver_pending(100))

    async def project(self) -> None:
        if self.stores.separate_ledger:
            await self._projector.run_round()

    @cached_property
    def _projector(self) -> StepProjector:
        return StepProjector(self.engine, self.ledger, name=self.name, lease_ms=1, linger_s=0.0, round_s=0.0)

    @asynccontextmanager
    async def run_projector(self) -> AsyncIterator[None]:
        """Run the projector in the background, for a caller that waits for it."""

        async def project() -> None:
            while True:
                await self.project()
                await asyncio.sleep(0.002)

        background = asyncio.create_task(project())
        try:
            yield
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)

    async def reconcile(self) -> ReconcileReport:
        async with self.run_projector():
            report: ReconcileReport = await retry_call(lambda: Reconciler(self.engine, self.ledger).reconcile())
        return report


async def retry_call(step: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call until the store answers, as the product's loops and its callers do."""
    for _ in range(_ATTEMPTS):
        try:
            return await step()
        except Unavailable:
            continue
    return await step()
