"""Run one job in this process, as a worker would: claim, guards, renewal, verdict, settle (H3).

For development and tests; disabled by default. Only the due time is ignored. A job that is not queued or retrying is
refused as an illegal move. A guard that denies the job or requires approval ends the run before the function is called,
and so does a lost lease. Every claimed job leaves an audit entry, whatever the outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Final
from uuid import uuid4

from holdfast.client.backend import Backend
from holdfast.core.job import Claim, Failure, JobInfo, Lease
from holdfast.core.principal import AuditEntry
from holdfast.core.states import State
from holdfast.core.verdict import (
    TASK_ERROR,
    TASK_FATAL,
    FailureKind,
    OnExhausted,
    Raised,
    Settlement,
    SettleResult,
    judge,
)
from holdfast.effects.runtime import EffectRuntime
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import StaleLease, UnknownJob
from holdfast.execution.spec import TaskPolicy
from holdfast.ledger.port.ledger import Ledger
from holdfast.worker.in_flight import InFlight, StopReason
from holdfast.worker.renewer import LeaseListener, Renewer
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from holdfast.worker.unknown_jobs import UnknownJobs

#: The dead letter of a failed job is recorded in the background; the response waits for it this long.
_RECORDED_MS: Final = 10_000
_POLL_S: Final = 0.01

_TRANSIENT: Final = Raised(
    FailureKind.RETRYABLE, Failure(TASK_ERROR, "transient failure requested by the caller", "TransientFail")
)
_FATAL: Final = Raised(
    FailureKind.FATAL, Failure(TASK_FATAL, "permanent failure requested by the caller", "ForcedFail")
)


class DebugRunner:
    """Runs single jobs of an app. One event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._random = Random()

    async def run(self, view: JobInfo, actor: str, *, force_fail: bool, transient_fail: bool) -> JobInfo:
        """Run one attempt and return the job.

        Raises `TransitionInvalid`, `UnknownJob` and `ConcurrencyLimited` as `engine.claim_job` does.
        """
        engine = self._backend.engine
        worker = f"http-{actor}-{uuid4().hex[:8]}"
        claim = await engine.claim_job(worker, view.queue, view.job_id)
        after: JobInfo | None = None
        try:
            if force_fail or transient_fail:
                await self._fail(engine, claim, _FATAL if force_fail else _TRANSIENT)
            else:
                await self._perform(engine, claim)
            after = await self._wait_for_change(engine, view)
        finally:
            # The job was claimed: clean up and record it whatever the outcome.
            try:
                await engine.deregister_worker(worker, [view.queue])
            finally:
                reason = "force_fail" if force_fail else "transient_fail" if transient_fail else ""
                await self._record_audit(view, after, actor, reason)
        return after

    async def _record_audit(self, view: JobInfo, after: JobInfo | None, actor: str, reason: str) -> None:
        if (ledger := self._backend.ledger) is None:
            return
        entry = AuditEntry(
            type="operator.run",
            actor=actor,
            tenant_id=view.tenant_id,
            target="job",
            target_id=view.job_id,
            queue=view.queue,
            reason=reason,
            before={"state": view.state},
            after={} if after is None else {"state": after.state},
        )
        await ledger.operators.record_audit([entry])

    async def _fail(self, engine: Engine, claim: Claim, outcome: Raised) -> None:
        spec = self._backend.specs.get(claim.task)
        policy = spec.policy if spec is not None else TaskPolicy()
        on_exhausted = OnExhausted.DEAD_LETTER if outcome is _FATAL else policy.on_exhausted
        now_ms = await engine.now_ms()
        verdict = judge(claim, outcome, policy.retry, on_exhausted, self._random, lambda: now_ms)
        (answer,) = await engine.settle([Settlement(claim, verdict, now_ms)])
        if answer is SettleResult.STALE:
            raise StaleLease(claim.job_id)

    async def _perform(self, engine: Engine, claim: Claim) -> None:
        """Run one claim with the components of a worker."""
        in_flight: InFlight = set()
        settler = Settler(engine, in_flight)
        settings = self._backend.settings
        offset_ms = await engine.now_ms() - time.monotonic_ns() // 1_000_000

        async def ledger() -> Ledger | None:
            return self._backend.ledger

        async def find(queue: str, job_id: str) -> JobInfo | None:
            return (await engine.get(queue, [job_id]))[0]

        tools = EffectRuntime(
            ledger,
            find,
            lambda: offset_ms + time.monotonic_ns() // 1_000_000,
            engine.counters,
            lease_s=settings.visibility_timeout_s,
            payload_limit=settings.payload_limit,
        )
        guards = self._backend.guard_runner(self._backend.ledger)
        unknown = UnknownJobs(engine, settings.unknown_task_grace_s)
        runner = Runner(self._backend.specs, settler, in_flight, 1, tools=tools, guards=guards, unknown=unknown)
        runner.set_engine_time(await engine.now_ms())
        interval_s = settings.heartbeat_interval_s
        renewer = Renewer(engine.clone(), [claim.queue], in_flight, interval_s, _RunListener(runner, in_flight))
        async with AsyncExitStack() as last:
            last.push_async_callback(runner.close)
            renewer.start()
            last.push_async_callback(renewer.stop)
            runner.accept([claim])
            # Neither the set nor the runner has an event to wait for, and there is only one job.
            while in_flight or runner.running:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def _wait_for_change(self, engine: Engine, view: JobInfo) -> JobInfo:
        (now,) = await engine.get(view.queue, [view.job_id])
        if now is not None and now.state in (State.DLQ_PENDING, State.DLQ_RECORDED):
            now = await engine.wait_final(view.queue, view.job_id, _RECORDED_MS)
        if now is None:
            raise UnknownJob(view.job_id)
        return now


class _RunListener(LeaseListener):
    """Stops the run when its lease is lost or the job is cancelled."""

    def __init__(self, runner: Runner, in_flight: InFlight) -> None:
        self._runner = runner
        self._in_flight = in_flight

    def on_leases_lost(self, leases: Sequence[Lease]) -> None:
        for run in [run for run in self._in_flight if run.claim.lease in leases and run.settlement is None]:
            self._runner.stop(run, StopReason.LOST)

    def on_cancelled(self, leases: Sequence[Lease]) -> None:
        self.on_leases_lost(leases)

    def on_control_changed(self, queue: str, control: QueueControl) -> None:
        """Ignored: a single run has no concurrency."""

    def on_due(self, queue: str, at_ms: int) -> None:
        """Ignored: this process does not promote jobs."""

    def on_replaced(self, successor: str) -> None:
        """Ignored: a single run has no worker id."""
