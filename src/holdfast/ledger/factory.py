"""From settings to a ledger; the only place that knows which there are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.clock import Clock, SystemClock
from holdfast.engine.factory import sqlite_path
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption
from holdfast.extras import require_drivers
from holdfast.ledger.owner import engine_name
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.outbox_store import OutboxStore
    from holdfast.ledger.port import Ledger


def build_ledger(settings: Settings, engine: Engine, clock: Clock | None = None) -> Ledger | None:
    """The ledger of this engine, not opened yet: `settings.ledger`, else the engine's own file. Redis has none.

    On PostgreSQL time is the server's, and `clock` unused.
    """
    # Imported here: who runs on one store need not have the other's driver.
    clock = clock or SystemClock()
    if settings.embedded:
        from holdfast.engine.sqlite.engine import SqliteEngine
        from holdfast.ledger.embedded import EmbeddedLedger

        if not isinstance(engine, SqliteEngine):
            raise TypeError(f"an embedded ledger is in a SqliteEngine's file, not in {type(engine).__name__}'s")
        return EmbeddedLedger(engine.place, clock)
    if settings.ledger is None:
        return None
    if urlsplit(settings.ledger).scheme == "sqlite":
        return _file(settings, settings.ledger, clock)
    return _database(settings, settings.ledger)


class OutboxDoor:
    """The relay's end of the outbox: the ledger's, or that of a database of the user's own."""

    def __init__(self, store: OutboxStore, owner: Ledger | None = None) -> None:
        """`owner`: has the store's connections, and is opened and closed with it."""
        self.store = store
        self._owner = owner
        self._opening = asyncio.Lock()
        self._opened = False

    async def open(self) -> OutboxStore:
        """The store, open. Raises `LedgerUnavailable` or `SchemaMismatch`."""
        async with self._opening:
            if not self._opened:
                if self._owner is not None:
                    await self._owner.open()
                await self.store.open()
                self._opened = True
        return self.store

    async def close(self) -> None:
        """Safe to call twice."""
        self._opened = False
        await self.store.close()
        if self._owner is not None:
            await self._owner.close()


def build_outbox(settings: Settings, ledger: Ledger | None, clock: Clock | None = None) -> OutboxDoor | None:
    """Where `outbox_events` is, not opened yet: `settings.outbox_url`, else the ledger. None: there is neither."""
    url = settings.outbox_url
    if url is None:
        return None if ledger is None else OutboxDoor(ledger.outbox)
    if urlsplit(url).scheme == "sqlite":
        own = _file(settings, url, clock or SystemClock(), owned=False)
    else:
        own = _database(settings, url, owned=False)
    return OutboxDoor(own.outbox, own)


def _database(settings: Settings, url: str, *, owned: bool = True) -> Ledger:
    require_drivers(url)
    from holdfast.ledger.postgres.guard import guard_for
    from holdfast.ledger.postgres.ledger import PostgresLedger
    from holdfast.ledger.postgres.store import PostgresStore, StoreOptions

    options = StoreOptions(
        pool_size=settings.ledger_pool_size,
        connect_timeout_s=settings.connect_timeout_s,
        reply_timeout_s=settings.reply_timeout_s,
    )
    # A database of the user's own is not the ledger of this engine: others may use its outbox, too.
    guard = guard_for(settings.namespace, engine_name(settings.url)) if owned else None
    return PostgresLedger(PostgresStore(url, options, guard), settings.publishing if owned else None)


def _file(settings: Settings, url: str, clock: Clock, *, owned: bool = True) -> Ledger:
    from holdfast.engine.sqlite.store import Place
    from holdfast.ledger.sqlite.files import prepare_ledger
    from holdfast.ledger.sqlite.guard import guard_for
    from holdfast.ledger.sqlite.ledger import SqliteLedger
    from holdfast.ledger.sqlite.store import SqliteStore

    path = sqlite_path(url)
    if path == ":memory:":
        raise InvalidOption("a ledger that remembers nothing is none; name a file: sqlite:///ledger.db")
    guard = guard_for(settings.namespace, clock, engine_name(settings.url)) if owned else None
    store = SqliteStore(Place(path), prepare_ledger, guard)
    return SqliteLedger(store, clock, settings.publishing if owned else None)
