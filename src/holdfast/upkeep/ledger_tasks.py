"""Background tasks that keep a ledger in step with its engine, and its retention (requirement L5).

`LedgerTasks` starts and stops them for workers and `holdfast upkeep`: projector, reconciler, pruner, the copy of
announced tasks, and the loops of `upkeep.dispatch`. Any number of processes may run them: one projects a feed at a
time, the others are on standby.

`ProjectorThread` runs the projector in its own thread, with its own event loop, engine and ledger: a large batch takes
a few hundred milliseconds of CPU, for which tasks on the worker's loop would otherwise wait.

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
from holdfast.upkeep.announcements import AnnouncementCopier
from holdfast.upkeep.dispatch import ApprovalDelivery, ReplaySubmission, WebhookDispatcher
from holdfast.upkeep.loop import run_forever
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler
from holdfast.webhooks.deliveries import QUEUE

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import PruneCursors


_projector_log: Final = logging.getLogger("holdfast.projector")


class ProjectorThread:
    """The projector's thread: `start`, then `stop`, both from one event loop.

    It opens and closes `engine` and `ledger`, which are clones for its use only.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        on_fork: Callable[[str], None] | None = None,
    ) -> None:
        """`on_fork` is called on the creating event loop, with the queue of a feed that has forked."""
        self._engine = engine
        self._ledger = ledger
        self._home = asyncio.get_running_loop()
        self._on_fork = on_fork
        self.projector = Projector(engine, ledger, queues, name=name, on_fork=self._notify_fork)
        self._thread = LoopThread("holdfast-projector", self._live, loop_factory())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Release the feeds, end the thread, and wait for it."""
        await self._thread.stop()

    # In the projector's own thread ----------------------------------------------------------------

    async def _live(self) -> None:
        try:
            if await self._connect():
                await self.projector.run()
        finally:
            await self._engine.close()
            await self._ledger.close()

    async def _connect(self) -> bool:
        """Open the engine, retrying until it answers; the ledger connects when it is first needed."""
        backoff = Backoff()
        while not self._thread.stopping:
            try:
                await self._engine.open()
                return True
            except Unavailable as exc:
                _projector_log.info("projector cannot reach the engine, retrying: %s", exc)
            except HoldfastError:
                _projector_log.exception("projector cannot use this engine")
                return False
            await asyncio.sleep(backoff.next_s())
        return False

    def _notify_fork(self, queue: str) -> None:
        if self._on_fork is None:
            return
        try:
            self._home.call_soon_threadsafe(self._on_fork, queue)
        except RuntimeError:
            _projector_log.debug("the worker's loop is closed")


_log: Final = logging.getLogger("holdfast.upkeep")

#: Rows of one transaction, about 50 ms of work.
BATCH: Final = 4_000
#: Pause between batches while there is more: this multiple of the batch's duration, and at least this long.
_BATCH_PAUSE_FACTOR: Final = 2.0
_MIN_BATCH_PAUSE_S: Final = 0.02
#: Pause after the last batch, and if there was nothing to prune; at most this share of the retention.
_DONE_PAUSE_S: Final = 30.0
_IDLE_PAUSE_S: Final = 300.0
_RETENTION_SHARE: Final = 0.1
#: Expired jobs that were kept (for an open dead letter, for example) are checked again after this long.
_RESTART_S: Final = 6 * 3_600.0
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
        self._cursors: PruneCursors = {}
        self._restart_at = 0.0
        self._random = random or Random()

    async def run(self) -> None:
        """Repeat `run_once` until cancelled."""
        await run_forever("ledger pruner", self.run_once)

    async def run_once(self) -> float:
        """Prune one batch; returns the seconds to pause."""
        if self._monotonic() >= self._restart_at:
            self._cursors = {}
            self._restart_at = self._monotonic() + _RESTART_S
        began = self._monotonic()
        try:
            pruned = await self._ledger.prune(self._keep_ms, BATCH, self._cursors)
        except LedgerUnavailable as exc:
            _log.warning("ledger unreachable, pruning is delayed: %s", exc)
            pruned = 0
        # A batch may be a little short, because a job's rows are deleted together.
        if pruned >= BATCH // 2:
            return max(_MIN_BATCH_PAUSE_S, _BATCH_PAUSE_FACTOR * (self._monotonic() - began))
        pause_s = min(_DONE_PAUSE_S if pruned else _IDLE_PAUSE_S, max(1.0, self._keep_ms / 1_000 * _RETENTION_SHARE))
        return pause_s * self._random.uniform(0.8, 1.2)


class LedgerTasks:
    """All tasks of one ledger: `start`, then `stop`, on one event loop.

    The caller owns engine and ledger; the projector uses clones.
    """

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
        """No `queues`: all that the engine has. `project`: also run a projector."""
        self._ledger = ledger
        self._pruner = LedgerPruner(ledger, settings)
        self._replays = ReplaySubmission(engine, ledger)
        self._approvals = ApprovalDelivery(engine, ledger)
        self._webhooks = WebhookDispatcher(engine, ledger, settings) if settings.webhooks_enabled else None
        if queues and settings.webhooks_enabled:
            # Webhook deliveries are jobs as well.
            queues = (*queues, QUEUE)
        self._reconciler: Reconciler | None = None
        self._projector_thread: ProjectorThread | None = None
        # In embedded mode there is nothing to project or to restore: engine and ledger are one file.
        separate = ledger.projection is not None
        self._announcements = AnnouncementCopier(engine, ledger) if separate else None
        if separate and settings.reconcile_interval_s:
            self._reconciler = Reconciler(engine, ledger, queues, interval_s=settings.reconcile_interval_s)
        if separate and project:
            self._projector_thread = ProjectorThread(
                engine.clone(), ledger.clone(), queues, name=name, on_fork=lambda _: self._wake()
            )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def projector(self) -> Projector | None:
        """The projector of this process, for its counts."""
        return self._projector_thread.projector if self._projector_thread else None

    async def prepare(self) -> None:
        """Import what the ledger's operator tables need.

        In embedded mode SQLAlchemy may not be loaded yet; loading it while jobs run would delay them for a second.
        """
        await asyncio.to_thread(lambda: self._ledger.operators)

    def start(self) -> None:
        """Start all tasks."""
        if self._projector_thread is not None:
            self._projector_thread.start()
        self._tasks.append(asyncio.create_task(self._pruner.run()))
        self._tasks.append(asyncio.create_task(self._run_dispatch()))
        if self._reconciler is not None:
            self._tasks.append(asyncio.create_task(self._reconciler.run()))
        if self._announcements is not None:
            self._tasks.append(asyncio.create_task(self._announcements.run()))

    def copy_announcements(self) -> None:
        """Copy announced tasks into the ledger now."""
        if self._announcements is not None:
            self._announcements.wake()

    async def stop(self) -> None:
        """End all tasks and release the feeds, so that another process can continue immediately."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._projector_thread is not None:
            await self._projector_thread.stop()

    async def _run_dispatch(self) -> None:
        """Run the loops of `upkeep.dispatch`."""
        loops = [self._replays.run(), self._approvals.run()]
        if self._webhooks is not None:
            loops.append(self._webhooks.run())
        await asyncio.gather(*loops)

    def _wake(self) -> None:
        if self._reconciler is not None:
            self._reconciler.wake()
