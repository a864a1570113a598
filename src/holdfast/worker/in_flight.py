"""`Run`, one attempt in a worker from claim to settle result, and `Drain`, how a worker ends.

A drain releases what has not started, lets the rest finish, settles everything and deregisters the worker. It ends
whatever the engine does meanwhile: a verdict that cannot be delivered is abandoned, and its lease expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from holdfast.core.job import Claim
from holdfast.core.verdict import Settlement
from holdfast.engine.port import Engine
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

    #: It had its time.
    TIMEOUT = auto()
    #: The lease is someone else's now, or the job was cancelled: whatever it returns counts for nothing.
    LOST = auto()
    #: The worker ends, and its grace time is over.
    DRAIN = auto()


class Run:
    """A claim and where it stands. Compared by identity: one worker may meet the same job twice."""

    __slots__ = (
        "began_at",
        "begun",
        "claim",
        "context",
        "ended",
        "judged",
        "plan",
        "settlement",
        "stopped",
        "task",
        "timer",
        "took_s",
        "trace",
    )

    def __init__(self, claim: Claim, plan: TaskSpec) -> None:
        self.claim = claim
        self.plan = plan
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.settlement: Settlement | None = None
        #: When it got its slot, by `perf_counter` (0: it never did), and how long it took from there to its verdict.
        self.began_at = 0.0
        self.took_s = 0.0
        #: Its span, where runs are traced.
        self.trace: RunTrace | None = None
        #: The user's code has been called.
        self.begun = False
        self.stopped: StopReason | None = None
        #: Its verdict is given, or it will get none.
        self.judged = False
        #: The user's code is out of the way; the slot is free.
        self.ended = False


#: Runs whose lease this worker holds: waiting, running, or with a verdict on its way. Changed only on the
#: worker's event loop; the renewer copies it from its own thread.
InFlight = set[Run]


_log: Final = logging.getLogger("holdfast.worker")

_LOOK_S: Final = 0.01
#: How long a worker in a hurry waits for a store that is away.
_LAST_WORD_S: Final = 5.0
#: What a run that was cancelled may take beyond its grace time.
_MARGIN_S: Final = 1.0


class Drain:
    """The drain of one worker, once nothing fetches any more."""

    def __init__(self, held: InFlight, settings: Settings, hurry: asyncio.Event, cancel_grace_s: float) -> None:
        self._held = held
        self._settings = settings
        self._hurry = hurry
        self._cancel_grace_s = cancel_grace_s

    async def finish(self, runner: Runner, fetcher: Fetcher, settler: Settler) -> None:
        """Returns when every lease in hand is settled, or cannot be."""
        runner.stop_starting()
        await self._give_back_lost(fetcher)
        await self._until_judged(self._settings.drain_grace_s, self._hurry)
        runner.stop_all(StopReason.DRAIN)
        await self._until_judged(self._cancel_grace_s + _MARGIN_S, None)
        if not await self._until_settled(settler):
            _log.error("%d verdicts were not answered; their jobs will run again", settler.abandon())

    async def deregister(self, engine: Engine, worker: str, queues: Sequence[str]) -> None:
        """Tell the engine that this worker will not come back."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await engine.deregister_worker(worker, queues)
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("the worker could not take leave of the engine: %s", exc)

    async def _give_back_lost(self, fetcher: Fetcher) -> None:
        # The claim that was cut off may have been answered: those leases are ours, and must not wait to run out.
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await fetcher.recover_claims()
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("claims on their way are left to run out: %s", exc)
        except Exception:  # noqa: BLE001 - what is in hand must be ended all the same
            _log.exception("giving back claims on their way failed in an unexpected way; they are left to run out")

    async def _until_judged(self, seconds: float, cut_short: asyncio.Event | None) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while any(not run.judged for run in self._held):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or (cut_short is not None and cut_short.is_set()):
                return
            await asyncio.sleep(min(_LOOK_S, left_s))

    async def _until_settled(self, settler: Settler) -> bool:
        now = asyncio.get_running_loop().time
        # After a lease's time others run these jobs anyway.
        deadline = now() + self._settings.visibility_timeout_s + _LAST_WORD_S
        hurries = False
        while not await settler.flush(_LOOK_S):
            if self._hurry.is_set() and not hurries:
                hurries = True
                deadline = min(deadline, now() + _LAST_WORD_S)
            if now() >= deadline:
                return False
        return True
