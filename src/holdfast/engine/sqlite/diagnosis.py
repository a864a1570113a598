"""Checks of a SQLite file, for `holdfast doctor`."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.engine.port.reads import Finding
from holdfast.sqlite.connection import describe_shared_files

#: How long the integrity check may take.
_CHECK_S: Final = 5.0
_MIN_FREE_BYTES: Final = 100 * 1024 * 1024
_LOW_FREE_BYTES: Final = 1024 * 1024 * 1024
_LARGE_LOG_BYTES: Final = 512 * 1024 * 1024
#: Instructions of SQLite's virtual machine between two checks of the clock.
_STEPS: Final = 10_000


def diagnose(connection: sqlite3.Connection, path: Path, *, durable: bool) -> list[Finding]:
    """All checks, on a read-only connection. Blocks."""
    return [
        _journal(connection),
        _synchronous(durable),
        _integrity(connection),
        _writable(path),
        _disk(path),
        *_log(path),
        *_permissions(path),
    ]


def _journal(connection: sqlite3.Connection) -> Finding:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    return Finding(
        "journal mode",
        mode == "wal",
        f"journal_mode is {mode}",
        "" if mode == "wal" else "close all programs that use the file, then run `PRAGMA journal_mode = WAL` on it",
    )


def _synchronous(durable: bool) -> Finding:
    if durable:
        return Finding("durability", True, "synchronous is FULL: accepted jobs survive a power cut")
    return Finding(
        "durability",
        False,
        "this is a temporary database, deleted when its process ends",
        "use a path (sqlite:///jobs.db) for anything but tests",
        warning=True,
    )


def _integrity(connection: sqlite3.Connection) -> Finding:
    end = time.monotonic() + _CHECK_S
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorname != "SQLITE_INTERRUPT":
            raise
        return Finding("integrity", True, f"no fault found in {_CHECK_S:g} s; the rest was not checked")
    finally:
        connection.set_progress_handler(None, 0)
    good = verdict == "ok"
    advice = "" if good else "stop all workers, keep a copy, and recover the file with `sqlite3 FILE .recover`"
    return Finding("integrity", good, f"quick_check reports {verdict}", advice)


def _writable(path: Path) -> Finding:
    good = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    advice = "" if good else "give this user write access to the file and its directory"
    return Finding("writable", good, f"{path} is {'' if good else 'not '}writable", advice)


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(path.parent).free
    message = f"{free / 1024**3:.1f} GiB free on the disk of {path}"
    if free >= _LOW_FREE_BYTES:
        return Finding("disk", True, message)
    return Finding("disk", False, message, "free some space before intake stops", warning=free >= _MIN_FREE_BYTES)


def _log(path: Path) -> Iterator[Finding]:
    log = Path(f"{path}-wal")
    size = log.stat().st_size if log.exists() else 0
    if size > _LARGE_LOG_BYTES:
        yield Finding(
            "write-ahead log",
            False,
            f"{log} has grown to {size / 1024**2:.0f} MiB",
            "a program keeps a read transaction open; find it and end it",
            warning=True,
        )


def _permissions(path: Path) -> Iterator[Finding]:
    if problem := describe_shared_files(path):
        yield Finding("permissions", False, *problem, warning=True)
