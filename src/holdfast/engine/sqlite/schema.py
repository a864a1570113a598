"""The schema of the embedded SQLite file: creation, version check and upgrade of older files.

`sql/schema.sql` has the engine's tables. The embedded ledger's part is generated from `holdfast.schema`: tables that
the engine does not write itself, and indexes on jobs for the ledger's queries.

`upgrade` (`holdfast migrate up`) renames the old tables, creates the present schema as in an empty file and copies the
rows, all in one transaction with other writers locked out. A migrated file has exactly the schema of a new one.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidOption, SchemaMismatch
from holdfast.sqlite.connection import APPLICATION_ID
from holdfast.sqlite.transaction import statement

#: Version of the whole file, `sql/schema.sql` and the ledger's tables; `upgrade.py` brings older files to it.
SCHEMA_VERSION: Final = 3


def prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    """The engine's, and that of the ledger in the same file."""
    if _is_current(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Looked at again: another process may have been faster.
        if not _is_current(connection, path):
            create_schema(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the schema is there; raises if it is somebody else's, or of another release."""
    version = version_of(connection, path)
    if version is not None and version < SCHEMA_VERSION:
        raise SchemaMismatch(str(path), str(version), str(SCHEMA_VERSION))
    return version is not None


def version_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """The version of the schema in the file, None if it is empty; raises if it is not for us to touch."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return None
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise InvalidOption(f"{path} belongs to another program; give holdfast a file of its own")
    if version > SCHEMA_VERSION:
        raise InvalidOption(
            f"{path} was written by a newer holdfast (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this one"
        )
    return int(version)


def create_schema(connection: sqlite3.Connection) -> None:
    """All of it; in a transaction, which the caller commits."""
    # Imported here: SQLAlchemy is needed only to create a file.
    from holdfast.engine.sqlite.ledger_schema import statements

    # Not executescript: that would commit the transaction which keeps two processes from creating it twice.
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
