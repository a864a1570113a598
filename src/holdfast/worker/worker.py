"""A worker: fetcher, runner, settler and renewer around one engine, from start to drained.

    engine ──claim──► fetcher ──► runner ──► settler ──settle──► engine
                         renewer (own thread) ──renew──► engine

A failure of the engine does not end a worker. It ends when it is drained: by `drain()` (a signal), by itself when it
has reached its limit of jobs or memory, or when the task that runs it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import DEFAULT_QUEUE, JobInfo, Lease
from holdfast.core.retry import Backoff
from holdfast.effects.runtime import EffectRuntime
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable, InvalidOption
from holdfast.execution.backend import BackendOwner, backend_of
from holdfast.execution.spec import ExecutionMode, TaskSpec, locate
from holdfast.extras import require
from holdfast.guard.runner import GuardRunner
from holdfast.identity import check_worker_id, new_identity
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
from holdfast.upkeep.lost_leases import HasStarted, LostLeases
from holdfast.upkeep.relay_service import run_relay
from holdfast.worker.announcer import run_announcer
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.host_parts import HostParts
from holdfast.worker.id_keeper import IdKeeper
from holdfast.worker.in_flight import Drain, InFlight, Run, StopReason
from holdfast.worker.isolated_processes import IsolatedCommand, IsolatedProcesses
from holdfast.worker.recycling import RecycleLimits, WorkerExit
from holdfast.worker.renewer import LeaseListener, Renewer
from holdfast.worker.runner import CANCEL_GRACE_S, Runner
from holdfast.worker.settler import Settler
from holdfast.worker.suspects import IdleIsolation, SuspectFetcher
from holdfast.worker.unknown_jobs import UnknownJobs

if TYPE_CHECKING:
    from holdfast.worker.webhook_worker import WebhookWorker

_log: Final = logging.getLogger("holdfast.worker")

_HOUSEKEEPING_S: Final = 1.0


class WorkerBackend(Protocol):
    """The parts of an app's backend that a worker uses."""

    @property
    def settings(self) -> Settings: ...
    @property
    def specs(self) -> Mapping[str, TaskSpec]: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def ledger(self) -> Ledger | None: ...
    @property
    def outbox(self) -> OutboxOpener | None: ...
    def guard_runner(self, ledger: Ledger | None) -> GuardRunner | None: ...
    def announcements(self) -> Sequence[AnnouncedTask]: ...
    async def open(self) -> None: ...


