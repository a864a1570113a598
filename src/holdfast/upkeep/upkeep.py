"""Upkeep in a process without a worker: promoter, reclaimer, pruner, and the tasks of the ledger.

Any number of processes may run it at once, and alongside workers: every step is atomic in the engine, there is no
leader and no lock. A worker does the same for its own queues unless that is disabled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from holdfast.engine.port import Engine
from holdfast.engine.port.reads import DueNotice
from holdfast.errors import EngineUnavailable
from holdfast.identity import new_identity
from holdfast.ledger.port.ledger import Ledger
from holdfast.neighbours.watch import Neighbours
from holdfast.operations.readiness import DRAINING, OK, STARTING
from holdfast.settings import Settings
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.engine_tasks import EnginePruner, Promoter, Reclaimer
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.upkeep.loop import QueueSelection, run_forever
from holdfast.upkeep.lost_leases import HasStarted

_log: Final = logging.getLogger("holdfast.upkeep")

_LISTEN_MS: Final = 5_000


class Upkeep:
    """Upkeep of some queues, or of all if none are named, until `stop`.

    The caller owns engine and ledger.
    """

    def __init__(
        self,
        engine: Engine,
        queues: Sequence[str],
        settings: Settings,
        ledger: Ledger | None = None,
        has_started: HasStarted | None = None,
    ) -> None:
        """`has_started` says which jobs of a lost worker may have begun; by default, what is known on this host."""
        self._engine = engine
        self._ledger = ledger
        self._names = tuple(queues)
        self._queues = QueueSelection(engine, queues)
        self._settings = settings
        self._has_started = has_started
        #: Its name in the engine. Set by `run`, since upkeep may be built before a fork.
        self.incarnation = ""
        self._stopped = asyncio.Event()
        self._promoter: Promoter | None = None
        self._neighbours: Neighbours | None = None

    @property
    def status(self) -> str:
        """`starting`, `ok` or `draining`."""
        return DRAINING if self._stopped.is_set() else STARTING if self._promoter is None else OK

    def stop(self) -> None:
        """Make `run` return soon. Can be repeated."""
        self._stopped.set()

    async def run(self) -> None:
        """Run until stopped; no failure of the engine ends it."""
        self.incarnation = new_identity("upkeep")
        engine, queues = self._engine, self._queues
        promoter = self._promoter = Promoter(engine, queues)
        monitor = BacklogMonitor(engine, queues, self._settings, self._ledger)
        reclaimer = Reclaimer(engine, queues, self._settings, self.incarnation, self._may_have_started)
        loops = [
            promoter.run(),
            EnginePruner(engine, queues).run(),
            monitor.run(),
            run_forever("listener", self._listen),
        ]
        if self._settings.reclaim:
            loops.append(reclaimer.run())
        neighbours = self._neighbours = Neighbours.from_settings(engine, self._settings, reclaimer.reclaim_soon)
        if neighbours is not None:
            loops.append(neighbours.run())
        tasks = [asyncio.create_task(loop) for loop in loops]
        ledger_tasks = self._start_ledger_tasks()
        try:
            await self._stopped.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if ledger_tasks is not None:
                await ledger_tasks.stop()
            await _deregister(reclaimer)

    def _may_have_started(self, worker: str, job_id: str) -> bool:
        if self._has_started is not None:
            return self._has_started(worker, job_id)
        return self._neighbours is None or self._neighbours.has_started(worker, job_id)

    def _start_ledger_tasks(self) -> LedgerTasks | None:
        if self._ledger is None:
            return None
        ledger_tasks = LedgerTasks(self._engine, self._ledger, self._settings, self._names, name=self.incarnation)
        ledger_tasks.start()
        return ledger_tasks

    async def _listen(self) -> float:
        queues = await self._queues.names()
        if not queues:
            return 1.0
        for notice in await self._engine.listen(queues, _LISTEN_MS):
            if isinstance(notice, DueNotice) and self._promoter is not None:
                self._promoter.due(notice.queue, notice.at_ms)
        return 0.0


async def _deregister(reclaimer: Reclaimer) -> None:
    try:
        await reclaimer.close()
    except EngineUnavailable as exc:
        _log.warning("upkeep not deregistered: %s", exc)
