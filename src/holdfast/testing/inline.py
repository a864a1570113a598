"""Run an app's jobs inside a test: on submit (`inline`), or all due jobs (`drain`).

    with inline(app):
        job = await publish.submit(article)      # has run when this returns
        assert await job.result() == "done"

    await drain(app)                             # a real worker, until no job is due

Inline mode uses no store: jobs, effects and steps are kept in memory until the block ends, and webhooks are not sent.
Arguments and results use the same codec as in production, failures the same classification and `judge`. Retries and
delays take no time; only a task's `timeout` is real time.

`drain` runs a worker on the app's own engine. With SQLite in memory and a `ManualClock`, `advance` the clock and drain
again. `InMemoryWorker`, the fixture `holdfast_worker`, does both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Any, Final

import msgspec

from holdfast.app import Holdfast
from holdfast.client.backend import Backend
from holdfast.client.submitter import Submitter
from holdfast.clock import Clock, SystemClock, to_ms
from holdfast.core.fingerprint import is_key_reused
from holdfast.core.job import MAX_BATCH, Claim, Envelope, JobInfo, KeyReuse, Lease, Receipt
from holdfast.core.states import State, check_move
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Outcome,
    Release,
    RetryLater,
    Succeed,
    Suspend,
    Verdict,
    advance,
    judge,
    operator_failure,
    with_approval,
)
from holdfast.effects.runtime import EffectRuntime
from holdfast.errors import (
    IdempotencyKeyReused,
    InvalidOption,
    TransitionInvalid,
    UnknownJob,
    UsageError,
    WaitTimeout,
)
from holdfast.execution.backend import backend_of
from holdfast.execution.context import Context
from holdfast.execution.invoke import has_returned, invoke, invoke_sync, suspend_if_in_doubt, timed_out, unknown_task
from holdfast.execution.spec import ExecutionMode, TaskPolicy, TaskSpec
from holdfast.observe.counters import Counters
from holdfast.testing.effects import MemoryLedger
from holdfast.worker.runner import CANCEL_GRACE_S
from holdfast.worker.worker import Worker

#: 2024-01-01T00:00:00Z: an arbitrary instant, the same in every run.
START_MS: Final = 1_704_067_200_000


class ManualClock(Clock):
    """A clock that stands still until `advance` or `jump` is called. Safe to read from any thread."""

    def __init__(self, start_ms: int = START_MS) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by: timedelta | float) -> None:
        """Move the clock forward by a `timedelta` or a number of seconds."""
        span = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if span < timedelta():
            raise InvalidOption(f"advance({by!r}) would move time backwards; use `jump` to set an earlier time")
        self._now_ms += to_ms(span)

    def jump(self, to_ms: int) -> None:
        """Set the clock forward or back, as a faulty time server would."""
        self._now_ms = to_ms


_WORKER: Final = "inline"
_POLL_S: Final = 0.002
_NO_WAIT: Final = timedelta()


@contextmanager
def inline(app: Holdfast) -> Iterator[None]:
    """Inside the block, `submit` runs the job to its end before it returns."""
    backend = backend_of(app)
    with backend.run_inline(InlineSubmitter(backend)):
        yield


async def drain(app: Holdfast, queues: Sequence[str] | None = None) -> int:
    """Run due jobs, and those that become due meanwhile, until no job is due. Return the number of runs."""
    await app.open()
    engine = app.engine
    names = list(queues) if queues is not None else await engine.queues()
    if not names:
        return 0
    # No other worker is waited for: it would have to run in this process.
    engine.skip_first_wait()
    worker = Worker(app, queues=names, upkeep=False)
    running = asyncio.create_task(worker.run())
    try:
        while not running.done():
            if await _is_idle(app, worker, names):
                break
            await asyncio.sleep(_POLL_S)
    finally:
        worker.drain()
        await running
    return worker.finished


async def _is_idle(app: Holdfast, worker: Worker, queues: Sequence[str]) -> bool:
    """Whether no job runs or is due.

    A run that ends during the check may leave a retry that is due at once.
    """
    finished = worker.finished
    if await _due(app, worker, queues) or (await app.engine.promote(queues, MAX_BATCH)).count:
        return False
    return not await _due(app, worker, queues) and worker.finished == finished


async def _due(app: Holdfast, worker: Worker, queues: Sequence[str]) -> int:
    """Count jobs that run or could run now."""
    due = worker.in_flight + worker.suspects + (not worker.ready)
    for queue in queues:
        stats = await app.engine.stats(queue)
        if not stats.control.paused:
            due += max(0, stats.states.get(State.QUEUED, 0) - stats.delayed)
    # Ask the engine too: the reply with its latest claims may not have reached the worker.
    claimed = sum(view.pending for view in await app.engine.workers(queues) if view.worker == worker.incarnation)
    return due + claimed + worker.in_flight


class InlineSubmitter(Submitter):
    """Runs jobs on submit and keeps their final states in memory."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._views: dict[tuple[str, str], JobInfo] = {}
        #: By tenant, queue and key: the first job, and the fingerprint of its request.
        self._keys: dict[tuple[str, str, str], tuple[str, str]] = {}
        self._clock = SystemClock()
        self._random = Random()
        #: Total time that jobs have slept; inline mode does not wait for it.
        self._slept_ms = 0
        #: For effects and steps, by event loop: blocking calls run on another loop than the test.
        self._tools: dict[asyncio.AbstractEventLoop, EffectRuntime] = {}
        self._memory = MemoryLedger()
        self._counts = Counters()

    async def submit(self, envelope: Envelope) -> Receipt:
        guards = self._backend.guard_runner(None, can_request_approval=True)
        if guards.applies_to(envelope):
            envelope = await guards.review(envelope)
        if envelope.idempotency_key:
            key = (envelope.tenant_id, envelope.queue, envelope.idempotency_key)
            request = self._backend.fingerprint(envelope.task, envelope.payload)
            first, known = self._keys.setdefault(key, (envelope.job_id, request))
            if first != envelope.job_id:
                if is_key_reused(known, request) and envelope.on_key_reuse is KeyReuse.REFUSE:
                    raise IdempotencyKeyReused(envelope.queue, envelope.idempotency_key, first)
                return Receipt(first, duplicate=True)
        self._keep(self._fresh(envelope))
        if not envelope.hold:
            await self._run(envelope.queue, envelope.job_id)
        return Receipt(envelope.job_id)

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        return [await self.submit(envelope) for envelope in envelopes]

    async def get(self, queue: str, job_id: str) -> JobInfo | None:
        return self._views.get((queue, job_id))

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        view = self._views.get((queue, job_id))
        if view is not None and view.finished_at_ms == 0:
            # Inline mode does not continue an open job: waiting would hang the test.
            raise WaitTimeout(job_id, view.state, _NO_WAIT)
        return view

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        view = self._views.get((queue, job_id))
        if view is None:
            raise UnknownJob(job_id)
        failure, meta = operator_failure(State.CANCELLED, actor, reason), view.meta
        if view.state is State.WAITING_APPROVAL:
            meta = with_approval(meta, None)
        self._move(view, State.CANCELLED, meta=meta, failure=failure, finished_at_ms=self._clock.now_ms())

    def _fresh(self, envelope: Envelope) -> JobInfo:
        return JobInfo(
            job_id=envelope.job_id,
            task=envelope.task,
            queue=envelope.queue,
            tenant_id=envelope.tenant_id,
            state=State.WAITING_APPROVAL if envelope.hold else State.QUEUED,
            attempt=0,
            payload=envelope.payload,
            idempotency_key=envelope.idempotency_key or envelope.job_id,
            trace_id=envelope.trace_id,
            meta=envelope.meta,
            created_at_ms=self._clock.now_ms(),
        )

    async def _run(self, queue: str, job_id: str) -> None:
        """Run attempt after attempt, without waiting in between."""
        while (view := self._views[queue, job_id]).state in (State.QUEUED, State.RETRYING):
            view = self._move(view, State.RUNNING, attempt=view.attempt + 1)
            claim = self._claim(view)
            spec = self._backend.specs.get(claim.task)
            with_context = spec is not None and spec.context_name is not None
            context = Context(claim, self._own_tools()) if with_context else None
            outcome = await self._perform(claim, spec, context)
            policy = spec.policy if spec is not None else TaskPolicy()
            verdict = judge(claim, outcome, policy.retry, policy.on_exhausted, self._random, self._clock.now_ms)
            if context is not None:
                verdict = suspend_if_in_doubt(verdict, context._effects_in_doubt)
            try:
                self._settle(self._views[queue, job_id], claim, verdict)
            except TransitionInvalid:
                # The job was cancelled during its run.
                return

    async def _perform(self, claim: Claim, spec: TaskSpec | None, context: Context | None) -> Outcome:
        if spec is None:
            return unknown_task(claim.task, tuple(self._backend.specs))
        on_loop = spec.mode is ExecutionMode.LOOP
        work = invoke(spec, claim, context) if on_loop else asyncio.to_thread(invoke_sync, spec, claim, context)
        running = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([running], timeout=spec.timeout_s)
            if done:
                return running.result()
        except asyncio.CancelledError:
            # The test was cancelled: end its job too.
            await self._end(running, context)
            raise
        late = await self._end(running, context)
        return late if late is not None and has_returned(late) else timed_out(spec.timeout_s or 0)

    @staticmethod
    async def _end(running: asyncio.Future[Outcome], context: Context | None) -> Outcome | None:
        """End a run from outside. A thread cannot be stopped and is not waited for."""
        if context is not None:
            context._end()
        running.cancel()
        await asyncio.wait([running], timeout=CANCEL_GRACE_S)
        return running.result() if running.done() and not running.cancelled() else None

    def _own_tools(self) -> EffectRuntime:
        loop = asyncio.get_running_loop()
        if loop not in self._tools:
            settings = self._backend.settings
            self._tools[loop] = EffectRuntime(
                self._ledger,
                self.get,
                self._now_ms,
                self._counts,
                lease_s=settings.visibility_timeout_s,
                payload_limit=settings.payload_limit,
            )
        return self._tools[loop]

    async def _ledger(self) -> MemoryLedger:
        return self._memory

    def _now_ms(self) -> int:
        return self._clock.now_ms() + self._slept_ms

    def _claim(self, view: JobInfo) -> Claim:
        now_ms = self._now_ms()
        lease = Lease(view.queue, view.job_id, f"inline-{view.attempt}", 1, _WORKER)
        return Claim(
            lease,
            view.task,
            view.payload,
            view.tenant_id,
            view.idempotency_key,
            view.trace_id,
            view.attempt,
            view.created_at_ms,
            now_ms,
            view.meta,
        )

    def _settle(self, view: JobInfo, claim: Claim, verdict: Verdict) -> None:
        if isinstance(verdict, Release):
            self._slept_ms += verdict.delay_ms
        now_ms = self._now_ms()
        view = self._move(view, TARGETS[type(verdict)], meta=advance(claim, verdict, now_ms))
        match verdict:
            case Succeed(result=result):
                self._keep(msgspec.structs.replace(view, result=result, finished_at_ms=now_ms))
            case DeadLetter(failure=failure):
                for state in (State.DLQ_RECORDED, State.FAILED):
                    view = self._move(view, state, failure=failure)
                self._keep(msgspec.structs.replace(view, finished_at_ms=now_ms))
            case RetryLater(failure=failure) | Suspend(failure=failure):
                self._keep(msgspec.structs.replace(view, failure=failure))
            case _:
                pass

    def _move(self, view: JobInfo, to: State, **changes: object) -> JobInfo:
        check_move(view.job_id, view.state, to)
        view = msgspec.structs.replace(view, state=to, **changes)
        self._keep(view)
        return view

    def _keep(self, view: JobInfo) -> None:
        self._views[view.queue, view.job_id] = view


