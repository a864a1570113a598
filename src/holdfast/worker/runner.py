"""Run claimed jobs, up to `concurrency` at a time; the rest waits in a short queue.

    accept → (waiting) → start → user's code → outcome → judge → settler

Async functions are asyncio tasks on the loop, one each; plain functions run in threads, `process=True` in child
processes. A run is ended from outside (`stop`) when its timeout has passed, its lease is lost or the worker drains: an
async task is cancelled, a child is killed. A thread cannot be stopped: its verdict is given immediately, and its slot
stays taken until the function returns. Long functions should check `ctx.cancelled`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from random import Random
from time import perf_counter
from typing import Final, assert_never

from holdfast.aio import DaemonThreads
from holdfast.core.job import Claim
from holdfast.core.verdict import ApprovalNeeded, Deferred, Outcome, Raised, Settlement, Succeed, judge
from holdfast.effects.runtime import EffectRuntime
from holdfast.errors import Denied, NoLedger
from holdfast.execution.child_processes import ProcessPool
from holdfast.execution.context import Context
from holdfast.execution.invoke import (
    approval_impossible,
    failure_outcome,
    guard_failed,
    has_returned,
    invoke,
    invoke_sync,
    suspend_if_in_doubt,
    timed_out,
    to_denied,
    unknown_task,
)
from holdfast.execution.spec import ExecutionMode, TaskPolicy, TaskSpec
from holdfast.guard.runner import GuardRunner
from holdfast.neighbours.record import ProcessRecord
from holdfast.observe.logs import current_claim, log_fields
from holdfast.observe.tracing import Tracer
from holdfast.worker.failure_log import log_ending
from holdfast.worker.in_flight import InFlight, Run, StopReason
from holdfast.worker.settler import Settler
from holdfast.worker.unknown_jobs import UnknownJobs, is_invalid

_log: Final = logging.getLogger("holdfast.worker")

#: How long a cancelled coroutine may clean up before it is abandoned.
CANCEL_GRACE_S: Final = 5.0

_NOT_STARTED: Final = Deferred("not started: the worker drains")
_STOPPED: Final = Deferred("stopped: the worker drains", started=True)


def _do_nothing() -> None: ...


class Runner:
    """The runs of one worker. Runs on one event loop."""

    def __init__(
        self,
        specs: Mapping[str, TaskSpec],
        settler: Settler,
        in_flight: InFlight,
        concurrency: int,
        *,
        tools: EffectRuntime | None = None,
        guards: GuardRunner | None = None,
        tracer: Tracer | None = None,
        cancel_grace_s: float = CANCEL_GRACE_S,
        random: Random | None = None,
        in_memory: bool = False,
        unknown: UnknownJobs | None = None,
        record: ProcessRecord | None = None,
    ) -> None:
        """`unknown` decides about jobs that another worker may be able to run; None: they are dead-lettered.

        `record` has the jobs that have not started, for other processes after the death of this one.
        """
        self.concurrency = concurrency
        self.running = 0
        self.started = 0
        #: Jobs whose code has run, or that could not be run by any worker.
        self.finished = 0
        #: Called when `load` falls to `wake_at`.
        self.wake: Callable[[], None] = _do_nothing
        self.wake_at = -1
        self._specs = specs
        self._settler = settler
        self._in_flight = in_flight
        #: For effects and steps; None: tasks have neither.
        self._tools = tools
        #: Reviews claims that are not approved yet; None: there are no guards.
        self._guards = guards
        self._tracer = tracer
        self._unknown = unknown
        self._record = record
        self._cancel_grace_s = cancel_grace_s
        self._random = random or Random()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Run] = deque()
        self._draining = False
        self._offset_ms = 0
        # Runs without a lease whose code has not ended; the loop itself keeps only weak references.
        self._detached: set[Run] = set()
        self._unknown_spec = TaskSpec("", _do_nothing, TaskPolicy())
        self._threads = DaemonThreads("holdfast-job")
        self._children = ProcessPool(in_memory=in_memory)

    @property
    def load(self) -> int:
        """Jobs that have a slot or wait for one."""
        return self.running + len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no job has a slot or waits for one, and every verdict is settled."""
        return self.load == 0 and self._settler.is_settled

    @property
    def queued(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._waiting)

    def set_engine_time(self, engine_ms: int) -> None:
        """Set the engine's current time. Worker clocks drift, so verdicts carry the engine's time."""
        self._offset_ms = engine_ms - time.monotonic_ns() // 1_000_000

    def now_ms(self) -> int:
        """The engine's time, as estimated here."""
        return self._offset_ms + time.monotonic_ns() // 1_000_000

    # From claim to verdict --------------------------------------------------------------------------

    def accept(self, claims: Iterable[Claim]) -> None:
        """Start these jobs, or queue them until a slot is free."""
        added: list[str] = []
        for claim in claims:
            spec = self._specs.get(claim.task)
            run = Run(claim, spec or self._unknown_spec)
            self._in_flight.add(run)
            if spec is None:
                self._judge_unknown(run)
            elif self._draining:
                self._judge(run, _NOT_STARTED)
            elif self.running < self.concurrency:
                self._start(run)
            else:
                self._waiting.append(run)
                added.append(claim.job_id)
        if added:
            self._record_waiting(added)

    def _record_waiting(self, added: Sequence[str] = ()) -> None:
        """Record jobs that wait in addition, or all that wait now."""
        if self._record is None or (added and not self._detached and self._record.add_waiting(added)):
            return
        # A former run of the same job may still execute, without a lease.
        detached = {run.claim.job_id for run in self._detached}
        self._record.set_waiting([run.claim.job_id for run in self._waiting if run.claim.job_id not in detached])

    def _start_next(self) -> None:
        """Start the job that has waited longest. It is recorded before its code is called."""
        if self._record is not None:
            self._record.mark_started()
        self._start(self._waiting.popleft())

    def _judge_unknown(self, run: Run) -> None:
        claim, known = run.claim, tuple(self._specs)
        outcome = (
            unknown_task(claim.task, known) if self._unknown is None else self._unknown.judge_unknown(claim, known)
        )
        if isinstance(outcome, Raised):
            self.finished += 1
        self._judge(run, outcome)

    def set_concurrency(self, concurrency: int) -> None:
        """Change the number of concurrent jobs; running jobs continue."""
        self.concurrency = concurrency
        while self._waiting and self.running < self.concurrency:
            self._start_next()
        self.wake()

    def _start(self, run: Run) -> None:
        self.running += 1
        self.started += 1
        run.began_at = perf_counter()
        if self._tracer is not None:
            run.trace = self._tracer.start_run(run.claim)
        if self._guards is None or self._guards.is_approved(run.claim):
            self._begin(run)
        else:
            run.task = self._loop.create_task(self._review(run, self._guards))

    async def _review(self, run: Run, guards: GuardRunner) -> None:
        """Let the guards review a claim; begin the run if they allow it."""
        outcome: Outcome | None = None
        # From here on `stop` cancels this task, as it would the job's own.
        run.begun = True
        try:
            found = await guards.review_claim(run.claim, self.now_ms)
        except asyncio.CancelledError:
            outcome = _NOT_STARTED
        except GeneratorExit:
            self._free(run)
            raise
        except Exception as exc:  # noqa: BLE001 - the user's code
            outcome = guard_failed(exc)
        else:
            if isinstance(found, Denied):
                outcome = to_denied(found)
            elif found is not None:
                outcome = ApprovalNeeded(found.reason, found)
        if outcome is None and run.stopped is not None:
            outcome = _NOT_STARTED
        run.begun, run.task = False, None
        if outcome is None:
            self._begin(run)
        else:
            self._finish(run, outcome)

    def _begin(self, run: Run) -> None:
        spec = run.spec
        if spec.context_name is not None:
            run.context = Context(run.claim, self._tools)
        mode = spec.mode
        if mode is ExecutionMode.LOOP:
            if spec.timeout_s is not None:
                self._arm(run)
            run.task = self._loop.create_task(self._run_on_loop(run))
        elif mode is ExecutionMode.THREAD:
            self._arm(run)
            run.begun = True
            self._threads.start(lambda: self._run_in_thread(run))
        else:
            run.task = self._loop.create_task(self._run_in_process(run))

    async def _run_on_loop(self, run: Run) -> None:
        if run.stopped is not None:
            self._finish(run, _NOT_STARTED)
            return
        run.begun = True
        # Set for this task only.
        current_claim.set(run.claim)
        if run.trace is not None:
            run.trace.enter()
        try:
            outcome = await invoke(run.spec, run.claim, run.context)
        except GeneratorExit:
            # Abandoned and already judged. A GeneratorExit that the user's code raises arrives as an outcome instead.
            self._free(run)
            raise
        self._finish(run, outcome)

    def _run_in_thread(self, run: Run) -> None:
        # The thread is reused: variables set here must not be visible to its next run.
        outcome = copy_context().run(self._perform_sync, run)
        try:
            self._loop.call_soon_threadsafe(self._finish, run, outcome)
        except RuntimeError:
            _log.warning("job %s: its thread ended after the worker; its outcome is lost", run.claim.job_id)

    @staticmethod
    def _perform_sync(run: Run) -> Outcome:
        current_claim.set(run.claim)
        if run.trace is not None:
            run.trace.enter()
        return invoke_sync(run.spec, run.claim, run.context)

    async def _run_in_process(self, run: Run) -> None:
        if run.stopped is not None:
            self._finish(run, _NOT_STARTED)
            return
        run.begun = True
        try:
            outcome = await self._children.perform(run.spec, run.claim, lambda: self._arm(run))
        except BaseException as exc:  # noqa: BLE001 - cancelled by `stop`, or no child could be started
            outcome = failure_outcome(exc, run.spec.policy)
        self._finish(run, outcome)

    def _finish(self, run: Run, outcome: Outcome) -> None:
        if not run.judged:
            if run.stopped is not None and not has_returned(outcome):
                outcome = _to_stopped(run, outcome)
            elif type(outcome) is Raised and self._unknown is not None and is_invalid(outcome):
                run.task = self._loop.create_task(self._finish_invalid(run, outcome, self._unknown))
                return
            self._judge(run, outcome)
        self._free(run)

    async def _finish_invalid(self, run: Run, refusal: Raised, unknown: UnknownJobs) -> None:
        """End a run whose payload does not fit: its code was not called."""
        if run.timer is not None:
            run.timer.cancel()
        try:
            outcome = await unknown.judge_invalid(run.claim, run.spec, refusal)
        except asyncio.CancelledError:
            outcome = _NOT_STARTED
        except GeneratorExit:
            self._free(run)
            raise
        if not run.judged:
            self._judge(run, outcome)
        self._free(run)

    def _judge(self, run: Run, outcome: Outcome) -> None:
        run.judged = True
        if run.began_at:
            run.took_s = perf_counter() - run.began_at
        policy = run.spec.policy
        if isinstance(outcome, ApprovalNeeded) and (self._guards is None or not self._guards.can_request_approval):
            outcome = approval_impossible(NoLedger("an approval"))
        verdict = judge(run.claim, outcome, policy.retry, policy.on_exhausted, self._random, self.now_ms)
        if run.context is not None:
            verdict = suspend_if_in_doubt(verdict, run.context._effects_in_doubt)
        if run.trace is not None:
            run.trace.end(verdict)
        self._settler.put(run, Settlement(run.claim, verdict, self.now_ms()))
        if type(verdict) is not Succeed:
            log_ending(run.claim, verdict, outcome)

    def _free(self, run: Run) -> None:
        """Free the slot, and start the next waiting run."""
        if run.ended:
            return
        run.ended = True
        self.running -= 1
        self.finished += 1
        if run.timer is not None:
            run.timer.cancel()
        if self._detached:
            self._detached.discard(run)
        if self._waiting and self.running < self.concurrency:
            self._start_next()
        if self.running + len(self._waiting) <= self.wake_at:
            self.wake()

    # Ending runs from outside -----------------------------------------------------------------------------

    def stop(self, run: Run, reason: StopReason) -> None:
        """End a run from outside.

        A lost run gets no verdict. A run in a thread gets its verdict immediately, others when their code has ended.
        """
        if run.ended or (run.stopped is not None and reason is not StopReason.LOST):
            return
        run.stopped = reason
        if run.context is not None:
            run.context._end()
        if reason is StopReason.LOST:
            self._lose(run)
        if run.task is not None:
            if run.begun:
                # A task cancelled before its first step would never free its slot; `stopped` ends such a run.
                run.task.cancel()
                self._loop.call_later(self._cancel_grace_s, self._abandon, run)
        elif run.begun and not run.judged:
            if reason is StopReason.TIMEOUT:
                _log_uninterrupted(run)
            self._judge(run, _to_stopped(run, _STOPPED))

    def release_queued(self, message: str) -> int:
        """Release runs that have not started; no attempt is used up (requirement S5)."""
        released = len(self._waiting)
        while self._waiting:
            self._judge(self._waiting.popleft(), Deferred(message))
        self._record_waiting()
        return released

    def stop_starting(self) -> None:
        """Start no further runs; release those that wait and those still to be accepted."""
        self._draining = True
        self.release_queued(_NOT_STARTED.message)

    def stop_all(self, reason: StopReason) -> None:
        """End all runs that have no verdict yet."""
        for run in [run for run in self._in_flight if not run.judged]:
            self.stop(run, reason)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every verdict is settled; False if the timeout passes first."""
        return await self._settler.flush(timeout_s)

    async def close(self) -> None:
        """End idle threads and child processes."""
        self._threads.close()
        await self._children.close()

    def _arm(self, run: Run) -> None:
        if run.spec.timeout_s is not None:
            run.timer = self._loop.call_later(run.spec.timeout_s, self.stop, run, StopReason.TIMEOUT)

    def _lose(self, run: Run) -> None:
        # A verdict that is being settled stays: the engine's answer to it decides.
        if run.settlement is not None:
            return
        run.judged = True
        if run.trace is not None:
            run.trace.abandon()
        self._in_flight.discard(run)
        if run in self._waiting:
            self._waiting.remove(run)
        else:
            self._detached.add(run)
        self._record_waiting()

    def _abandon(self, run: Run) -> None:
        """Judge a run that ignored its cancellation, and close its coroutine."""
        if run.ended or run.task is None:
            return
        _log.error("job %s ignored cancellation; abandoned", run.claim.job_id)
        if not run.judged:
            self._judge(run, _to_stopped(run, _STOPPED))
        task = run.task
        task.add_done_callback(_consume)
        try:
            task.get_coro().close()
        except RuntimeError as exc:
            _log.error("cannot abandon job %s, its slot stays taken: %s", run.claim.job_id, exc)
        task.cancel()


def _log_uninterrupted(run: Run) -> None:
    _log.warning(
        "the timeout of job %s (%s), %g s, has passed, but a thread cannot be interrupted: "
        "the function still runs and takes a slot; check ctx.cancelled in it, or use process=True",
        run.claim.job_id,
        run.claim.task,
        run.spec.timeout_s,
        extra=log_fields(run.claim),
    )


def _consume(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of an abandoned task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _to_stopped(run: Run, outcome: Outcome) -> Outcome:
    """The outcome of a run that was ended from outside, whatever it raised."""
    match run.stopped:
        case StopReason.TIMEOUT:
            return timed_out(run.spec.timeout_s or 0, outcome.error if isinstance(outcome, Raised) else None)
        case StopReason.DRAIN:
            return outcome if outcome is _NOT_STARTED else _STOPPED
        case StopReason.LOST | None:
            return outcome
        case _:
            assert_never(run.stopped)
