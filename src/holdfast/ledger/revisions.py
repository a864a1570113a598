"""Alembic's revisions of a ledger's tables, applied to PostgreSQL or to a ledger's own SQLite file.

PostgreSQL: one transaction under an advisory lock. SQLite: one exclusive transaction. Two callers at once do no harm:
the second one waits, then finds nothing to do. `ledger.migrate` is the interface; this module needs Alembic.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, create_engine, event, inspect, text
from sqlalchemy.pool import NullPool

from holdfast.errors import LedgerUnavailable, SchemaMismatch
from holdfast.ledger.migrate import UNKNOWN_VERSION, Migration, MigrationChange, MigrationStatus
from holdfast.ledger.sqlite.store import APPLICATION_ID, foreign
from holdfast.schema.columns import HEAD, READ_VERSION, TABLE
from holdfast.sqlite.connection import BUSY_TIMEOUT_MS, translate

if TYPE_CHECKING:
    from holdfast.ledger.postgres.store import PostgresStore


T = TypeVar("T")

_SCRIPTS: Final = Path(__file__).parent / "migrations"
#: Key of the advisory lock; the same number in every process.
_LOCK: Final = 0x686F6C64


async def up(store: PostgresStore | Path, to: str) -> MigrationChange:
    """Apply what is missing. Raises `SchemaMismatch` for a ledger of a later release."""

    def work(connection: Connection) -> MigrationChange:
        return _change(connection, name, lambda config: command.upgrade(config, to))

    name = _name(store)
    return await _run(store, work)


async def down(store: PostgresStore | Path, to: str) -> MigrationChange:
    """Revert revisions; if none is left, the version table is dropped as well."""

    def work(connection: Connection) -> MigrationChange:
        change = _change(connection, name, lambda config: command.downgrade(config, to))
        if change.after is None:
            connection.execute(text(f"DROP TABLE IF EXISTS {TABLE}"))
        return change

    name = _name(store)
    return await _run(store, work)


async def status(store: PostgresStore | Path) -> MigrationStatus:
    """Read the version; changes nothing."""
    name = _name(store)
    missing = isinstance(store, Path) and not await asyncio.to_thread(store.exists)
    found = None if missing else await _run(store, _find_revision, read_only=True)
    known = _list_migrations()
    pending = [one for one in known.values() if found is None or (found in known and one.version > found)]
    return MigrationStatus(name, found, HEAD, pending)


def _list_migrations() -> dict[str, Migration]:
    """Every migration of this release, in order."""
    scripts = ScriptDirectory(str(_SCRIPTS)).walk_revisions()
    return {one.revision: Migration(one.revision, (one.doc or "").rstrip(".")) for one in reversed(list(scripts))}


def _change(connection: Connection, name: str, run: Callable[[Config], None]) -> MigrationChange:
    before = _find_revision(connection)
    if before is not None and before > HEAD:
        raise SchemaMismatch(name, before, HEAD)
    if before is not None and before not in _list_migrations():
        raise SchemaMismatch(name, before, HEAD, advice=UNKNOWN_VERSION)
    run(_config(connection))
    return MigrationChange(name, before, _find_revision(connection))


def _config(connection: Connection) -> Config:
    config = Config()
    # A `%` in a path would be taken for an interpolation.
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _find_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(TABLE):
        return None
    row = connection.execute(text(READ_VERSION)).first()
    return None if row is None else str(row[0])


def _name(store: PostgresStore | Path) -> str:
    return str(store) if isinstance(store, Path) else store.name


async def _run(store: PostgresStore | Path, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
    if isinstance(store, Path):
        return await asyncio.to_thread(_run_on_file, store, work, read_only)
    async with store.read_engine.connect() as connection, connection.begin():
        if not read_only:
            # Held until the end of the transaction: a second caller waits, then finds nothing to do.
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        return await connection.run_sync(work)


def _run_on_file(path: Path, work: Callable[[Connection], T], read_only: bool) -> T:
    engine = create_engine(
        URL.create("sqlite", database=str(path)), poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}
    )
    event.listen(engine, "connect", _disable_implicit_begin)
    event.listen(engine, "begin", _begin_read if read_only else _begin)
    try:
        with engine.begin() as connection:
            _check_file(connection, path)
            if not read_only:
                connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            return work(connection)
    except Exception as exc:
        cause = getattr(exc, "orig", exc)
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.IntegrityError):
            raise translate(cause, path, LedgerUnavailable) from exc
        raise
    finally:
        engine.dispose()


def _disable_implicit_begin(connection: Any, _record: object) -> None:
    # Otherwise the driver begins and commits implicitly, and DDL is outside every transaction.
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_read(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _check_file(connection: Connection, path: Path) -> None:
    """Raise `InvalidOption` for a file that is not a ledger's."""
    tables = connection.exec_driver_sql("SELECT count(*) FROM sqlite_schema").scalar_one()
    owner = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
    if owner != APPLICATION_ID and (tables or owner):
        raise foreign(path, owner)
