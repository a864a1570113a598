"""`Run`, one attempt in a worker from claim to settle result, and `Drain`, the shutdown of a worker.

A drain releases jobs that have not started, lets the rest finish, settles everything and deregisters the worker. It
ends even if the engine does not answer: a verdict that cannot be delivered is abandoned, and its lease expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from holdfast.core.job import Claim
from holdfast.core.verdict import Settlement
from holdfast.engine.port.jobs import JobPort
from holdfast.errors import EngineUnavailable
from holdfast.execution.context import Context
from holdfast.execution.spec import TaskSpec
from holdfast.observe.tracing import RunTrace
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.worker.fetcher import Fetcher
    from holdfast.worker.runner import Runner
    from holdfast.worker.settler import Settler


class StopReason(Enum):
    """Why a run is ended from outside."""

    #: Its timeout has passed.
    TIMEOUT = auto()
    #: The lease was lost, or the job was cancelled: its outcome is ignored.
    LOST = auto()
    #: The worker drains, and the grace time has passed.
    DRAIN = auto()


class Run:
    """A claim and its progress. Compared by identity: one worker may claim the same job twice."""

    __slots__ = (
        "began_at",
        "begun",
        "claim",
        "context",
        "ended",
        "judged",
        "settlement",
        "spec",
        "stopped",
        "task",
        "timer",
        "took_s",
        "trace",
    )

    def __init__(self, claim: Claim, spec: TaskSpec) -> None:
        self.claim = claim
        self.spec = spec
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.settlement: Settlement | None = None
        #: When it got its slot, by `perf_counter` (0: not yet), and the time from then to its verdict.
        self.began_at = 0.0
        self.took_s = 0.0
        #: Its span, if runs are traced.
        self.trace: RunTrace | None = None
        #: Whether the user's code has been called.
        self.begun = False
        self.stopped: StopReason | None = None
        #: Whether it has a verdict, or will not get one.
        self.judged = False
        #: Whether the user's code has ended and the slot is free.
        self.ended = False


#: Runs whose lease this worker has: waiting, running, or with a verdict that is not settled yet. Changed only on the
#: worker's event loop; the renewer copies it from its own thread.
InFlight = set[Run]


_log: Final = logging.getLogger("holdfast.worker")

_POLL_S: Final = 0.01
#: How long a stopping worker waits for an unreachable store.
_LAST_CALL_S: Final = 5.0
#: Added to the grace time of cancelled runs.
_MARGIN_S: Final = 1.0


class Drain:
    """The drain of one worker, after its fetcher has stopped."""

    def __init__(self, in_flight: InFlight, settings: Settings, stop_now: asyncio.Event, cancel_grace_s: float) -> None:
        self._in_flight = in_flight
        self._settings = settings
        self._stop_now = stop_now
        self._cancel_grace_s = cancel_grace_s

    async def finish(self, runner: Runner, fetcher: Fetcher, settler: Settler) -> None:
        """Settle every lease in flight; verdicts that cannot be delivered are abandoned."""
        runner.stop_starting()
        running = sum(not run.judged for run in self._in_flight)
        _log.info("draining: starting no more jobs, waiting up to %g s for %d", self._settings.drain_grace_s, running)
        await self._recover_claims(fetcher)
        await self._wait_judged(self._settings.drain_grace_s, self._stop_now)
        runner.stop_all(StopReason.DRAIN)
        await self._wait_judged(self._cancel_grace_s + _MARGIN_S, None)
        if not await self._wait_settled(settler):
            _log.error("%d verdicts were not settled; their jobs will run again", settler.abandon())

    async def deregister(self, engine: JobPort, worker: str, queues: Sequence[str]) -> None:
        """Deregister this worker from the engine; a failure is only logged."""
        try:
            async with asyncio.timeout(_LAST_CALL_S):
                await engine.deregister_worker(worker, queues)
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("worker not deregistered: %s", exc)

    async def _recover_claims(self, fetcher: Fetcher) -> None:
        # The interrupted claim may have leased jobs: release them now instead of letting their leases expire.
        try:
            async with asyncio.timeout(_LAST_CALL_S):
                await fetcher.recover_claims()
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("could not recover claims in flight, their leases will expire: %s", exc)
        except Exception:  # noqa: BLE001 - runs in flight must be ended all the same
            _log.exception("recovering claims in flight failed unexpectedly, their leases will expire")

    async def _wait_judged(self, seconds: float, stop_now: asyncio.Event | None) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while any(not run.judged for run in self._in_flight):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or (stop_now is not None and stop_now.is_set()):
                return
            await asyncio.sleep(min(_POLL_S, left_s))

    async def _wait_settled(self, settler: Settler) -> bool:
        now = asyncio.get_running_loop().time
        # When their leases have expired, other workers run these jobs anyway.
        deadline = now() + self._settings.visibility_timeout_s + _LAST_CALL_S
        shortened = False
        while not await settler.flush(_POLL_S):
            if self._stop_now.is_set() and not shortened:
                shortened = True
                deadline = min(deadline, now() + _LAST_CALL_S)
            if now() >= deadline:
                return False
        return True