class Worker(LeaseListener):
    """Runs jobs of some queues until it is drained."""

    def __init__(
        self,
        app: BackendOwner[WorkerBackend],
        queues: Sequence[str] = (DEFAULT_QUEUE,),
        concurrency: int | None = None,
        upkeep: bool = True,
        name: str | None = None,
        *,
        worker_id: str | None = None,
        max_jobs: int | None = None,
        max_rss: int | None = None,
        cancel_grace_s: float = CANCEL_GRACE_S,
        isolated_command: IsolatedCommand | None = None,
        on_cleared: Callable[[], None] | None = None,
        has_started: HasStarted | None = None,
    ) -> None:
        """`max_jobs` and `max_rss` (bytes) recycle the process: the worker drains itself at either limit.

        Jobs that may have ended their worker run in processes that `isolated_command` starts; without it, in this
        worker while it is idle. With `on_cleared` this is such a process: it runs only those, one at a time, ends when
        there are none, and calls `on_cleared` before that if its job has run for a lease.
        `has_started` says which jobs of a lost worker may have begun; by default, what is known about this host.

        `worker_id` is a stable identity: a worker that starts again with it takes over the leases of its last start at
        once. An earlier start that still runs stops, and its `run` returns `WorkerExit.REPLACED`.

        Raises `MissingExtra` if its upkeep is to send webhooks and no HTTP client is installed.
        """
        if isinstance(queues, str) or not queues or not all(queues):
            raise InvalidOption(f"a worker needs a list of queue names, not {queues!r}")
        backend = backend_of(app)
        if upkeep and backend.settings.delivers:
            require("sending webhooks", "httpcore")
        self._app = app
        self._backend = backend
        self._queues = tuple(dict.fromkeys(queues))
        self._concurrency = _require_concurrency(backend.settings.concurrency if concurrency is None else concurrency)
        self._upkeep = upkeep
        self._limits = RecycleLimits(max_jobs, max_rss)
        self._cancel_grace_s = cancel_grace_s
        self._isolated_command = isolated_command
        self._on_cleared = on_cleared
        self._has_started = has_started
        self._worker_id = None if worker_id is None else check_worker_id(worker_id)
        self._name = name or worker_id or ""
        #: Its name in the engine, logs and histories. Set by `run`, since a worker may be built before a fork.
        self.incarnation = ""
        self._controls: dict[str, QueueControl] = {}
        self._in_flight: InFlight = set()
        self._draining = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._ended = WorkerExit.DRAINED
        self._started_before = 0
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._fetcher: Fetcher | None = None
        self._promoter: Promoter | None = None
        self._host: HostParts | None = None

    # Public interface ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the fetch loop ticked recently and the engine answered.

        False before the start and while draining.
        """
        return self._fetcher is not None and not self._draining.is_set() and self._fetcher.ready

    @property
    def status(self) -> str:
        """`starting`, `ok`, `down` (engine unreachable, or fetch loop stuck) or `draining`."""
        if self._draining.is_set():
            return DRAINING
        if self._fetcher is None:
            return STARTING
        return OK if self._fetcher.ready else STARTING if self._fetcher.is_new else DOWN

    @property
    def counters(self) -> Counters:
        """The engine's counters of this process."""
        return self._backend.engine.counters if self._engine is None else self._engine.counters

    @property
    def running(self) -> int:
        """Jobs whose code runs at this moment."""
        return 0 if self._runner is None else self._runner.running

    @property
    def in_flight(self) -> int:
        """Leases of this worker: waiting, running, or with a verdict that is not settled yet."""
        return len(self._in_flight)

    @property
    def suspects(self) -> int:
        """Jobs of lost workers that must run alone, as far as this worker knows."""
        return 0 if self._fetcher is None else self._fetcher.suspects

    @property
    def finished(self) -> int:
        """Jobs whose code has run, or that could not be run by any worker."""
        return 0 if self._runner is None else self._runner.finished

    @property
    def concurrency(self) -> int:
        """Limit of concurrent jobs: the lowest that an operator set for workers of a queue, else the worker's own."""
        limits = [each.worker_concurrency for each in self._controls.values() if each.worker_concurrency is not None]
        return max(1, min(limits)) if limits else self._concurrency

    def set_concurrency(self, concurrency: int) -> None:
        """Change the number of concurrent jobs; what an operator set for a queue has precedence."""
        self._concurrency = _require_concurrency(concurrency)
        self._apply_concurrency()

    def drain(self) -> None:
        """Claim nothing more, finish, end. A second call stops running jobs without waiting for them."""
        if self._draining.is_set():
            self._stop_now.set()
        self._draining.set()

    async def run(self) -> WorkerExit:
        """Work until drained; returns why the worker ended.

        If cancelled, it first drains without waiting for running jobs.
        """
        self._check_locations()
        self.incarnation = new_identity(self._name)
        try:
            if not await self._connect():
                return self._ended
            return await self._work()
        finally:
            self._fetcher = None
            if self._host is not None:
                self._host.close()

    # From start to drained ---------------------------------------------------------------------------

    def _check_locations(self) -> None:
        for spec in self._backend.specs.values():
            if spec.mode is ExecutionMode.PROCESS:
                locate(spec)

    async def _connect(self) -> bool:
        """Open the engine, retrying until it answers; False if drained before that."""
        backoff = Backoff()
        while not self._draining.is_set():
            try:
                await self._backend.open()
            except EngineUnavailable as exc:
                _log.error("cannot reach the engine, retrying: %s", exc)
                await _wait(self._draining, backoff.next_s())
            else:
                self._engine = self._backend.engine
                return True
        return False

    async def _work(self) -> WorkerExit:
        assert self._engine is not None
        engine = self._engine
        self._announce()
        ledger_tasks = self._ledger_tasks(engine)
        if ledger_tasks is not None:
            await ledger_tasks.prepare()
        host = self._host = HostParts.create(
            engine,
            self._backend.settings,
            self.incarnation,
            self._queues,
            self._reclaim_soon,
            isolated_command=self._isolated_command,
            isolated=self._on_cleared is not None,
        )
        if host.neighbours is not None:
            # Before the first claim, so that a restarted worker reclaims the jobs of its predecessor at once.
            await host.neighbours.run_once()
        id_keeper = await self._take_id(engine)
        relay = AsyncExitStack()
        await relay.enter_async_context(
            run_relay(self._app, enabled=self._upkeep and self._backend.settings.outbox_relay)
        )
        settler = Settler(engine, self._in_flight)
        runner = self._runner = Runner(
            self._backend.specs,
            settler,
            self._in_flight,
            self.concurrency,
            tools=self._tools(engine),
            guards=self._backend.guard_runner(self._backend.ledger),
            tracer=tracer_for(self._backend.settings.tracing),
            cancel_grace_s=self._cancel_grace_s,
            in_memory=self._backend.settings.in_memory,
            unknown=UnknownJobs(engine, self._backend.settings.unknown_task_grace_s),
            record=host.record,
        )
        lost = LostLeases(engine, self.incarnation, self._has_started or host.has_started)
        fetcher = self._fetcher = self._build_fetcher(lost, runner, host.processes)
        renewer = Renewer(
            engine.clone(),
            self._queues,
            self._in_flight,
            self._backend.settings.heartbeat_interval_s,
            self,
            id_keeper,
        )
        renewer.start()
        fetching = asyncio.create_task(fetcher.run())
        on_announced = ledger_tasks.copy_announcements if ledger_tasks is not None else lambda: None
        announcing = run_announcer(engine, self._backend.announcements(), on_announced)
        helpers = [asyncio.create_task(each) for each in (self._housekeep(), announcing)]
        helpers += self._start_upkeep(engine)
        if host.neighbours is not None:
            helpers.append(asyncio.create_task(host.neighbours.run()))
        if ledger_tasks is not None:
            ledger_tasks.start()
        webhooks = self._start_webhook_worker(engine)

        async def end() -> None:
            ending = Drain(self._in_flight, self._backend.settings, self._stop_now, self._cancel_grace_s)
            # In reverse order, and each even if another raises: a renewer that is not stopped would keep the leases of
            # these jobs for as long as the process runs.
            async with AsyncExitStack() as last:
                last.push_async_callback(ending.deregister, engine, self.incarnation, self._queues)
                if host.processes is not None:
                    last.push_async_callback(host.processes.stop, self._stop_now)
                    host.processes.drain()
                last.push_async_callback(runner.close)
                last.push_async_callback(renewer.stop)
                if ledger_tasks is not None:
                    # Late, so that verdicts settled during the drain can still reach the ledger.
                    last.push_async_callback(ledger_tasks.stop)
                if webhooks is not None:
                    webhooks.drain()
                    last.push_async_callback(webhooks.stop, self._stop_now)
                last.push_async_callback(relay.aclose)
                await _end([fetching, *helpers])
                await ending.finish(runner, fetcher, settler)

        try:
            await self._draining.wait()
        except asyncio.CancelledError:
            self._stop_now.set()
            raise
        finally:
            self._draining.set()
            await self._wait_drained(asyncio.create_task(end()))
        return self._ended

    def _build_fetcher(self, lost: LostLeases, runner: Runner, processes: IsolatedProcesses | None) -> Fetcher:
        assert self._engine is not None
        settings = self._backend.settings
        common = (self._engine, self.incarnation, self._queues, runner, self._in_flight, settings, lost)
        if self._on_cleared is not None:
            self._engine.skip_first_wait()
            return SuspectFetcher(*common, on_cleared=self._on_cleared, on_end=self.drain)
        isolation = processes or IdleIsolation(settings.visibility_timeout_s)
        return Fetcher(*common, isolation, quota=self._limits.max_jobs)

    def _reclaim_soon(self) -> None:
        if self._fetcher is not None:
            self._fetcher.reclaim_soon()

    async def _take_id(self, engine: Engine) -> IdKeeper | None:
        """Take the worker's id before the first reclaim; if that fails, the renewer tries again."""
        if self._worker_id is None:
            return None
        id_keeper = IdKeeper(self._worker_id, self.incarnation, self._queues)
        try:
            await id_keeper.keep(engine)
        except EngineUnavailable as exc:
            _log.info("cannot take the worker's id, retrying: %s", exc)
        return id_keeper

    def _announce(self) -> None:
        facts = {
            "incarnation": self.incarnation,
            "engine": redact(self._backend.settings.url),
            "queues": list(self._queues),
            "tasks": sorted(self._backend.specs),
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
            return self._backend.ledger

        async def find(queue: str, job_id: str) -> JobInfo | None:
            return (await engine.get(queue, [job_id]))[0]

        def now_ms() -> int:
            assert self._runner is not None
            return self._runner.now_ms()

        settings = self._backend.settings
        return EffectRuntime(
            ledger,
            find,
            now_ms,
            engine.counters,
            lease_s=settings.visibility_timeout_s,
            payload_limit=settings.payload_limit,
        )

    async def _wait_drained(self, ending: asyncio.Task[None]) -> None:
        """Wait for the drain. If cancelled meanwhile, stop now, and raise the cancellation afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as exc:
                self._stop_now.set()
                cancelled = exc
        if cancelled is None:
            ending.result()
            return
        if not ending.cancelled() and (failure := ending.exception()) is not None:
            _log.error("worker did not drain cleanly", exc_info=failure)
        raise cancelled

    def _start_upkeep(self, engine: Engine) -> list[asyncio.Task[None]]:
        if not self._upkeep:
            return []
        queues = QueueSelection(engine, self._queues)
        self._promoter = Promoter(engine, queues)
        # All queues, not only this worker's: a queue without a worker may grow as well.
        monitor = BacklogMonitor(engine, QueueSelection(engine, ()), self._backend.settings, self._backend.ledger)
        loops = (self._promoter.run(), EnginePruner(engine, queues).run(), monitor.run())
        return [asyncio.create_task(loop) for loop in loops]

    def _ledger_tasks(self, engine: Engine) -> LedgerTasks | None:
        ledger = self._backend.ledger
        if ledger is None or not self._upkeep:
            return None
        settings = self._backend.settings
        # All queues, not only this worker's: there may be no other process for the rest.
        return LedgerTasks(engine, ledger, settings, name=self.incarnation, project=settings.projector)

    def _start_webhook_worker(self, engine: Engine) -> WebhookWorker | None:
        if self._backend.ledger is None or not self._upkeep or not self._backend.settings.webhooks_enabled:
            return None
        # Imported here: that module imports this one.
        from holdfast.worker.webhook_worker import WebhookWorker

        webhooks = WebhookWorker(engine, self._backend.settings)
        webhooks.start()
        return webhooks

    async def _housekeep(self) -> None:
        while (reached := self._limits.find_reached(self.finished)) is None:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._release_prefetched()
        _log.info("worker reached its limit, draining for a restart: %s", reached)
        self._ended = reached
        self.drain()

    def _release_prefetched(self) -> None:
        """Release prefetched jobs if none has started for a second: other workers may be free."""
        if self._runner is None or self._fetcher is None:
            return
        if self._runner.queued and self._runner.started == self._started_before:
            self._fetcher.stop_prefetching()
            released = self._runner.release_queued("released: the worker is busy")
            _log.info("released %d prefetched jobs", released)
        self._started_before = self._runner.started

    # Callbacks of the renewer ----------------------------------------------------------------------

    def on_leases_lost(self, leases: Sequence[Lease]) -> None:
        """End the runs of lost leases, without a verdict."""
        runs = self._runs(leases)
        # Counted here: the engine cannot distinguish a lost lease from one that was just settled.
        self.counters.leases_lost += len(runs)
        for run in runs:
            _log.warning(
                "the lease on job %s is lost; its run is stopped", run.claim.job_id, extra=log_fields(run.claim)
            )
        self._lose(runs)

    def on_cancelled(self, leases: Sequence[Lease]) -> None:
        """End the runs of jobs that an operator moved."""
        runs = self._runs(leases)
        for run in runs:
            _log.info(
                "job %s was moved by an operator; its run is stopped",
                run.claim.job_id,
                extra=log_fields(run.claim),
            )
        self._lose(runs)

    def on_control_changed(self, queue: str, control: QueueControl) -> None:
        """Apply what an operator set for a queue."""
        self._controls[queue] = control
        self._apply_concurrency()

    def on_due(self, queue: str, at_ms: int) -> None:
        """Wake the promoter for a delayed job."""
        if self._promoter is not None:
            self._promoter.due(queue, at_ms)

    def on_replaced(self, successor: str) -> None:
        """Stop now: code must not run twice. Jobs whose leases are not reclaimed yet are released, under the fence."""
        if self._ended is WorkerExit.REPLACED:
            return
        _log.error(
            "another process has worker id %s: %s has replaced %s, which stops now; give each worker its own id",
            self._worker_id,
            successor,
            self.incarnation,
            extra={"worker_id": self._worker_id, "incarnation": self.incarnation, "successor": successor},
        )
        self._ended = WorkerExit.REPLACED
        self._stop_now.set()
        self.drain()

    def _runs(self, leases: Sequence[Lease]) -> list[Run]:
        gone = set(leases)
        return [run for run in self._in_flight if run.claim.lease in gone and run.settlement is None]

    def _lose(self, runs: Sequence[Run]) -> None:
        if self._runner is not None:
            for run in runs:
                self._runner.stop(run, StopReason.LOST)

    def _apply_concurrency(self) -> None:
        if self._runner is not None and self._runner.concurrency != self.concurrency:
            _log.info("concurrency is now %d", self.concurrency)
            self._runner.set_concurrency(self.concurrency)


def _require_concurrency(concurrency: int) -> int:
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
            _log.error("a part of the worker failed", exc_info=ending)
