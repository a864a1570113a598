"""The background tasks that keep a ledger in step with its engine, and its retention (requirement L5).

`LedgerTasks` starts and stops them for workers and `holdfast upkeep`: projector, reconciler, pruner, and the loops of
`upkeep.dispatch`. Any number of processes may run them: one projects a feed at a time, the others stand by.

`ProjectorThread` runs the projector in its own thread, with its own event loop, engine and ledger: a large batch takes
some hundred milliseconds of the interpreter, for which tasks on the worker's loop would otherwise wait.

`LedgerPruner` deletes finished jobs past their retention, in small batches. It pauses after each for twice as long as
the batch took, so that it keeps up with any rate of new jobs and uses at most a third of one connection's time. Any
number may prune at once: each takes rows that the others have not locked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from holdfast.aio import LoopThread
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import HoldfastError, LedgerUnavailable, Unavailable
from holdfast.extras import loop_factory
from holdfast.ledger.port.ledger import Ledger
from holdfast.settings import Settings
from holdfast.upkeep.dispatch import ApprovalDelivery, ReplaySubmission, WebhookDispatcher
from holdfast.upkeep.loop import run_forever
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler
from holdfast.webhooks.deliveries import QUEUE

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import PruneCursors


_projector_log: Final = logging.getLogger("holdfast.projector")


class ProjectorThread:
    """`start`, then `stop`, both from one event loop. `engine` and `ledger` are siblings made for it, not open yet."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        forked: Callable[[str], None] | None = None,
    ) -> None:
        """`forked` is called on the loop that makes this, with the queue of a feed that has forked."""
        self._engine = engine
        self._ledger = ledger
        self._home = asyncio.get_running_loop()
        self._forked = forked
        self.projector = Projector(engine, ledger, queues, name=name, forked=self._tell)
        self._thread = LoopThread("holdfast-projector", self._live, loop_factory())

    def start(self) -> None:
        """Begin to project."""
        self._thread.start()

    async def stop(self) -> None:
        """Give the feeds back, end the thread, and wait for it."""
        await self._thread.stop()

    # From here on: the projector's own thread --------------------------------------------------------

    async def _live(self) -> None:
        try:
            if await self._connect():
                await self.projector.run()
        finally:
            await self._engine.close()
            await self._ledger.close()

    async def _connect(self) -> bool:
        """Open the engine, however long that takes; the ledger connects when it is first needed."""
        backoff = Backoff()
        while not self._thread.stopping:
            try:
                await self._engine.open()
                return True
            except Unavailable as exc:
                _projector_log.info("the projector cannot reach the engine, trying again: %s", exc)
            except HoldfastError:
                _projector_log.exception("the projector cannot work with this engine")
                return False
            await asyncio.sleep(backoff.next_s())
        return False

    def _tell(self, queue: str) -> None:
        if self._forked is None:
            return
        try:
            self._home.call_soon_threadsafe(self._forked, queue)
        except RuntimeError:
            _projector_log.debug("the worker's loop is closed")


_log: Final = logging.getLogger("holdfast.upkeep")

#: Rows of one transaction, about 50 ms of work.
BATCH: Final = 4_000
#: Between two batches while there is more: so many times as long as the batch took, and at least …
_BREATHS: Final = 2.0
_BREATH_S: Final = 0.02
#: … after the last batch, and if there was nothing at all; but no longer than a tenth of what is kept.
_SOON_S: Final = 30.0
_PAUSE_S: Final = 300.0
_SHARE: Final = 0.1
#: Old jobs that were kept (for an open dead letter, say) are looked at again after this long.
_AFRESH_S: Final = 6 * 3_600.0
_DAY_MS: Final = 86_400_000


class LedgerPruner:
    """Prunes the ledger until cancelled."""

    def __init__(
        self,
        ledger: Ledger,
        settings: Settings,
        random: Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._keep_ms = round(settings.retention_days * _DAY_MS)
        self._monotonic = monotonic
        self._marks: PruneCursors = {}
        self._afresh_at = 0.0
        self._random = random or Random()

    async def run(self) -> None:
        """Prune, again and again."""
        await run_forever("archivist", self.run_once)

    async def run_once(self) -> float:
        """One batch; how long to pause."""
        if self._monotonic() >= self._afresh_at:
            self._marks = {}
            self._afresh_at = self._monotonic() + _AFRESH_S
        began = self._monotonic()
        try:
            gone = await self._ledger.prune(self._keep_ms, BATCH, self._marks)
        except LedgerUnavailable as exc:
            _log.warning("nothing was pruned, the ledger does not answer: %s", exc)
            gone = 0
        # A batch may be a little short, as a job's rows go together.
        if gone >= BATCH // 2:
            return max(_BREATH_S, _BREATHS * (self._monotonic() - began))
        pause_s = min(_SOON_S if gone else _PAUSE_S, max(1.0, self._keep_ms / 1_000 * _SHARE))
        return pause_s * self._random.uniform(0.8, 1.2)


class LedgerTasks:
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
        self._archivist = LedgerPruner(ledger, settings)
        self._replays = ReplaySubmission(engine, ledger)
        self._registrar = ApprovalDelivery(engine, ledger)
        self._courier = WebhookDispatcher(engine, ledger, settings) if settings.webhooks_enabled else None
        if queues and settings.webhooks_enabled:
            # Deliveries are jobs, too.
            queues = (*queues, QUEUE)
        self._reconciler: Reconciler | None = None
        self._projecting: ProjectorThread | None = None
        # Embedded there is nothing to bring over, and nothing that one could lose and the other have.
        apart = ledger.projection is not None
        if apart and settings.reconcile_interval_s:
            self._reconciler = Reconciler(engine, ledger, queues, interval_s=settings.reconcile_interval_s)
        if apart and project:
            self._projecting = ProjectorThread(
                engine.clone(), ledger.clone(), queues, name=name, forked=lambda _: self._wake()
            )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def projector(self) -> Projector | None:
        """The projector of this process, for its counts."""
        return self._projecting.projector if self._projecting else None

    async def prepare(self) -> None:
        """Load what people's part of the ledger needs: embedded, nobody may have needed SQLAlchemy yet, and a worker
        that loads it while its jobs run is slow for a second."""
        await asyncio.to_thread(lambda: self._ledger.operators)

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
