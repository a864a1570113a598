"""The outbox's relay as a part of a process: built from settings, started with the process and drained with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.core.backoff import Backoff
from holdfast.core.job import Envelope, Receipt
from holdfast.engine.port import Engine
from holdfast.errors import FeedUnread, LedgerUnavailable
from holdfast.outbox.relay import Relay
from holdfast.outbox.targets import outlets
from holdfast.settings import Settings
from holdfast.upkeep.admission import Patience, admit

if TYPE_CHECKING:
    from holdfast.ledger.outbox_store import OutboxStore
    from holdfast.ledger.port import Ledger

_log: Final = logging.getLogger("holdfast.outbox")

#: Beyond the time that a publication may take.
_GRACE_S: Final = 2.0


class Outbox(Protocol):
    """The relay's end of the outbox, not opened yet."""

    async def open(self) -> OutboxStore: ...


class App(Protocol):
    """What is needed of an app."""

    @property
    def settings(self) -> Settings: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def ledger_port(self) -> Ledger | None: ...
    @property
    def outbox_port(self) -> Outbox | None: ...


class Relaying:
    """`run` until `stop`. Engine, ledger and outbox are the app's."""

    def __init__(self, app: App, outbox: Outbox) -> None:
        """Raises `InvalidOption` for targets that cannot be."""
        self._settings = app.settings
        self._outbox = outbox
        self._engine = app.engine
        self._ledger = app.ledger_port
        self._patience = Patience()
        self._outlets = outlets(app.settings, self._hand_in)
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
        except FeedUnread as exc:
            # The queue's first job ever, or its first after a wipe.
            await admit(self._engine, self._ledger, exc.queue, self._patience)
            return await self._engine.submit(envelopes)


@asynccontextmanager
async def relaying(app: App, *, wanted: bool = True) -> AsyncIterator[None]:
    """Relays while the block runs, if that is wanted and there is an outbox; then drains."""
    outbox = app.outbox_port if wanted else None
    if outbox is None:
        yield
        return
    relaying = Relaying(app, outbox)
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