class InMemoryWorker:
    """The worker of the fixture `holdfast_worker`. Delivers no webhooks and publishes no events."""

    def __init__(self, app: Holdfast, clock: ManualClock) -> None:
        """Raise `UsageError` if the app is not in memory."""
        if not app.settings.in_memory:
            raise UsageError(
                f"the app uses {app.settings.url.partition('://')[0]}://…, not memory; return it from the fixture "
                "holdfast_base_app and use holdfast_app"
            )
        self.app = app
        self.clock = clock

    async def drain(self, queues: Sequence[str] | None = None) -> int:
        """Run due jobs, and those that become due meanwhile, until no job is due. Return the number of runs."""
        return await drain(self.app, queues)

    async def advance(self, by: timedelta | float, queues: Sequence[str] | None = None) -> int:
        """Advance the clock, then drain."""
        self.clock.advance(by)
        return await self.drain(queues)

    def drain_sync(self, queues: Sequence[str] | None = None) -> int:
        """Drain, in tests without an event loop."""
        return self._call(lambda: self.drain(queues), "drain")

    def advance_sync(self, by: timedelta | float, queues: Sequence[str] | None = None) -> int:
        """Advance the clock and drain, in tests without an event loop."""
        return self._call(lambda: self.advance(by, queues), "advance")

    def _call(self, make: Any, name: str) -> int:
        return int(backend_of(self.app).portal.call(f"{name}_sync", make, f"await holdfast_worker.{name}(…)"))
