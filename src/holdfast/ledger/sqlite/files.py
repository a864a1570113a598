"""A ledger's own SQLite file: made when it is empty, looked at when it is not. It is never an engine's file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast.engine.sqlite.connection import APPLICATION_ID as ENGINE_ID
from holdfast.errors import InvalidOption
from holdfast.ledger.schema import metadata
from holdfast.ledger.version import HEAD, READ_VERSION, TABLE, check_version

#: "hflg": marks the file as a ledger's.
APPLICATION_ID: Final = 0x68666C67


def prepare_ledger(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables in an empty file. Raises `InvalidOption` for a file of another kind, `SchemaMismatch` for another
    release's."""
    if _is_current(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Looked at again: another process may have been faster.
        if not _is_current(connection, path):
            _create(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def foreign(path: Path, owner: int) -> InvalidOption:
    """Says whose it is."""
    if owner == ENGINE_ID:
        return InvalidOption(
            f"{path} is an engine's database, not a ledger's; name another file, or leave HOLDFAST_LEDGER unset where "
            "HOLDFAST_URL is this one: then it is the ledger, too"
        )
    return InvalidOption(f"{path} belongs to another program; give the ledger a file of its own")


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    if not tables and owner in (0, APPLICATION_ID):
        # Empty, or migrated down.
        return False
    if owner != APPLICATION_ID:
        raise foreign(path, owner)
    try:
        row = connection.execute(READ_VERSION).fetchone()
    except sqlite3.OperationalError:
        row = None
    check_version(str(path), row and row[0])
    return True


def _create(connection: sqlite3.Connection) -> None:
    dialect = sqlite.dialect()
    for table in metadata.sorted_tables:
        connection.execute(str(CreateTable(table).compile(dialect=dialect)))
        for index in table.indexes:
            connection.execute(str(CreateIndex(index).compile(dialect=dialect)))
    connection.execute(
        f"CREATE TABLE {TABLE} (version_num VARCHAR(32) NOT NULL, CONSTRAINT {TABLE}_pkc PRIMARY KEY (version_num))"
    )
    connection.execute(f"INSERT INTO {TABLE} (version_num) VALUES (?)", (HEAD,))  # noqa: S608 - a constant
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
