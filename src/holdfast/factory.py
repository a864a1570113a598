"""Build the engine, ledger and outbox that the settings name; the only module that knows the adapters.

What it returns is not open yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from holdfast.clock import Clock, SystemClock
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption
from holdfast.extras import require_drivers
from holdfast.ledger.checks import engine_name
from holdfast.settings import TEMPORARY, Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.messages import OutboxStore


def build_engine(settings: Settings, clock: Clock | None = None) -> Engine:
    """The engine that `settings.url` names, not opened yet. On Redis time is the server's, and `clock` unused.

    `sqlite:///jobs.db` is relative to the working directory, `sqlite:////var/lib/jobs.db` absolute; `sqlite://` and
    `sqlite:///:memory:` are a temporary database of this engine alone. Raises `MissingExtra` without its driver.
    """
    # Imported here: who runs on one store need not have the other's driver.
    if urlsplit(settings.url).scheme == "sqlite":
        from holdfast.engine.sqlite.engine import SqliteEngine

        return SqliteEngine(sqlite_path(settings.url), settings.engine_options(), clock, bool(settings.stream_dlq))
    require_drivers(settings.url)
    from holdfast.engine.redis.engine import RedisEngine

    return RedisEngine.from_settings(settings)


def sqlite_path(url: str) -> str:
    """The path in a `sqlite:` URL; `:memory:` for a temporary database."""
    parts = urlsplit(url)
    if parts.netloc:
        raise InvalidOption(f"{url}: a path needs three slashes (sqlite:///jobs.db), or four if it is absolute")
    if parts.query or parts.fragment:
        raise InvalidOption(f"{url}: a sqlite URL takes no options, only a path")
    return ":memory:" if unquote(parts.path) in TEMPORARY else unquote(parts.path[1:])


def build_ledger(settings: Settings, engine: Engine, clock: Clock | None = None) -> Ledger | None:
    """The ledger of this engine, not opened yet: `settings.ledger`, else the engine's own file. Redis has none.

    On PostgreSQL time is the server's, and `clock` unused.
    """
    # Imported here: who runs on one store need not have the other's driver.
    clock = clock or SystemClock()
    if settings.embedded:
        from holdfast.engine.sqlite.engine import SqliteEngine
        from holdfast.ledger.sqlite.embedded import EmbeddedLedger

        if not isinstance(engine, SqliteEngine):
            raise TypeError(f"an embedded ledger is in a SqliteEngine's file, not in {type(engine).__name__}'s")
        return EmbeddedLedger(engine.file, clock)
    if settings.ledger is None:
        return None
    if urlsplit(settings.ledger).scheme == "sqlite":
        return _file(settings, settings.ledger, clock)
    return _database(settings, settings.ledger)


class OutboxHandle:
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


def build_outbox(settings: Settings, ledger: Ledger | None, clock: Clock | None = None) -> OutboxHandle | None:
    """Where `outbox_events` is, not opened yet: `settings.outbox_url`, else the ledger. None: there is neither."""
    url = settings.outbox_url
    if url is None:
        return None if ledger is None else OutboxHandle(ledger.outbox)
    if urlsplit(url).scheme == "sqlite":
        own = _file(settings, url, clock or SystemClock(), owned=False)
    else:
        own = _database(settings, url, owned=False)
    return OutboxHandle(own.outbox, own)


def _database(settings: Settings, url: str, *, owned: bool = True) -> Ledger:
    require_drivers(url)
    from holdfast.ledger.postgres.ledger import PostgresLedger, owner_check
    from holdfast.ledger.postgres.store import PostgresStore, StoreOptions

    options = StoreOptions(
        pool_size=settings.ledger_pool_size,
        connect_timeout_s=settings.connect_timeout_s,
        reply_timeout_s=settings.reply_timeout_s,
    )
    # A database of the user's own is not the ledger of this engine: others may use its outbox, too.
    guard = owner_check(settings.namespace, engine_name(settings.url)) if owned else None
    return PostgresLedger(PostgresStore(url, options, guard), settings.publishing if owned else None)


def _file(settings: Settings, url: str, clock: Clock, *, owned: bool = True) -> Ledger:
    from holdfast.ledger.sqlite.ledger import SqliteLedger, owner_check
    from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
    from holdfast.sqlite.connection import DatabaseFile

    path = sqlite_path(url)
    if path == ":memory:":
        raise InvalidOption("a ledger that remembers nothing is none; name a file: sqlite:///ledger.db")
    guard = owner_check(settings.namespace, clock, engine_name(settings.url)) if owned else None
    store = SqliteLedgerStore(DatabaseFile(path), prepare_ledger, guard)
    return SqliteLedger(store, clock, settings.publishing if owned else None)
