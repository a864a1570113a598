"""Renew leases and receive notices, in a thread with its own event loop and engine.

A task that blocks the worker's loop for longer than a lease does not lose its lease while the process runs
(requirement Q4). Between renewals the thread listens for cancellations, changed controls and due jobs. It passes what
it receives to the worker's loop, and also watches that loop (`loop_watch`).
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
from holdfast.worker.id_keeper import IdKeeper
from holdfast.worker.in_flight import InFlight
from holdfast.worker.loop_watch import LoopWatch

_log: Final = logging.getLogger("holdfast.worker")

#: Longest wait for notices; a cancellation whose notice was missed is detected at the next beat.
_LISTEN_S: Final = 5.0
#: While a part of the store is unreachable, its leases are retried after this.
_RETRY_S: Final = 0.5
#: Longest backoff after an outage.
_MAX_BACKOFF_S: Final = 2.0


class LeaseListener(Protocol):
    """Callbacks of the renewer, called on the worker's event loop."""

    def on_leases_lost(self, leases: Sequence[Lease]) -> None:
        """Called with leases that were lost."""
        ...

    def on_cancelled(self, leases: Sequence[Lease]) -> None:
        """Called with leases whose jobs an operator moved."""
        ...

    def on_control_changed(self, queue: str, control: QueueControl) -> None:
        """Called with the controls of a queue at the start and after every change."""
        ...

    def on_due(self, queue: str, at_ms: int) -> None:
        """Called with the due time of a delayed job."""
        ...

    def on_replaced(self, successor: str) -> None:
        """Called at every heartbeat while a later start of a worker has this worker's id."""
        ...


class Renewer:
    """The renewing thread. `start`, then `stop`, both from the worker's loop."""

    def __init__(
        self,
        engine: Engine,
        queues: Sequence[str],
        in_flight: InFlight,
        interval_s: float,
        listener: LeaseListener,
        id_keeper: IdKeeper | None = None,
    ) -> None:
        self._engine = engine
        self._queues = tuple(queues)
        self._in_flight = in_flight
        self._interval_s = interval_s
        self._listener = listener
        self._id_keeper = id_keeper
        self._home = asyncio.get_running_loop()
        self._thread = LoopThread("holdfast-renewer", self._live)
        self._watch = LoopWatch(in_flight)
        self._opened = False
        self._beat_at = 0.0
        #: When each run was first found running, or its last heartbeat was recorded.
        self._alive_since: dict[Lease, float] = {}
        #: Queues whose controls have not been read yet.
        self._unread: set[str] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread and wait for it."""
        await self._thread.stop()

    # In the renewer's own thread -------------------------------------------------------------------

    async def _live(self) -> None:
        # Shorter than the wait of reclaimers after an outage, which is one interval.
        backoff = Backoff(cap_s=min(_MAX_BACKOFF_S, self._interval_s / 4))
        watching = asyncio.create_task(self._watch.run())
        try:
            while not self._thread.stopping:
                try:
                    await self._renew_and_listen(backoff)
                except EngineUnavailable as exc:
                    _log.info("cannot renew leases, retrying: %s", exc)
                except Exception:  # noqa: BLE001 - top of a loop
                    _log.exception("renewing failed unexpectedly, retrying")
                await asyncio.sleep(backoff.next_s())
        finally:
            watching.cancel()
            await self._engine.close()

    async def _renew_and_listen(self, backoff: Backoff) -> None:
        if not self._opened:
            await self._engine.open()
            self._opened = True
        # Immediately: the outage may have used up most of the lease.
        await self._beat()
        # Notices may have been missed.
        self._unread.update(self._queues)
        await self._read_controls()
        while not self._thread.stopping:
            wait_s = min(_LISTEN_S, max(0.0, self._beat_at - time.monotonic()))
            for notice in await self._engine.listen(self._queues, round(wait_s * 1000)):
                await self._on_notice(notice)
            backoff.reset()
            if time.monotonic() >= self._beat_at:
                await self._beat()
                await self._read_controls()

    async def _beat(self) -> None:
        now = time.monotonic()
        self._beat_at = now + self._interval_s
        in_flight = self._in_flight.copy()
        running = [run.claim.lease for run in in_flight if run.begun and not run.judged]
        since = {lease: self._alive_since.get(lease, now) for lease in running}
        # One heartbeat event per interval; runs shorter than an interval leave none.
        heartbeats = {lease for lease, instant in since.items() if now - instant >= self._interval_s}
        lost = await self._renew((run.claim.lease for run in in_flight), heartbeats)
        self._alive_since = since | dict.fromkeys(heartbeats, now)
        self._engine.counters.heartbeats += len(heartbeats.difference(lost))
        if lost:
            self._notify(self._listener.on_leases_lost, lost)
        if self._id_keeper is not None:
            await self._keep_id(self._id_keeper)

    async def _keep_id(self, id_keeper: IdKeeper) -> None:
        try:
            successor = await id_keeper.keep(self._engine)
        except EngineUnavailable as exc:
            _log.info("cannot keep the worker's id, retrying: %s", exc)
            self._beat_at = min(self._beat_at, time.monotonic() + _RETRY_S)
        else:
            if successor:
                self._notify(self._listener.on_replaced, successor)

    async def _renew(self, leases: Iterable[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        left, lost = list(leases), list[Lease]()
        for start in range(0, len(left), MAX_BATCH):
            try:
                lost += await self._engine.renew(left[start : start + MAX_BATCH], heartbeats)
            except PartialFailure as exc:
                lost += exc.completed
                self._beat_at = min(self._beat_at, time.monotonic() + _RETRY_S)
        return lost

    async def _on_notice(self, notice: Notice) -> None:
        match notice:
            case CancelledNotice(queue=queue, job_id=job_id):
                await self._check(queue, job_id)
            case ControlNotice(queue=queue):
                await self._read_control(queue)
            case DueNotice(queue=queue, at_ms=at_ms):
                self._notify(self._listener.on_due, queue, at_ms)
            case _:
                assert_never(notice)

    async def _check(self, queue: str, job_id: str) -> None:
        """Renew the leases of the job, to find those that are lost.

        The notice may be late, and the job already claimed here again.
        """
        leases = [run.claim.lease for run in self._in_flight.copy()]
        lost = await self._renew(lease for lease in leases if lease.job_id == job_id and lease.queue == queue)
        if lost:
            self._notify(self._listener.on_cancelled, lost)

    async def _read_controls(self) -> None:
        """Read the controls that are not known yet. Raises if no queue answers."""
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
        self._notify(self._listener.on_control_changed, queue, await self._engine.get_control(queue))

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._home.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            _log.debug("the worker's loop is closed")
