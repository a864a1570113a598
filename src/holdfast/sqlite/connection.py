"""SQLite connections, a reader thread, a lock between processes, and error translation.

No `sqlite3` error leaves this package: `translate` turns each into an `EngineUnavailable` (a `LedgerUnavailable` for a
ledger's file) that says what to do (the file is locked, full, read-only, damaged, gone). A file that is not
holdfast's raises `InvalidOption`. `ReaderThread` has a read-only connection, so reads neither block the event loop nor
wait for a writer.

`WriteLock` queues the writers of several processes. SQLite's busy handler sleeps and retries, so one busy process can
starve the others for seconds. Here two file locks form a turnstile: only the holder of the first may wait for the
second, and it releases the first once it has the second. A process that writes again immediately queues behind the
next one. The kernel keeps the queue and releases both locks when a process ends for any reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from holdfast.errors import EngineUnavailable, InvalidOption, Unavailable
from holdfast.sqlite.transaction import Value, read_rows

#: "hold" in ASCII: distinguishes holdfast's files from other programs'.
APPLICATION_ID: Final = 0x686F6C64

#: How long SQLite itself waits for a program that does not use `WriteLock` (a shell, a backup).
BUSY_TIMEOUT_MS: Final = 5_000
_CACHE_KIB: Final = 64 * 1024
#: In pages of 4 KiB. Each checkpoint costs two more syncs, so not every batch should cause one.
_CHECKPOINT_PAGES: Final = 4_000
_WAL_LIMIT_BYTES: Final = 64 * 1024 * 1024

#: Mode of new files: they contain arguments and results of jobs.
_PRIVATE: Final = 0o600
#: Files next to a database: SQLite's own, and those of `WriteLock`.
_SUFFIXES: Final = ("", "-wal", "-shm", "-lock", "-queue")

_ADVICE: Final = {
    "SQLITE_BUSY": "another program has locked it; end that program's transaction, then retry",
    "SQLITE_LOCKED": "another program has locked it; end that program's transaction, then retry",
    "SQLITE_FULL": "the disk is full; free some space, then retry (accepted jobs are safe)",
    "SQLITE_READONLY": "it is read-only; give this user write access to the file and its directory",
    "SQLITE_PERM": "access denied; give this user access to the file and its directory",
    "SQLITE_AUTH": "access denied; give this user access to the file and its directory",
    "SQLITE_CANTOPEN": "it cannot be opened; the directory must exist and be writable",
    "SQLITE_CORRUPT": "it is damaged; stop all workers, keep a copy, and recover it with `sqlite3 FILE .recover`",
    "SQLITE_NOTADB": "it is not a SQLite database; use another path",
    "SQLITE_IOERR": "the disk reports an error; check the disk and the system log",
    "SQLITE_CONSTRAINT": "a write would have violated an invariant, nothing was changed; report this as a bug",
}


#: Creates the schema in an empty file, or checks the existing one. Runs while holding the `WriteLock`.
Prepare = Callable[[sqlite3.Connection, Path], None]


def open_writer(path: Path, prepare: Prepare, *, durable: bool = True) -> sqlite3.Connection:
    """Open this process's only writing connection; `prepare` creates or checks the schema."""
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
    """Open a connection that cannot write."""
    connection = connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def translate(
    error: sqlite3.Error | OSError, path: Path, unavailable: type[Unavailable] = EngineUnavailable
) -> Unavailable:
    """Translate an error into the `unavailable` error to raise instead, with a remedy."""
    if isinstance(error, OSError):
        return unavailable(f"the database {path}: {error}; check the file and its directory")
    name = getattr(error, "sqlite_errorname", None) or ""
    for code, advice in _ADVICE.items():
        if name.startswith(code):
            return unavailable(f"the database {path}: {error}; {advice}")
    return unavailable(f"the database {path} failed: {error}; check it with `holdfast doctor`")


