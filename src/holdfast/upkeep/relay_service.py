"""The outbox relay as a part of a process: built from settings, started and drained with the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.core.job import Envelope, Receipt
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import JobRefused
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.execution.backend import BackendOwner, backend_of
from holdfast.ledger.port.messages import OutboxOpener
from holdfast.ledger.reopen_intake import LedgerProbe, reopen_intake
from holdfast.outbox.destinations import build_destinations
from holdfast.outbox.relay import Relay
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.messages import OutboxStore


_log: Final = logging.getLogger("holdfast.outbox")

#: Added to the longest duration of a publication when the relay drains.
_GRACE_S: Final = 2.0


class RelayBackend(Protocol):
    """The parts of an app's backend that a relay uses."""

    @property
    def settings(self) -> Settings: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def ledger(self) -> Ledger | None: ...
    @property
    def outbox(self) -> OutboxOpener | None: ...


class RelayService:
    """The relay of one process, from `run` to `stop`. The app owns engine, ledger and outbox."""

    def __init__(self, app: BackendOwner[RelayBackend], outbox: OutboxOpener) -> None:
        """Raises `InvalidOption` for invalid targets."""
        backend = backend_of(app)
        self._settings = backend.settings
        self._outbox = outbox
        self._engine = backend.engine
        self._ledger = backend.ledger
        self._probe = LedgerProbe()
        self._destinations = build_destinations(backend.settings, self._submit)
        self._stopped = asyncio.Event()
        self._relay: Relay | None = None

    @property
    def destinations(self) -> list[str]:
        """Names of the destinations it publishes to."""
        return sorted(self._destinations)

    def stop(self) -> None:
        """Finish publications in flight, then end `run`. Can be repeated."""
        self._stopped.set()
        if self._relay is not None:
            self._relay.stop()

    async def run(self) -> None:
        """Relay until stopped; waits for an unreachable database.

        Raises `SchemaMismatch` if the tables are missing.
        """
        try:
            store = await self._open()
            if store is not None and not self._stopped.is_set():
                self._relay = Relay(store, self._destinations, self._settings, self._engine.counters)
                await self._relay.run()
        finally:
            await self._probe.close()

    async def _open(self) -> OutboxStore | None:
        backoff = Backoff()
        while not self._stopped.is_set():
            try:
                return await self._outbox.open()
            except LedgerUnavailable as exc:
                if not backoff.failures:
                    _log.warning("outbox database unreachable, events are delayed: %s", exc)
                await _wait(self._stopped, backoff.next_s())
        return None

    async def _submit(self, envelopes: Sequence[Envelope]) -> list[Receipt | JobRefused]:
        try:
            return await self._engine.submit_each(envelopes)
        except FeedDetached as exc:
            # The first job of the queue, or its first after a wipe.
            await reopen_intake(self._engine, self._ledger, exc.queue, self._probe)
            return await self._engine.submit_each(envelopes)


@asynccontextmanager
async def run_relay(app: BackendOwner[RelayBackend], *, enabled: bool = True) -> AsyncIterator[None]:
    """Relay while the block runs, if enabled and there is an outbox; then drain."""
    backend = backend_of(app)
    outbox = backend.outbox if enabled else None
    if outbox is None:
        yield
        return
    service = RelayService(app, outbox)
    running = asyncio.create_task(service.run(), name="holdfast-outbox-relay")
    running.add_done_callback(_log_failure)
    try:
        yield
    finally:
        service.stop()
        await asyncio.wait({running}, timeout=backend.settings.outbox_lease_s / 2 + _GRACE_S)
        running.cancel()
        await asyncio.wait({running})


def _log_failure(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (failure := running.exception()) is not None:
        _log.critical("relay failed, no events are published: %s", failure)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
