"""The outbox's relay as a part of a process: built from settings, started with the process and drained with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.core.job import Envelope, Receipt
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.ledger.intake_recovery import LedgerProbe, reopen_intake
from holdfast.ledger.port.messages import OutboxOpener
from holdfast.outbox.destinations import build_destinations
from holdfast.outbox.relay import Relay
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.messages import OutboxStore


_log: Final = logging.getLogger("holdfast.outbox")

#: Beyond the time that a publication may take.
_GRACE_S: Final = 2.0


class RelayApp(Protocol):
    """What is needed of an app."""

    @property
    def settings(self) -> Settings: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def ledger_backend(self) -> Ledger | None: ...
    @property
    def outbox_backend(self) -> OutboxOpener | None: ...


class RelayService:
    """`run` until `stop`. Engine, ledger and outbox are the app's."""

    def __init__(self, app: RelayApp, outbox: OutboxOpener) -> None:
        """Raises `InvalidOption` for targets that cannot be."""
        self._settings = app.settings
        self._outbox = outbox
        self._engine = app.engine
        self._ledger = app.ledger_backend
        self._patience = LedgerProbe()
        self._outlets = build_destinations(app.settings, self._hand_in)
        self._stopped = asyncio.Event()
        self._relay: Relay | None = None

    @property
    def destinations(self) -> list[str]:
        """Those that it serves."""
        return sorted(self._outlets)

    def stop(self) -> None:
        """Finish what is on its way, then end. Safe to call twice."""
        self._stopped.set()
        if self._relay is not None:
            self._relay.stop()

    async def run(self) -> None:
        """Relay until stopped. A database that does not answer is waited for; one without tables: `SchemaMismatch`."""
        try:
            store = await self._opened()
            if store is not None and not self._stopped.is_set():
                self._relay = Relay(store, self._outlets, self._settings, self._engine.counts)
                await self._relay.run()
        finally:
            await self._patience.close()

    async def _opened(self) -> OutboxStore | None:
        backoff = Backoff()
        while not self._stopped.is_set():
            try:
                return await self._outbox.open()
            except LedgerUnavailable as exc:
                if not backoff.failures:
                    _log.warning("events wait, the outbox's database does not answer: %s", exc)
                await _wait(self._stopped, backoff.next_s())
        return None

    async def _hand_in(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        try:
            return await self._engine.submit(envelopes)
        except FeedDetached as exc:
            # The queue's first job ever, or its first after a wipe.
            await reopen_intake(self._engine, self._ledger, exc.queue, self._patience)
            return await self._engine.submit(envelopes)


@asynccontextmanager
async def run_relay(app: RelayApp, *, wanted: bool = True) -> AsyncIterator[None]:
    """Relays while the block runs, if that is wanted and there is an outbox; then drains."""
    outbox = app.outbox_backend if wanted else None
    if outbox is None:
        yield
        return
    relaying = RelayService(app, outbox)
    running = asyncio.create_task(relaying.run(), name="holdfast-outbox-relay")
    running.add_done_callback(_told)
    try:
        yield
    finally:
        relaying.stop()
        await asyncio.wait({running}, timeout=app.settings.outbox_lease_s / 2 + _GRACE_S)
        running.cancel()
        await asyncio.wait({running})


def _told(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (failure := running.exception()) is not None:
        _log.critical("the relay has ended, nothing is published: %s", failure)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
