"""Build the engine, ledger and outbox that the settings name, unopened.

The only module that knows the adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from holdfast.clock import Clock, SystemClock
from holdfast.core.fingerprint import raw_fingerprint
from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import EnginePart
from holdfast.errors import InvalidOption
from holdfast.extras import require_drivers
from holdfast.ledger.checks import engine_name
from holdfast.settings import TEMPORARY, Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.messages import OutboxStore


def build_engine(
    settings: Settings, clock: Clock | None = None, fingerprint: Callable[[str, bytes], str] = raw_fingerprint
) -> Engine:
    """The engine that `settings.url` names, unopened. On Redis the server's time is used, not `clock`.

    `fingerprint` computes what is kept with an idempotency key, from task and payload.

    `sqlite:///jobs.db` is relative to the working directory, `sqlite:////var/lib/jobs.db` absolute; `sqlite://` and
    `sqlite:///:memory:` are a temporary database of this engine alone. Raises `MissingExtra` if its driver is missing.
    """
    # Imported here: a program that uses one store does not need the other's driver.
    if urlsplit(settings.url).scheme == "sqlite":
        from holdfast.engine.sqlite.engine import SqliteEngine

        options = replace(settings.engine_options(), fingerprint=fingerprint)
        return SqliteEngine(sqlite_path(settings.url), options, clock, bool(settings.stream_dlq))
    require_drivers(settings.url)
    from holdfast.engine.redis.engine import RedisEngine

    return RedisEngine.from_settings(settings, fingerprint)


def sqlite_path(url: str) -> str:
    """The path in a `sqlite:` URL; `:memory:` for a temporary database."""
    parts = urlsplit(url)
    if parts.netloc:
        raise InvalidOption(f"{url}: use three slashes before a path (sqlite:///jobs.db), four if it is absolute")
    if parts.query or parts.fragment:
        raise InvalidOption(f"{url}: a sqlite URL takes no options, only a path")
    return ":memory:" if unquote(parts.path) in TEMPORARY else unquote(parts.path[1:])


def build_ledger(settings: Settings, engine: EnginePart, clock: Clock | None = None) -> Ledger | None:
    """The ledger of this engine, unopened.

    That is `settings.ledger`, otherwise the engine's SQLite file; None on Redis without `settings.ledger`. On
    PostgreSQL the server's time is used, not `clock`.
    """
    # Imported here: a program that uses one store does not need the other's driver.
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
    """The outbox as the relay reads it: in the ledger, or in a separate database of the user."""

    def __init__(self, store: OutboxStore, owner: Ledger | None = None) -> None:
        """`owner` has the store's connections; it is opened and closed with the store."""
        self.store = store
        self._owner = owner
        self._opening = asyncio.Lock()
        self._opened = False

    async def open(self) -> OutboxStore:
        """Open and return the store. Raises `LedgerUnavailable` or `SchemaMismatch`."""
        async with self._opening:
            if not self._opened:
                if self._owner is not None:
                    await self._owner.open()
                await self.store.open()
                self._opened = True
        return self.store

    async def close(self) -> None:
        """Close the store and its owner. Can be repeated."""
        self._opened = False
        await self.store.close()
        if self._owner is not None:
            await self._owner.close()


def build_outbox(settings: Settings, ledger: Ledger | None, clock: Clock | None = None) -> OutboxHandle | None:
    """The outbox, unopened: in `settings.outbox_url`, otherwise in the ledger; None if there is neither."""
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
    # A separate database is not this engine's ledger; other deployments may use its outbox as well.
    guard = owner_check(settings.namespace, engine_name(settings.url)) if owned else None
    return PostgresLedger(PostgresStore(url, options, guard), settings.publishing if owned else None)


def _file(settings: Settings, url: str, clock: Clock, *, owned: bool = True) -> Ledger:
    from holdfast.ledger.sqlite.ledger import SqliteLedger, owner_check
    from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
    from holdfast.sqlite.connection import DatabaseFile

    path = sqlite_path(url)
    if path == ":memory:":
        raise InvalidOption("a ledger cannot be in memory; name a file, for example sqlite:///ledger.db")
    guard = owner_check(settings.namespace, clock, engine_name(settings.url)) if owned else None
    store = SqliteLedgerStore(DatabaseFile(path), prepare_ledger, guard)
    return SqliteLedger(store, clock, settings.publishing if owned else None)
