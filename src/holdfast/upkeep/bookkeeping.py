"""What keeps a ledger in step with its engine: projector, reconciler, archivist; and the courier, which tells
others what the ledger has learned. For workers and `holdfast upkeep`.

Any number of processes may run them: one projects a feed at a time, the others stand by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.engine.port import Engine
from holdfast.ledger.port import Ledger
from holdfast.settings import Settings
from holdfast.upkeep.approvals import Registrar
from holdfast.upkeep.archivist import Archivist
from holdfast.upkeep.courier import Courier
from holdfast.upkeep.projecting import Projecting
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler
from holdfast.upkeep.replays import Replays
from holdfast.webhooks.messages import QUEUE


class Bookkeeping:
    """`start`, then `stop`, on one event loop. Engine and ledger are the caller's; the projector has its own."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        settings: Settings,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        project: bool = True,
    ) -> None:
        """Without queues named: all that the engine has. `project`: bring the feed over, too."""
        self._ledger = ledger
        self._archivist = Archivist(ledger, settings)
        self._replays = Replays(engine, ledger)
        self._registrar = Registrar(engine, ledger)
        self._courier = Courier(engine, ledger, settings) if settings.tells else None
        if queues and settings.tells:
            # Deliveries are jobs, too.
            queues = (*queues, QUEUE)
        self._reconciler: Reconciler | None = None
        self._projecting: Projecting | None = None
        # Embedded there is nothing to bring over, and nothing that one could lose and the other have.
        apart = ledger.projection is not None
        if apart and settings.reconcile_interval_s:
            self._reconciler = Reconciler(engine, ledger, queues, interval_s=settings.reconcile_interval_s)
        if apart and project:
            self._projecting = Projecting(
                engine.sibling(), ledger.sibling(), queues, name=name, forked=lambda _: self._wake()
            )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def projector(self) -> Projector | None:
        """The projector of this process, for its counts."""
        return self._projecting.projector if self._projecting else None

    async def prepare(self) -> None:
        """Load what people's part of the ledger needs: embedded, nobody may have needed SQLAlchemy yet, and a worker
        that loads it while its jobs run is slow for a second."""
        await asyncio.to_thread(lambda: self._ledger.people)

    def start(self) -> None:
        """Begin."""
        if self._projecting is not None:
            self._projecting.start()
        self._tasks.append(asyncio.create_task(self._archivist.run()))
        self._tasks.append(asyncio.create_task(self._carry_on()))
        if self._reconciler is not None:
            self._tasks.append(asyncio.create_task(self._reconciler.run()))

    async def stop(self) -> None:
        """End all of it; feeds are given back, so that another process goes on at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._projecting is not None:
            await self._projecting.stop()

    async def _carry_on(self) -> None:
        """What people decided, and who is to be told."""
        loops = [self._replays.run(), self._registrar.run()]
        if self._courier is not None:
            loops.append(self._courier.run())
        await asyncio.gather(*loops)

    def _wake(self) -> None:
        if self._reconciler is not None:
            self._reconciler.wake()
