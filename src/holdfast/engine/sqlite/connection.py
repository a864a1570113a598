"""Connections to one SQLite file, and what its errors mean for a caller.

No `sqlite3` error leaves this package: each becomes an `EngineUnavailable` (for a ledger's file a `LedgerUnavailable`)
that says what to do (the file is locked, full, read-only, damaged, gone), or an `InvalidOption` for a file that is not
ours.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.engine.sqlite.statements import statement
from holdfast.errors import EngineUnavailable, InvalidOption, SchemaMismatch, Unavailable

#: Version of the whole file, `sql/schema.sql` and the ledger's tables; `upgrade.py` brings older files to it.
SCHEMA_VERSION: Final = 3
#: "hold" in ASCII: tells our files from other programs'.
APPLICATION_ID: Final = 0x686F6C64

#: How long SQLite itself waits for a program that does not queue up at the turnstile (a shell, a backup).
BUSY_TIMEOUT_MS: Final = 5_000
_CACHE_KIB: Final = 64 * 1024
#: In pages of 4 KiB. Each checkpoint costs two more syncs, so it should not come with every batch.
_CHECKPOINT_PAGES: Final = 4_000
_WAL_LIMIT_BYTES: Final = 64 * 1024 * 1024

_ADVICE: Final = {
    "SQLITE_BUSY": "another program holds it locked; end that program's transaction, then try again",
    "SQLITE_LOCKED": "another program holds it locked; end that program's transaction, then try again",
    "SQLITE_FULL": "the disk is full; make room, then try again (what was accepted before is safe)",
    "SQLITE_READONLY": "it is read-only; give this user write access to the file and its directory",
    "SQLITE_PERM": "it may not be opened; give this user access to the file and its directory",
    "SQLITE_AUTH": "it may not be opened; give this user access to the file and its directory",
    "SQLITE_CANTOPEN": "it cannot be opened; the directory must exist and be writable",
    "SQLITE_CORRUPT": "it is damaged; stop all workers, keep a copy, and recover it with `sqlite3 FILE .recover`",
    "SQLITE_NOTADB": "it is not a SQLite database; give another path",
    "SQLITE_IOERR": "the disk reports an error; check it, and the system log",
    "SQLITE_CONSTRAINT": "it refused a write that would break an invariant; nothing was changed; please report this",
}


#: Makes the schema in an empty file, and looks at the one that is there. Runs under the turnstile.
Prepare = Callable[[sqlite3.Connection, Path], None]


def open_writer(path: Path, prepare: Prepare, *, durable: bool = True) -> sqlite3.Connection:
    """The one connection of this process that writes, to a file with its schema in place."""
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def translate(
    error: sqlite3.Error | OSError, path: Path, unavailable: type[Unavailable] = EngineUnavailable
) -> Unavailable:
    """The error that a caller gets instead."""
    if isinstance(error, OSError):
        return unavailable(f"the database {path}: {error}; check the file and its directory")
    name = getattr(error, "sqlite_errorname", None) or ""
    for code, advice in _ADVICE.items():
        if name.startswith(code):
            return unavailable(f"the database {path}: {error}; {advice}")
    return unavailable(f"the database {path} does not answer: {error}; `holdfast doctor` may tell why")


def is_lost(error: sqlite3.Error) -> bool:
    """Whether a connection is of no more use after this error."""
    name = getattr(error, "sqlite_errorname", None) or ""
    return name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_CANTOPEN"))


def connect(path: Path) -> sqlite3.Connection:
    """A connection without a transaction of its own making."""
    return sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,
        # Opened by one thread, then used by another one only.
        check_same_thread=False,
        cached_statements=512,
    )


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
    # Imported here: only who makes a file needs SQLAlchemy.
    from holdfast.engine.sqlite import ledger_tables

    # Not executescript: that would commit the transaction which keeps two processes from creating it twice.
    pending = ""
    for line in statement("schema").splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            connection.execute(pending)
            pending = ""
    for table in ledger_tables.statements():
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
