"""A process of holdfast that takes one step at a time: the product's own parts, without the loops around them.

So every run makes the same calls in the same order. Where a loop of the product would catch an error and try again,
so does the step.
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
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler, ReconcileReport
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.in_flight import InFlight
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from tests.crash_points.stores import Place

_TRIES: Final = 8


class StepFetcher(Fetcher):
    """One turn at a time, which waits for nothing."""

    async def turn(self) -> None:
        """As `run` does, until one has succeeded."""
        self._reclaim_at = 0.0
        while True:
            try:
                await self._run_once()
            except EngineUnavailable:
                await self._recover()
            else:
                return

    def _wait_ms(self) -> int:
        return 0


class StepProjector(Projector):
    """One turn at a time, which waits for nothing."""

    async def _wait(self, wait_ms: int) -> list[FeedCursor]:
        return await super()._wait(0)

    async def turn(self) -> None:
        """As `run` does, once; then what it tells the engine has been told."""
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
    """Remembers which verdicts it was told are stale."""

    stale = 0

    def _log_stale(self, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
        self.stale += answers.count(SettleResult.STALE)
        super()._log_stale(settlements, answers)


class Process:
    """Opened, it has all parts of a worker with upkeep."""

    def __init__(self, place: Place, app: Holdfast, number: int, plans: Mapping[str, TaskSpec]) -> None:
        """`plans`: what is run beside the app's own tasks."""
        self.place = place
        self.app = app
        self.number = number
        self._plans = {**backend_of(app).specs, **plans}
        self.name = f"process-{number}"
        self._held: InFlight = set()
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
    def offices(self) -> Operations:
        return Operations.for_app(self.app)

    async def open(self) -> None:
        await again(self.app.open)

    async def close(self) -> None:
        if "_runner" in self.__dict__:
            await self._runner.close()
        await self.app.close()

    # A worker ---------------------------------------------------------------------------------------

    async def work(self, queues: Sequence[str] = ()) -> None:
        """Claim what may run, run it, and have every verdict answered."""
        self._fetcher._queues = tuple(queues or await again(self.engine.queues))
        if self._fetcher._queues:
            await self._fetcher.turn()
            await self._done()

    async def _done(self) -> None:
        while self._held:
            await asyncio.sleep(0)
            await self._settler.flush(10)
        # No process here outlives its leases: what it settles is applied, or was when the reply was lost.
        assert not self._settler.stale, "a worker that held its lease was told that its verdict is stale"

    @cached_property
    def _settler(self) -> StepSettler:
        return StepSettler(self.engine, self._held)

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
        return Runner(
            self._plans,
            self._settler,
            self._held,
            1,
            tools=tools,
            guards=backend_of(app).guard_runner(backend_of(app).ledger),
        )

    @cached_property
    def _fetcher(self) -> StepFetcher:
        return StepFetcher(self.engine, self.name, ["default"], self._runner, self._held, self.app.settings)

    # Upkeep -----------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """One turn of everything that a worker with upkeep does beside its jobs."""
        queues = await again(self.engine.queues)
        if queues:
            await again(lambda: self.engine.promote(queues, MAX_BATCH))
            if not self._pruned:
                # Once is enough: it has many small steps.
                await again(lambda: EnginePruner(self.engine, QueueSelection(self.engine, queues))._run_once())
                self._pruned = True
        if self.place.apart:
            await self.project()
        if self.place.has_ledger:
            await again(lambda: ReplaySubmission(self.engine, self.ledger)._dead_letters.submit_pending(100))
            approvals = ApprovalOperations(self.engine, self.ledger)
            await again(lambda: approvals.expire(100))
            await again(lambda: approvals.deliver_pending(100))

    async def project(self) -> None:
        if self.place.apart:
            await self._projector.turn()

    @cached_property
    def _projector(self) -> StepProjector:
        return StepProjector(self.engine, self.ledger, name=self.name, lease_ms=1, linger_s=0.0, round_s=0.0)

    @asynccontextmanager
    async def projecting(self) -> AsyncIterator[None]:
        """The projector, beside something that waits for it."""

        async def project() -> None:
            while True:
                await self.project()
                await asyncio.sleep(0.002)

        beside = asyncio.create_task(project())
        try:
            yield
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def reconcile(self) -> ReconcileReport:
        """A pass."""
        async with self.projecting():
            report: ReconcileReport = await again(lambda: Reconciler(self.engine, self.ledger).reconcile())
        return report


async def again(step: Callable[[], Awaitable[Any]]) -> Any:
    """Until the store answers, as every loop and every patient caller does."""
    for _ in range(_TRIES):
        try:
            return await step()
        except Unavailable:
            continue
    return await step()
