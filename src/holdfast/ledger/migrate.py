"""Migrate a ledger's tables to this release, or back.

A migration is all or nothing, and two callers at the same time do no harm. The embedded ledger is part of the engine's
file, which has its own versions (`engine.sqlite.ledger_schema`). The tables of other ledgers have revisions, which
Alembic applies (`ledger.revisions`); it comes with the extra [postgres].
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.engine.sqlite.ledger_schema import upgrade
from holdfast.engine.sqlite.schema import SCHEMA_VERSION, version_of
from holdfast.errors import InvalidOption, LedgerUnavailable
from holdfast.extras import require
from holdfast.schema.columns import TABLE
from holdfast.sqlite.connection import connect, translate

if TYPE_CHECKING:
    from holdfast.ledger.postgres.store import PostgresStore


BASE: Final = "base"
UNKNOWN_VERSION: Final = (
    f"no release of holdfast has had that version, so the table {TABLE} was changed by other means; put the right "
    "version back, or restore the ledger from a backup"
)


class Migration(msgspec.Struct, frozen=True):
    """A migration that this release knows."""

    version: str
    title: str


class MigrationStatus(msgspec.Struct, frozen=True):
    """The version of a ledger. `pending` is what `up` would apply."""

    ledger: str
    version: str | None
    required: str
    pending: list[Migration]

    @property
    def newer(self) -> bool:
        """Whether a later release wrote the ledger."""
        return self.version is not None and self.version > self.required


class MigrationChange(msgspec.Struct, frozen=True):
    """The versions before and after a run."""

    ledger: str
    before: str | None
    after: str | None


class EngineFile(msgspec.Struct, frozen=True):
    """An engine's file, with the ledger in it."""

    path: Path


if TYPE_CHECKING:
    #: A database, a ledger's own file, or an engine's file.
    Target = PostgresStore | Path | EngineFile


async def up(store: Target, to: str = "head") -> MigrationChange:
    """Apply what is missing. Raises `SchemaMismatch` for a ledger of a later release."""
    if isinstance(store, EngineFile):
        return await asyncio.to_thread(_upgrade_engine, store.path)
    _require_alembic()
    from holdfast.ledger import revisions

    return await revisions.up(store, to)


async def down(store: Target, to: str = BASE) -> MigrationChange:
    """Revert migrations. Data that only they can hold is lost; `base` drops all of the ledger's tables."""
    if isinstance(store, EngineFile):
        raise InvalidOption(f"the ledger in {store.path} is part of the engine's file and cannot be migrated down")
    _require_alembic()
    from holdfast.ledger import revisions

    return await revisions.down(store, to)


async def status(store: Target) -> MigrationStatus:
    """Read the version; changes nothing."""
    if isinstance(store, EngineFile):
        return await asyncio.to_thread(_engine_status, store.path)
    _require_alembic()
    from holdfast.ledger import revisions

    return await revisions.status(store)


def migration_store(url: str) -> PostgresStore:
    """A store for migrations: one connection, a timeout long enough for a big table, no version check."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise InvalidOption("migrations run on postgresql:// and sqlite:// ledgers")
    require("migrating a ledger on PostgreSQL", "alembic", "asyncpg")
    from holdfast.ledger.postgres.store import PostgresStore, StoreOptions

    return PostgresStore(url, StoreOptions(pool_size=1, reply_timeout_s=3_600))


def _require_alembic() -> None:
    require("migrating a ledger that is not embedded", "alembic")


def _upgrade_engine(path: Path) -> MigrationChange:
    before = _engine_version(path)
    upgrade(path)
    return MigrationChange(str(path), before, str(SCHEMA_VERSION))


def _engine_status(path: Path) -> MigrationStatus:
    found, required = _engine_version(path), str(SCHEMA_VERSION)
    pending = [] if found == required else [Migration(required, "the engine's file with the embedded ledger")]
    return MigrationStatus(str(path), found, required, pending)


def _engine_version(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        with closing(connect(path)) as connection:
            version = version_of(connection, path)
    except sqlite3.Error as exc:
        raise translate(exc, path, LedgerUnavailable) from exc
    return None if version is None else str(version)
