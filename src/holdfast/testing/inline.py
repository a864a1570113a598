"""Running an app's jobs inside a test: at once (`inline`), or those that are due (`drain`).

    with inline(app):
        job = await publish.submit(article)      # has run when this returns
        assert await job.result() == "done"

    await drain(app)                             # a real worker, until nothing is due

Inline mode needs no store and reaches none: jobs, effects and steps are kept in memory and end with the block, webhooks
are not sent. Arguments and results go through the same codec, failures through the same classification and `judge`;
retries and delays happen at once, only a task's `timeout` is real time. `drain` runs on the app's own engine; with a
`ManualClock` and SQLite in memory, advance the clock and drain again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Final

import msgspec

from holdfast.app import Holdfast
from holdfast.clock import SystemClock
from holdfast.core.job import Claim, Envelope, JobView, Lease, Receipt
from holdfast.core.states import State, check_move
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Outcome,
    Release,
    RetryLater,
    Returned,
    Succeed,
    Suspend,
    Verdict,
    advance,
    answered,
    by_operator,
    judge,
)
from holdfast.effects.tools import Tools
from holdfast.engine.port import MAX_BATCH
from holdfast.errors import TransitionInvalid, UnknownJob, WaitTimeout
from holdfast.observe.counts import Counts
from holdfast.submitter import Desk
from holdfast.testing.effects import MemoryLedger
from holdfast.worker.classify import left_undecided, timed_out, unknown_task
from holdfast.worker.context import Context
from holdfast.worker.perform import perform, perform_sync
from holdfast.worker.plan import Mode, Plan, Policy
from holdfast.worker.runner import CANCEL_GRACE_S
from holdfast.worker.worker import Worker

_WORKER: Final = "inline"
_LOOK_S: Final = 0.002
_NOT_AT_ALL: Final = timedelta()


@contextmanager
def inline(app: Holdfast) -> Iterator[None]:
    """Inside the block, `submit` runs the job where it is submitted, to its end."""
    with app.run_inline(InlineDesk(app)):
        yield


async def drain(app: Holdfast, queues: Sequence[str] | None = None) -> int:
    """Run what is due, and what becomes due by it, until nothing is; returns how many runs that took."""
    await app.open()
    engine = app.engine
    names = list(queues) if queues is not None else await engine.queues()
    if not names:
        return 0
    worker = Worker(app, queues=names, upkeep=False)
    running = asyncio.create_task(worker.run())
    try:
        while not running.done():
            if await _is_idle(app, worker, names):
                break
            await asyncio.sleep(_LOOK_S)
    finally:
        worker.drain()
        await running
    return worker.finished


async def _is_idle(app: Holdfast, worker: Worker, queues: Sequence[str]) -> bool:
    """Whether nothing runs or is due. A run that ends meanwhile may leave a retry that is due at once."""
    finished = worker.finished
    if await _due(app, worker, queues) or (await app.engine.promote(queues, MAX_BATCH)).count:
        return False
    return not await _due(app, worker, queues) and worker.finished == finished


async def _due(app: Holdfast, worker: Worker, queues: Sequence[str]) -> int:
    """Jobs that run, or could run now."""
    due = worker.in_hand + (not worker.ready)
    for queue in queues:
        stats = await app.engine.stats(queue)
        if not stats.control.paused:
            due += max(0, stats.states.get(State.QUEUED, 0) - stats.delayed)
    # The engine is asked, too: what it has handed out just now may still be on its way to the worker.
    handed_out = sum(view.pending for view in await app.engine.workers(queues) if view.worker == worker.incarnation)
    return due + handed_out + worker.in_hand


class InlineDesk(Desk):
    """Runs jobs where they are handed in, and remembers how they ended."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._views: dict[tuple[str, str], JobView] = {}
        self._keys: dict[tuple[str, str, str], str] = {}
        self._clock = SystemClock()
        self._random = Random()
        #: What jobs have slept: nobody waits for it here.
        self._slept_ms = 0
        #: For effects and steps, by event loop: a blocking door has another one than the test.
        self._tools: dict[asyncio.AbstractEventLoop, Tools] = {}
        self._memory = MemoryLedger()
        self._counts = Counts()

    async def submit(self, envelope: Envelope) -> Receipt:
        gate = self._app.gate(None, can_ask=True)
        if gate.minds(envelope):
            envelope = await gate.admit(envelope)
        if envelope.idempotency_key:
            key = (envelope.tenant_id, envelope.queue, envelope.idempotency_key)
            first = self._keys.setdefault(key, envelope.job_id)
            if first != envelope.job_id:
                return Receipt(first, duplicate=True)
        self._keep(self._fresh(envelope))
        if not envelope.hold:
            await self._run(envelope.queue, envelope.job_id)
        return Receipt(envelope.job_id)

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        return [await self.submit(envelope) for envelope in envelopes]

    async def get(self, queue: str, job_id: str) -> JobView | None:
        return self._views.get((queue, job_id))

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        view = self._views.get((queue, job_id))
        if view is not None and view.finished_at_ms == 0:
            # Nobody will ever move it: waiting would hang the test.
            raise WaitTimeout(job_id, view.state, _NOT_AT_ALL)
        return view

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        view = self._views.get((queue, job_id))
        if view is None:
            raise UnknownJob(job_id)
        failure, meta = by_operator(State.CANCELLED, actor, reason), view.meta
        if view.state is State.WAITING_APPROVAL:
            meta = answered(meta, None)
        self._move(view, State.CANCELLED, meta=meta, failure=failure, finished_at_ms=self._clock.now_ms())

    def _fresh(self, envelope: Envelope) -> JobView:
        return JobView(
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
        """Attempt after attempt, without the waiting between."""
        while (view := self._views[queue, job_id]).state in (State.QUEUED, State.RETRYING):
            view = self._move(view, State.RUNNING, attempt=view.attempt + 1)
            claim = self._claim(view)
            plan = self._app.plans.get(claim.task)
            with_context = plan is not None and plan.context_name is not None
            context = Context(claim, self._own_tools()) if with_context else None
            outcome = await self._perform(claim, plan, context)
            policy = plan.policy if plan is not None else Policy()
            verdict = judge(claim, outcome, policy.retry, policy.on_exhausted, self._random, self._clock.now_ms)
            if context is not None:
                verdict = left_undecided(verdict, context.undecided)
            try:
                self._settle(self._views[queue, job_id], claim, verdict)
            except TransitionInvalid:
                # It cancelled itself in its own run.
                return

    async def _perform(self, claim: Claim, plan: Plan | None, context: Context | None) -> Outcome:
        if plan is None:
            return unknown_task(claim.task, tuple(self._app.plans))
        on_loop = plan.mode is Mode.LOOP
        work = perform(plan, claim, context) if on_loop else asyncio.to_thread(perform_sync, plan, claim, context)
        running = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([running], timeout=plan.timeout_s)
            if done:
                return running.result()
        except asyncio.CancelledError:
            # The test's own: its job ends with it.
            await self._end(running, context)
            raise
        late = await self._end(running, context)
        return late if isinstance(late, Returned) else timed_out(plan.timeout_s or 0)

    @staticmethod
    async def _end(running: asyncio.Future[Outcome], context: Context | None) -> Outcome | None:
        """End a run from outside. A thread cannot be stopped; nobody waits for it."""
        if context is not None:
            context.stop()
        running.cancel()
        await asyncio.wait([running], timeout=CANCEL_GRACE_S)
        return running.result() if running.done() and not running.cancelled() else None

    def _own_tools(self) -> Tools:
        loop = asyncio.get_running_loop()
        if loop not in self._tools:
            settings = self._app.settings
            self._tools[loop] = Tools(
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

    def _claim(self, view: JobView) -> Claim:
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

    def _settle(self, view: JobView, claim: Claim, verdict: Verdict) -> None:
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

    def _move(self, view: JobView, to: State, **changes: object) -> JobView:
        check_move(view.job_id, view.state, to)
        view = msgspec.structs.replace(view, state=to, **changes)
        self._keep(view)
        return view

    def _keep(self, view: JobView) -> None:
        self._views[view.queue, view.job_id] = view
