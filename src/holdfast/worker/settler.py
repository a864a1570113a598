"""Send verdicts to the engine in batches, and count how long runs took.

A verdict is sent at the next iteration of the loop while fewer than two calls are in progress, otherwise when one of
them returns: alone at low load, in hundreds at high load, and never delayed to fill a batch. Nothing is dropped while
the engine is unreachable: settlements are fenced and repeatable, so they are sent until answered. Verdicts for an
unreachable part of the store are kept apart and do not delay others. A verdict that the engine refuses repeatedly is
separated from its batch, and its lease expires.

Durations are counted once the engine has applied the verdicts, so that the numbers of runs and of results agree.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from holdfast.core.job import MAX_BATCH
from holdfast.core.retry import Backoff
from holdfast.core.verdict import TARGETS, DeadLetter, RetryLater, Settlement, SettleResult, Succeed
from holdfast.engine.port import PartialFailure
from holdfast.engine.port.jobs import JobPort
from holdfast.errors import EngineRefused, EngineUnavailable
from holdfast.observe.counters import Counters
from holdfast.observe.logs import log_fields
from holdfast.worker.in_flight import InFlight, Run

#: Runs that were released, held or suspended are not counted: they have no result yet.
_FIELDS: Final[dict[type, str]] = {Succeed: "run_succeeded", RetryLater: "run_retried", DeadLetter: "run_dead"}


def record_durations(counts: Counters, runs: Sequence[Run], answers: Sequence[SettleResult]) -> None:
    """Count the durations of settled runs. On the hot path: one short loop per batch."""
    durations: dict[type, list[float]] = {verdict: [] for verdict in TARGETS}
    for run, answer in zip(runs, answers, strict=True):
        if answer is SettleResult.APPLIED and run.settlement is not None:
            durations[type(run.settlement.verdict)].append(run.took_s)
        if run.trace is not None:
            run.trace.end_settle(answer)
    for verdict, field in _FIELDS.items():
        if durations[verdict]:
            getattr(counts, field).add(durations[verdict])


_log: Final = logging.getLogger("holdfast.worker")

#: Concurrent calls. Two keep the store busy while the next batch forms.
_MAX_CALLS: Final = 2
#: Longest time between two attempts to send deferred verdicts, apart from jitter.
_MAX_DEFERRAL_S: Final = 0.5
#: A batch is split after this many refusals in a row.
_MAX_REFUSALS: Final = 3


class Settler:
    """Collects verdicts and sends them. Runs on one event loop."""

    def __init__(self, engine: JobPort, in_flight: InFlight) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Run] = []
        self._calls: set[asyncio.Task[None]] = set()
        #: Verdicts for an unreachable part of the store, and the task that sends them.
        self._deferred: list[Run] = []
        self._late_call: asyncio.Task[None] | None = None
        self._scheduled = False

    @property
    def pending(self) -> int:
        """Verdicts that wait for a call, without those being sent."""
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether every verdict is answered."""
        return not (self._waiting or self._calls or self._late_call)

    def put(self, run: Run, settlement: Settlement) -> None:
        """Queue the verdict on a run. Returns immediately."""
        run.settlement = settlement
        self._waiting.append(run)
        if not self._scheduled and len(self._calls) < _MAX_CALLS:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is answered; False if the timeout passes first."""
        deadline = self._loop.time() + timeout_s
        while not self.is_settled:
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                return False
            if calls := self._calls | ({self._late_call} if self._late_call else set()):
                await asyncio.wait(calls, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)
        return True

    def abandon(self) -> int:
        """Stop sending; returns how many verdicts were not answered.

        Their leases expire, and the jobs run again.
        """
        for call in self._calls:
            call.cancel()
        if self._late_call is not None:
            self._late_call.cancel()
        return sum(run.settlement is not None for run in self._in_flight)

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_CALLS:
            batch = self._waiting[:MAX_BATCH]
            del self._waiting[:MAX_BATCH]
            call = self._loop.create_task(self._send(batch))
            self._calls.add(call)
            call.add_done_callback(self._on_sent)

    def _on_sent(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            if (exc := call.exception()) is not None:
                _log.error("settling failed unexpectedly", exc_info=exc)
            self._flush()

    async def _send(self, runs: list[Run]) -> None:
        settlements = [run.settlement for run in runs if run.settlement is not None]
        try:
            answers = await self._settle_with_retry(settlements)
        except PartialFailure as exc:
            self._defer(self._process_partial(runs, exc), exc)
            return
        except Exception:  # noqa: BLE001 - one bad verdict must not stop the others
            if len(runs) > 1:
                # One of them is the cause: settle each separately.
                for run in runs:
                    await self._send([run])
                return
            _log.exception(
                "cannot settle job %s; its lease will expire and it will run again",
                runs[0].claim.job_id,
            )
            self._in_flight.difference_update(runs)
            return
        self._record_answers(runs, answers)

    def _record_answers(self, runs: Sequence[Run], answers: Sequence[SettleResult]) -> None:
        self._in_flight.difference_update(runs)
        record_durations(self._engine.counters, runs, answers)
        self._log_stale([run.settlement for run in runs if run.settlement is not None], answers)

    def _process_partial(self, runs: Sequence[Run], partly: PartialFailure) -> list[Run]:
        """Process the answers of a partial failure; returns the runs without one."""
        pairs = [(run, answer) for run, answer in zip(runs, partly.completed, strict=True) if answer is not None]
        self._record_answers([run for run, _ in pairs], [answer for _, answer in pairs])
        return [run for run, answer in zip(runs, partly.completed, strict=True) if answer is None]

    def _defer(self, runs: list[Run], reason: EngineUnavailable) -> None:
        self._deferred += runs
        if self._late_call is None:
            _log.warning("%d verdicts wait for a part of the engine: %s", len(runs), reason)
            self._late_call = self._loop.create_task(self._send_late())
            self._late_call.add_done_callback(self._sent_late)

    async def _send_late(self) -> None:
        """Send deferred verdicts until all are answered. A refused batch goes back to `_send`."""
        backoff = Backoff(cap_s=_MAX_DEFERRAL_S)
        while self._deferred:
            await asyncio.sleep(backoff.next_s())
            batch = self._deferred[:MAX_BATCH]
            del self._deferred[:MAX_BATCH]
            settlements = [run.settlement for run in batch if run.settlement is not None]
            try:
                self._record_answers(batch, await self._engine.settle(settlements))
                backoff.reset()
            except PartialFailure as exc:
                # After the others: those may belong to another part of the store that answers.
                self._deferred += self._process_partial(batch, exc)
            except Exception:  # noqa: BLE001 - `_send` finds the cause
                self._waiting += batch
                self._flush()

    def _sent_late(self, call: asyncio.Task[None]) -> None:
        self._late_call = None
        if not call.cancelled() and (exc := call.exception()) is not None:
            _log.error("settling failed unexpectedly", exc_info=exc)

    async def _settle_with_retry(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        backoff: Backoff | None = None
        refusals = 0
        while True:
            try:
                return await self._engine.settle(settlements)
            except PartialFailure:
                raise
            except EngineUnavailable as exc:
                refusals = refusals + 1 if isinstance(exc, EngineRefused) else 0
                if refusals == _MAX_REFUSALS:
                    raise
                if backoff is None:
                    _log.warning("%d verdicts wait for the engine: %s", len(settlements), exc)
                    backoff = Backoff()
                await asyncio.sleep(backoff.next_s())

    def _log_stale(self, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
        for settlement, answer in zip(settlements, answers, strict=True):
            if answer is SettleResult.STALE:
                _log.warning(
                    "the verdict on job %s came too late: the lease was lost, nothing was changed",
                    settlement.claim.job_id,
                    extra=log_fields(settlement.claim),
                )