def is_lost(error: sqlite3.Error) -> bool:
    """Whether the connection cannot be used after this error."""
    name = getattr(error, "sqlite_errorname", None) or ""
    return name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_CANTOPEN"))


def describe_shared_files(path: Path) -> tuple[str, str] | None:
    """Which files of a database other users can read or write, and what to do; None if there are none."""
    files = [Path(f"{path}{suffix}") for suffix in _SUFFIXES]
    names = " ".join(str(file) for file in files if file.exists() and file.stat().st_mode & 0o066)
    if not names:
        return None
    return (
        f"other users can read or write {names}",
        f"chmod 600 {names}, unless other users are meant to use the database",
    )


def create_private(path: Path) -> None:
    """Create the file if it does not exist; only its owner can read and write it, whatever the umask.

    SQLite gives `-wal` and `-shm` the mode of the database. Errors are left to SQLite, which reports them.
    """
    with suppress(OSError):
        os.close(_create(str(path), _PRIVATE))


def _create(path: str, mode: int) -> int:
    """Create a file with exactly this mode. Raises `FileExistsError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    # The umask may have removed bits.
    os.fchmod(descriptor, mode)
    return descriptor


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection that never begins a transaction by itself. A new file is private."""
    create_private(path)
    return sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,
        # Opened by one thread, then used by one other thread only.
        check_same_thread=False,
        cached_statements=512,
    )


T = TypeVar("T")


class ReaderThread:
    """One reading thread per engine; it starts with the first query."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"holdfast-reader-{path.name}")

    async def rows(self, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
        """Run a statement that returns one JSON text, on the last commit."""
        return await self.run(lambda connection: read_rows(connection, name, decoder, **values))

    async def run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, query)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _execute(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = open_reader(self._path)
            return query(self._connection)
        except sqlite3.Error as exc:
            if is_lost(exc):
                self._disconnect()
            raise translate(exc, self._path) from exc

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class WriteLock:
    """The lock between writing processes. Not thread-safe: one writer per process uses it."""

    def __init__(self, database: Path) -> None:
        create_private(database)
        self._waiting = _open_lock(database, "-queue")
        try:
            self._writing = _open_lock(database, "-lock")
        except OSError:
            os.close(self._waiting)
            raise

    def acquire(self) -> None:
        """Block until this process may write."""
        fcntl.flock(self._waiting, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._writing, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._waiting, fcntl.LOCK_UN)

    def release(self) -> None:
        fcntl.flock(self._writing, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._waiting)
        os.close(self._writing)


def _open_lock(database: Path, suffix: str) -> int:
    """Open a lock file; a new one gets the mode of the database, so that users who share it also share its locks."""
    path = f"{database}{suffix}"
    try:
        mode = stat.S_IMODE(database.stat().st_mode) & 0o666
    except OSError:
        mode = _PRIVATE
    try:
        return _create(path, mode)
    except FileExistsError:
        return os.open(path, os.O_RDWR)


@contextmanager
def exclusive_lock(database: Path) -> Iterator[None]:
    """Lock out other writers, for a migration. Blocks. Not for a process that has a writer on this file."""
    turnstile = WriteLock(database)
    try:
        turnstile.acquire()
        yield
    finally:
        # Closing also releases the locks.
        turnstile.close()


_PAIRS: Final = msgspec.json.Decoder(list[tuple[str, str]])


class DatabaseFile:
    """The path of a database. A temporary one is deleted when this object is no longer referenced."""

    def __init__(self, path: str) -> None:
        self.temporary = path in ("", ":memory:")
        if self.temporary:
            directory = tempfile.mkdtemp(prefix="holdfast-")
            self.path = Path(directory) / "temporary.db"
            weakref.finalize(self, _remove, directory, os.getpid())
        elif "\0" in path:
            raise InvalidOption(f"{path!r} is not a path")
        else:
            self.path = Path(path).resolve()


def _remove(directory: str, owner: int) -> None:
    # A forked child that ends must not delete its parent's database.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
