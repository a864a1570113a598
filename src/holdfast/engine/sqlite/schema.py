"""The schema of the embedded SQLite file: creation, version check and upgrade of older files.

`sql/schema.sql` has the engine's tables. The embedded ledger's part is generated from `holdfast.schema`: tables that
the engine does not write itself, and indexes on jobs for the ledger's queries.

`upgrade` (`holdfast migrate up`) renames the old tables, creates the current schema as in an empty file and copies the
rows, all in one transaction with other writers locked out. A migrated file has exactly the schema of a new one.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidOption, SchemaMismatch
from holdfast.sqlite.connection import APPLICATION_ID
from holdfast.sqlite.transaction import statement

#: Version of the whole file, `sql/schema.sql` and the ledger's tables; `ledger_schema.upgrade` upgrades older files.
SCHEMA_VERSION: Final = 9


def prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the engine's and the ledger's schema in an empty file, or check the existing one."""
    if _is_current(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Checked again: another process may have created it first.
        if not _is_current(connection, path):
            create_schema(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the schema exists; raises if the file is another program's or of another release."""
    version = version_of(connection, path)
    if version is not None and version < SCHEMA_VERSION:
        raise SchemaMismatch(str(path), str(version), str(SCHEMA_VERSION))
    return version is not None


def version_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """The file's schema version; None if it is empty.

    Raises if it belongs to another program or a newer release.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return None
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise InvalidOption(f"{path} belongs to another program; use a separate file for holdfast")
    if version > SCHEMA_VERSION:
        raise InvalidOption(
            f"{path} was written by a newer holdfast (schema {version}, this release supports {SCHEMA_VERSION}); "
            "upgrade holdfast"
        )
    return int(version)


def create_schema(connection: sqlite3.Connection) -> None:
    """Create the whole schema, in a transaction that the caller commits."""
    # Imported here: SQLAlchemy is needed only to create a file.
    from holdfast.engine.sqlite.ledger_schema import statements

    # Not executescript: it would commit the transaction that keeps two processes from creating the schema twice.
    pending = ""
    for line in statement("schema").splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            connection.execute(pending)
            pending = ""
    for table in statements():
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
