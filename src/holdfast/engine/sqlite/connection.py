"""Connections to one SQLite file, and what its errors mean for a caller.

No `sqlite3` error leaves this package: each becomes an `EngineUnavailable` that says what to do (the file is
locked, full, read-only, damaged, gone), or an `InvalidOption` for a file that is not ours.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from holdfast.engine.sqlite.statements import statement
from holdfast.errors import EngineUnavailable, HoldfastError, InvalidOption

#: Version of `sql/schema.sql`; a file that was written under another is refused.
SCHEMA_VERSION: Final = 1
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


def open_writer(path: Path, *, durable: bool = True) -> sqlite3.Connection:
    """The one connection of this process that writes; makes the schema in an empty file."""
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        _prepare_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = _connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def translate(error: sqlite3.Error, path: Path) -> HoldfastError:
    """The error that a caller gets instead."""
    name = getattr(error, "sqlite_errorname", None) or ""
    for code, advice in _ADVICE.items():
        if name.startswith(code):
            return EngineUnavailable(f"the database {path}: {error}; {advice}")
    return EngineUnavailable(f"the database {path} does not answer: {error}; `holdfast doctor` may tell why")


def is_lost(error: sqlite3.Error) -> bool:
    """Whether a connection is of no more use after this error."""
    name = getattr(error, "sqlite_errorname", None) or ""
    return name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_CANTOPEN"))


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,
        # Opened by one thread, then used by another one only.
        check_same_thread=False,
        cached_statements=512,
    )


def _prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    if _is_current(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Looked at again: another process may have been faster.
        if not _is_current(connection, path):
            _create_schema(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the schema is there; raises if it is somebody else's."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        return False
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise InvalidOption(f"{path} belongs to another program; give holdfast a file of its own")
    if version > SCHEMA_VERSION:
        raise InvalidOption(
            f"{path} was written by a newer holdfast (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this one"
        )
    if version < SCHEMA_VERSION:
        raise InvalidOption(
            f"{path} was written by an older holdfast (schema {version}, this one wants {SCHEMA_VERSION}); "
            "migrate it first"
        )
    return True


def _create_schema(connection: sqlite3.Connection) -> None:
    # Not executescript: that would commit the transaction which keeps two processes from creating it twice.
    pending = ""
    for line in statement("schema").splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            connection.execute(pending)
            pending = ""
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
