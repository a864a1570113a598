"""Upkeep in a process without a worker: promoter, reclaimer, pruner, and what keeps the ledger in step.

Any number of them may run at once, and beside workers: every step is atomic in the engine, there is no
leader and no lock. A worker does the same for its own queues unless told not to.
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
from holdfast.operations.readiness import DRAINING, OK, STARTING
from holdfast.settings import Settings
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.engine_tasks import EnginePruner, Promoter, Reclaimer
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.upkeep.loop import QueueSelection, run_forever

_log: Final = logging.getLogger("holdfast.upkeep")

_LISTEN_MS: Final = 5_000


class Upkeep:
    """Keeps some queues, or with none named all of them, until `stop`. Engine and ledger are the caller's."""

    def __init__(self, engine: Engine, queues: Sequence[str], settings: Settings, ledger: Ledger | None = None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._names = tuple(queues)
        self._queues = QueueSelection(engine, queues)
        self._settings = settings
        #: Its name in the engine. Made by `run`: upkeep may be built before a fork.
        self.incarnation = ""
        self._stopped = asyncio.Event()
        self._promoter: Promoter | None = None

    @property
    def status(self) -> str:
        """`starting`, `ok` or `draining`."""
        return DRAINING if self._stopped.is_set() else STARTING if self._promoter is None else OK

    def stop(self) -> None:
        """Let `run` return soon. Safe to call twice."""
        self._stopped.set()

    async def run(self) -> None:
        """Keep until stopped; no failure of the engine ends it."""
        self.incarnation = new_identity("upkeep")
        engine, queues = self._engine, self._queues
        promoter = self._promoter = Promoter(engine, queues)
        alarm = BacklogMonitor(engine, queues, self._settings, self._ledger)
        reclaimer = Reclaimer(engine, queues, self._settings, self.incarnation)
        loops = [promoter.run(), EnginePruner(engine, queues).run(), alarm.run(), run_forever("listener", self._listen)]
        if self._settings.reclaim:
            loops.append(reclaimer.run())
        tasks = [asyncio.create_task(loop) for loop in loops]
        bookkeeping = self._start_bookkeeping()
        try:
            await self._stopped.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if bookkeeping is not None:
                await bookkeeping.stop()
            await _leave(reclaimer)

    def _start_bookkeeping(self) -> LedgerTasks | None:
        if self._ledger is None:
            return None
        bookkeeping = LedgerTasks(self._engine, self._ledger, self._settings, self._names, name=self.incarnation)
        bookkeeping.start()
        return bookkeeping

    async def _listen(self) -> float:
        queues = await self._queues.names()
        if not queues:
            return 1.0
        for notice in await self._engine.listen(queues, _LISTEN_MS):
            if isinstance(notice, DueNotice) and self._promoter is not None:
                self._promoter.due(notice.at_ms)
        return 0.0


async def _leave(reclaimer: Reclaimer) -> None:
    try:
        await reclaimer.close()
    except EngineUnavailable as exc:
        _log.warning("upkeep could not take leave of the engine: %s", exc)
