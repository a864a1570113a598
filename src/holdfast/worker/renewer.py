"""Keeps leases alive, from a thread with an event loop and an engine of its own.

A task that blocks the worker's loop for longer than a lease keeps it, as long as its process lives
(requirement Q4). In between it listens: an operator's cancellation, a change of controls, a job that
falls due. Everything it learns is handed over to the worker's loop. It also watches that loop (`loop_watch`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Protocol, assert_never

from holdfast.aio import LoopThread
from holdfast.core.job import MAX_BATCH, Lease
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine, PartialFailure
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import CancelledNotice, ControlNotice, DueNotice, Notice
from holdfast.errors import EngineUnavailable
from holdfast.worker.in_flight import InFlight
from holdfast.worker.loop_watch import LoopWatch

_log: Final = logging.getLogger("holdfast.worker")

#: A missed notice costs at most this long: the next beat tells the same.
_LISTEN_S: Final = 5.0
#: While a part of the store is away, its leases are tried again this soon.
_AGAIN_S: Final = 0.5


class LeaseListener(Protocol):
    """Who wants to know. Called on the worker's event loop."""

    def on_leases_lost(self, leases: Sequence[Lease]) -> None:
        """These leases are someone else's now."""
        ...

    def on_cancelled(self, leases: Sequence[Lease]) -> None:
        """These were taken away by an operator."""
        ...

    def on_control_changed(self, queue: str, control: QueueControl) -> None:
        """The controls of a queue, at the start and after every change."""
        ...

    def on_due(self, queue: str, at_ms: int) -> None:
        """A job waits that is due at that time."""
        ...


class Renewer:
    """A thread that beats. `start`, then `stop`; both from the worker's loop."""

    def __init__(
        self, engine: Engine, queues: Sequence[str], held: InFlight, interval_s: float, listener: LeaseListener
    ) -> None:
        self._engine = engine
        self._queues = tuple(queues)
        self._held = held
        self._interval_s = interval_s
        self._listener = listener
        self._home = asyncio.get_running_loop()
        self._thread = LoopThread("holdfast-renewer", self._live)
        self._watch = LoopWatch(held)
        self._opened = False
        self._beat_at = 0.0
        #: Since when each run is known to run, or when it left its last heartbeat.
        self._alive_since: dict[Lease, float] = {}
        #: Queues whose controls have not been read yet.
        self._unread: set[str] = set()

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, and wait for it."""
        await self._thread.stop()

    # From here on: the renewer's own thread ----------------------------------------------------------

    async def _live(self) -> None:
        backoff = Backoff()
        watching = asyncio.create_task(self._watch.run())
        try:
            while not self._thread.stopping:
                try:
                    await self._connected(backoff)
                except EngineUnavailable as exc:
                    _log.info("leases cannot be renewed, trying again: %s", exc)
                except Exception:  # noqa: BLE001 - top of a loop
                    _log.exception("renewing failed in an unexpected way, trying again")
                await asyncio.sleep(backoff.next_s())
        finally:
            watching.cancel()
            await self._engine.close()

    async def _connected(self, backoff: Backoff) -> None:
        if not self._opened:
            await self._engine.open()
            self._opened = True
        # At once: whatever kept us away may have taken most of the lease.
        await self._beat()
        # Notices may have been missed.
        self._unread.update(self._queues)
        await self._read_controls()
        while not self._thread.stopping:
            wait_s = min(_LISTEN_S, max(0.0, self._beat_at - time.monotonic()))
            for notice in await self._engine.listen(self._queues, round(wait_s * 1000)):
                await self._hear(notice)
            backoff.reset()
            if time.monotonic() >= self._beat_at:
                await self._beat()
                await self._read_controls()

    async def _beat(self) -> None:
        now = time.monotonic()
        self._beat_at = now + self._interval_s
        held = self._held.copy()
        running = [run.claim.lease for run in held if run.begun and not run.judged]
        since = {lease: self._alive_since.get(lease, now) for lease in running}
        # Told once an interval: short jobs leave none, long ones one at each beat but their first.
        told = {lease for lease, instant in since.items() if now - instant >= self._interval_s}
        lost = await self._renew((run.claim.lease for run in held), told)
        self._alive_since = since | dict.fromkeys(told, now)
        self._engine.counts.heartbeats += len(told.difference(lost))
        if lost:
            self._tell(self._listener.on_leases_lost, lost)

    async def _renew(self, leases: Iterable[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        left, lost = list(leases), list[Lease]()
        for start in range(0, len(left), MAX_BATCH):
            try:
                lost += await self._engine.renew(left[start : start + MAX_BATCH], heartbeats)
            except PartialFailure as exc:
                lost += exc.completed
                self._beat_at = min(self._beat_at, time.monotonic() + _AGAIN_S)
        return lost

    async def _hear(self, notice: Notice) -> None:
        match notice:
            case CancelledNotice(queue=queue, job_id=job_id):
                await self._check(queue, job_id)
            case ControlNotice(queue=queue):
                await self._read_control(queue)
            case DueNotice(queue=queue, at_ms=at_ms):
                self._tell(self._listener.on_due, queue, at_ms)
            case _:
                assert_never(notice)

    async def _check(self, queue: str, job_id: str) -> None:
        """A notice is a hint: it may be late, and the job with us again. The lease itself decides."""
        leases = [run.claim.lease for run in self._held.copy()]
        lost = await self._renew(lease for lease in leases if lease.job_id == job_id and lease.queue == queue)
        if lost:
            self._tell(self._listener.on_cancelled, lost)

    async def _read_controls(self) -> None:
        """Of the queues whose controls are not known yet. Raises if none answers."""
        failure: EngineUnavailable | None = None
        unread = len(self._unread)
        for queue in sorted(self._unread):
            try:
                await self._read_control(queue)
                self._unread.discard(queue)
            except EngineUnavailable as exc:
                failure = exc
        if failure is not None and len(self._unread) == len(self._queues) == unread:
            raise failure

    async def _read_control(self, queue: str) -> None:
        self._tell(self._listener.on_control_changed, queue, await self._engine.get_control(queue))

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            self._home.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            _log.debug("the worker's loop is closed")
