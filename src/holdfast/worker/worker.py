"""A worker: fetcher, runner, settler and renewer around one engine, from start to drained.

    engine ──claim──► fetcher ──► runner ──► settler ──settle──► engine
                         renewer (own thread) ──renew──► engine

A failure of the engine does not end a worker. It ends when it is drained: by `drain()` (a signal), by itself when it
has reached its limit of jobs or memory, or when the task that runs it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.core.job import DEFAULT_QUEUE, JobInfo, Lease
from holdfast.core.retry import Backoff
from holdfast.effects.runtime import EffectRuntime
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable, InvalidOption
from holdfast.execution.spec import ExecutionMode, TaskSpec, locate
from holdfast.extras import require
from holdfast.guard.runner import GuardRunner
from holdfast.identity import new_identity
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.port.messages import OutboxOpener
from holdfast.observe.counters import Counters
from holdfast.observe.logs import log_fields
from holdfast.observe.redact import redact
from holdfast.observe.tracing import tracer_for
from holdfast.operations.readiness import DOWN, DRAINING, OK, STARTING
from holdfast.settings import Settings
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.engine_tasks import EnginePruner, Promoter
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.upkeep.loop import QueueSelection
from holdfast.upkeep.relay_service import run_relay
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.in_flight import Drain, InFlight, Run, StopReason
from holdfast.worker.renewer import LeaseListener, Renewer
from holdfast.worker.runner import CANCEL_GRACE_S, Runner
from holdfast.worker.settler import Settler

if TYPE_CHECKING:
    from holdfast.worker.webhook_worker import WebhookWorker


_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident set now; on systems without /proc its highest value so far."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


_log: Final = logging.getLogger("holdfast.worker")

_HOUSEKEEPING_S: Final = 1.0


class WorkerExit(StrEnum):
    """Why a worker ended."""

    DRAINED = "drained"
    #: It has done as many jobs as it was allowed.
    MAX_JOBS = "max_jobs"
    #: Its process has grown over its limit.
    MAX_RSS = "max_rss"


class WorkerApp(Protocol):
    """What a worker needs of the app."""

    @property
    def settings(self) -> Settings: ...
    @property
    def specs(self) -> Mapping[str, TaskSpec]: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def ledger_backend(self) -> Ledger | None: ...
    @property
    def outbox_backend(self) -> OutboxOpener | None: ...
    def guard_runner(self, ledger: Ledger | None) -> GuardRunner | None: ...
    async def open(self) -> None: ...


class Worker(LeaseListener):
    """Runs jobs of some queues until it is drained."""

    def __init__(
        self,
        app: WorkerApp,
        queues: Sequence[str] = (DEFAULT_QUEUE,),
        concurrency: int | None = None,
        upkeep: bool = True,
        name: str | None = None,
        *,
        max_jobs: int | None = None,
        max_rss: int | None = None,
        cancel_grace_s: float = CANCEL_GRACE_S,
    ) -> None:
        """`max_jobs` and `max_rss` (bytes) recycle the process: the worker drains itself when it gets there.

        Raises `MissingExtra` if its upkeep is to send webhooks and no HTTP client is installed.
        """
        if isinstance(queues, str) or not queues or not all(queues):
            raise InvalidOption(f"a worker needs a list of queue names, not {queues!r}")
        for limit, value in (("max_jobs", max_jobs), ("max_rss", max_rss)):
            if value is not None and value < 1:
                raise InvalidOption(f"{limit} must be 1 or more, got {value!r}")
        if upkeep and app.settings.delivers:
            require("sending webhooks", "httpcore")
        self._app = app
        self._queues = tuple(dict.fromkeys(queues))
        self._concurrency = _checked(app.settings.concurrency if concurrency is None else concurrency)
        self._upkeep = upkeep
        self._max_jobs = max_jobs
        self._max_rss = max_rss
        self._cancel_grace_s = cancel_grace_s
        self._name = name or ""
        #: Its name in the engine, in logs and histories. Made by `run`: a worker may be built before a fork.
        self.incarnation = ""
        self._controls: dict[str, QueueControl] = {}
        self._held: InFlight = set()
        self._draining = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._ended = WorkerExit.DRAINED
        self._started_before = 0
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._fetcher: Fetcher | None = None
        self._promoter: Promoter | None = None

    # For its owner ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the fetch loop ticked lately and the engine answered; False before, and while it drains."""
        return self._fetcher is not None and not self._draining.is_set() and self._fetcher.ready

    @property
    def status(self) -> str:
        """`starting`, `ok`, `down` (it does not claim) or `draining`."""
        if self._draining.is_set():
            return DRAINING
        if self._fetcher is None:
            return STARTING
        return OK if self._fetcher.ready else STARTING if self._fetcher.is_new else DOWN

    @property
    def counters(self) -> Counters:
        """What the engine counted in this process."""
        return self._app.engine.counts if self._engine is None else self._engine.counts

    @property
    def running(self) -> int:
        """Jobs whose code runs at this moment."""
        return 0 if self._runner is None else self._runner.running

    @property
    def in_flight(self) -> int:
        """Leases that it holds: waiting, running, or with a verdict on its way."""
        return len(self._held)

    @property
    def finished(self) -> int:
        """Jobs whose code has run, or that have none here (an unknown task)."""
        return 0 if self._runner is None else self._runner.finished

    @property
    def concurrency(self) -> int:
        """How many jobs it runs at a time: what an operator set, else its own."""
        ordered = [control.concurrency for control in self._controls.values() if control.concurrency is not None]
        return max(1, min(ordered)) if ordered else self._concurrency

    def set_concurrency(self, concurrency: int) -> None:
        """Run so many at a time from now on; an operator's setting for a queue goes before."""
        self._concurrency = _checked(concurrency)
        self._apply_concurrency()

    def drain(self) -> None:
        """Take nothing new, finish, end. A second call does not wait for what still runs."""
        if self._draining.is_set():
            self._hurrying.set()
        self._draining.set()

    async def run(self) -> WorkerExit:
        """Work until drained; returns why it ended. Cancelled, it drains in a hurry first."""
        self._check_places()
        self.incarnation = new_identity(self._name)
        try:
            if not await self._connect():
                return self._ended
            return await self._work()
        finally:
            self._fetcher = None

    # From start to drained ---------------------------------------------------------------------------

    def _check_places(self) -> None:
        for plan in self._app.specs.values():
            if plan.mode is ExecutionMode.PROCESS:
                locate(plan)

    async def _connect(self) -> bool:
        """Open the engine, however long that takes; False if drained before it answered."""
        backoff = Backoff()
        while not self._draining.is_set():
            try:
                await self._app.open()
            except EngineUnavailable as exc:
                _log.error("the engine cannot be reached, trying again: %s", exc)
                await _wait(self._draining, backoff.next_s())
            else:
                self._engine = self._app.engine
                return True
        return False

    async def _work(self) -> WorkerExit:
        assert self._engine is not None
        engine = self._engine
        self._announce()
        bookkeeping = self._bookkeeping(engine)
        if bookkeeping is not None:
            await bookkeeping.prepare()
        relay = AsyncExitStack()
        await relay.enter_async_context(run_relay(self._app, wanted=self._upkeep and self._app.settings.outbox_relay))
        settler = Settler(engine, self._held)
        runner = self._runner = Runner(
            self._app.specs,
            settler,
            self._held,
            self.concurrency,
            tools=self._tools(engine),
            gate=self._app.guard_runner(self._app.ledger_backend),
            tracer=tracer_for(self._app.settings.tracing),
            cancel_grace_s=self._cancel_grace_s,
            in_memory=self._app.settings.in_memory,
        )
        fetcher = self._fetcher = Fetcher(
            engine, self.incarnation, self._queues, runner, self._held, self._app.settings, quota=self._max_jobs
        )
        renewer = Renewer(engine.clone(), self._queues, self._held, self._app.settings.heartbeat_interval_s, self)
        renewer.start()
        fetching = asyncio.create_task(fetcher.run())
        helpers = [asyncio.create_task(self._housekeep()), *self._start_upkeep(engine)]
        if bookkeeping is not None:
            bookkeeping.start()
        postman = self._start_postman(engine)

        async def end() -> None:
            ending = Drain(self._held, self._app.settings, self._hurrying, self._cancel_grace_s)
            # From the last to the first, each of them whatever the others raise: a renewer that is left behind
            # would keep these jobs from everybody for as long as the process lives.
            async with AsyncExitStack() as last:
                last.push_async_callback(ending.deregister, engine, self.incarnation, self._queues)
                last.push_async_callback(runner.close)
                last.push_async_callback(renewer.stop)
                if bookkeeping is not None:
                    # To the last: what this worker settles while it drains may still reach the ledger.
                    last.push_async_callback(bookkeeping.stop)
                if postman is not None:
                    postman.drain()
                    last.push_async_callback(postman.stop, self._hurrying)
                last.push_async_callback(relay.aclose)
                await _end([fetching, *helpers])
                await ending.finish(runner, fetcher, settler)

        try:
            await self._draining.wait()
        except asyncio.CancelledError:
            self._hurrying.set()
            raise
        finally:
            self._draining.set()
            await self._see_through(asyncio.create_task(end()))
        return self._ended

    def _announce(self) -> None:
        facts = {
            "incarnation": self.incarnation,
            "engine": redact(self._app.settings.url),
            "queues": list(self._queues),
            "tasks": sorted(self._app.specs),
        }
        _log.info(
            "worker %s started on %s: queues %s, tasks %s",
            self.incarnation,
            facts["engine"],
            ", ".join(self._queues),
            ", ".join(facts["tasks"]) or "none",
            extra=facts,
        )

    def _tools(self, engine: Engine) -> EffectRuntime:
        async def ledger() -> Ledger | None:
            return self._app.ledger_backend

        async def find(queue: str, job_id: str) -> JobInfo | None:
            return (await engine.get(queue, [job_id]))[0]

        def now_ms() -> int:
            assert self._runner is not None
            return self._runner.now_ms()

        settings = self._app.settings
        return EffectRuntime(
            ledger,
            find,
            now_ms,
            engine.counts,
            lease_s=settings.visibility_timeout_s,
            payload_limit=settings.payload_limit,
        )

    async def _see_through(self, ending: asyncio.Task[None]) -> None:
        """Wait for the end of the worker. Cancelled meanwhile, it hurries, and is cancelled when that is over."""
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as exc:
                self._hurrying.set()
                cancelled = exc
        if cancelled is None:
            ending.result()
            return
        if not ending.cancelled() and (failure := ending.exception()) is not None:
            _log.error("the worker did not end as it should", exc_info=failure)
        raise cancelled

    def _start_upkeep(self, engine: Engine) -> list[asyncio.Task[None]]:
        if not self._upkeep:
            return []
        queues = QueueSelection(engine, self._queues)
        self._promoter = Promoter(engine, queues)
        # All queues, not only ours: one that no worker serves grows, too.
        alarm = BacklogMonitor(engine, QueueSelection(engine, ()), self._app.settings, self._app.ledger_backend)
        loops = (self._promoter.run(), EnginePruner(engine, queues).run(), alarm.run())
        return [asyncio.create_task(loop) for loop in loops]

    def _bookkeeping(self, engine: Engine) -> LedgerTasks | None:
        ledger = self._app.ledger_backend
        if ledger is None or not self._upkeep:
            return None
        settings = self._app.settings
        # All queues, not only ours: nobody else may be there to do it.
        return LedgerTasks(engine, ledger, settings, name=self.incarnation, project=settings.projector)

    def _start_postman(self, engine: Engine) -> WebhookWorker | None:
        if self._app.ledger_backend is None or not self._upkeep or not self._app.settings.webhooks_enabled:
            return None
        # Here: it is a worker itself.
        from holdfast.worker.webhook_worker import WebhookWorker

        postman = WebhookWorker(engine, self._app.settings)
        postman.start()
        return postman

    async def _housekeep(self) -> None:
        while not self._has_had_enough():
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._release_prefetched()
        self.drain()

    def _has_had_enough(self) -> bool:
        if self._max_jobs is not None and self.finished >= self._max_jobs:
            self._ended = WorkerExit.MAX_JOBS
        elif self._max_rss is not None and resident_bytes() > self._max_rss:
            self._ended = WorkerExit.MAX_RSS
        else:
            return False
        _log.info("the worker ends to be started again: %s", self._ended)
        return True

    def _release_prefetched(self) -> None:
        """Jobs fetched ahead that nothing has started for a second wait behind slow ones: others may be free."""
        if self._runner is None or self._fetcher is None:
            return
        if self._runner.queued and self._runner.started == self._started_before:
            self._fetcher.stop_prefetching()
            released = self._runner.release_queued("given back: the worker is busy")
            _log.info("%d jobs given back that were fetched ahead", released)
        self._started_before = self._runner.started

    # What the renewer tells ------------------------------------------------------------------------

    def on_leases_lost(self, leases: Sequence[Lease]) -> None:
        """Leases that ran out: end those runs, without a verdict."""
        runs = self._runs(leases)
        # Counted here and nowhere else: to the engine, a lease that was settled a moment ago looks the same.
        self.counters.leases_lost += len(runs)
        for run in runs:
            _log.warning(
                "the lease on job %s is lost; its run is stopped", run.claim.job_id, extra=log_fields(run.claim)
            )
        self._lose(runs)

    def on_cancelled(self, leases: Sequence[Lease]) -> None:
        """An operator moved these jobs: end those runs."""
        runs = self._runs(leases)
        for run in runs:
            _log.info(
                "job %s was taken away by an operator; its run is stopped",
                run.claim.job_id,
                extra=log_fields(run.claim),
            )
        self._lose(runs)

    def on_control_changed(self, queue: str, control: QueueControl) -> None:
        """An operator's hand on a queue."""
        self._controls[queue] = control
        self._apply_concurrency()

    def on_due(self, queue: str, at_ms: int) -> None:
        """A job waits for its time."""
        if self._promoter is not None:
            self._promoter.due(at_ms)

    def _runs(self, leases: Sequence[Lease]) -> list[Run]:
        gone = set(leases)
        return [run for run in self._held if run.claim.lease in gone and run.settlement is None]

    def _lose(self, runs: Sequence[Run]) -> None:
        if self._runner is not None:
            for run in runs:
                self._runner.stop(run, StopReason.LOST)

    def _apply_concurrency(self) -> None:
        if self._runner is not None and self._runner.concurrency != self.concurrency:
            _log.info("concurrency is now %d", self.concurrency)
            self._runner.set_concurrency(self.concurrency)


def _checked(concurrency: int) -> int:
    if type(concurrency) is not int or concurrency < 1:
        raise InvalidOption(f"concurrency must be a whole number of 1 or more, got {concurrency!r}")
    return concurrency


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for ending in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ending, Exception):
            _log.error("a part of the worker had ended early", exc_info=ending)
