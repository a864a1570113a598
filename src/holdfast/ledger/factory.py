"""From settings to a ledger; the only place that knows which there are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.clock import Clock, SystemClock
from holdfast.engine.factory import sqlite_path
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption
from holdfast.ledger.owner import engine_name
from holdfast.settings import Settings

if TYPE_CHECKING:
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


def _database(settings: Settings, url: str) -> Ledger:
    from holdfast.ledger.ledgers import PostgresLedger
    from holdfast.ledger.postgres.guard import guard_for
    from holdfast.ledger.postgres.store import PostgresStore, StoreOptions

    options = StoreOptions(
        pool_size=settings.ledger_pool_size,
        connect_timeout_s=settings.connect_timeout_s,
        reply_timeout_s=settings.reply_timeout_s,
    )
    return PostgresLedger(PostgresStore(url, options, guard_for(settings.namespace, engine_name(settings.url))))


def _file(settings: Settings, url: str, clock: Clock) -> Ledger:
    from holdfast.engine.sqlite.store import Place
    from holdfast.ledger.ledgers import SqliteLedger
    from holdfast.ledger.sqlite.files import prepare_ledger
    from holdfast.ledger.sqlite.guard import guard_for
    from holdfast.ledger.sqlite.store import SqliteStore

    path = sqlite_path(url)
    if path == ":memory:":
        raise InvalidOption("a ledger that remembers nothing is none; name a file: sqlite:///ledger.db")
    guard = guard_for(settings.namespace, clock, engine_name(settings.url))
    return SqliteLedger(SqliteStore(Place(path), prepare_ledger, guard), clock)
