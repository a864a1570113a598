"""Locks that limit how many processes of a store on this host run a suspect that is not cleared yet.

The process that runs the suspect inherits the locked file, so that the kernel releases the lock when it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.neighbours.directory import DirectoryRefused, default_directory, open_directory

_log: Final = logging.getLogger("holdfast.neighbours")

_LOCKS: Final = max(2, os.cpu_count() or 1)

#: Names of the files, in the directory of process records.
is_isolation_lock: Final = re.compile(r"isolation-[0-9]+-[0-9a-f]{32}").fullmatch


class IsolationLocks:
    """Locks on files. All workers of a store share them."""

    def __init__(self, store: str, directory: Path | None = None, count: int = _LOCKS) -> None:
        self._names = [f"isolation-{number}-{store}" for number in range(count)]
        self._private: str | None = None
        try:
            self._directory = open_directory(directory or default_directory())
        except DirectoryRefused as exc:
            _log.warning("processes for suspects are counted for this worker only: %s", exc)
            self._private = tempfile.mkdtemp(prefix="holdfast-")
            self._directory = open_directory(Path(self._private))

    def acquire(self) -> int | None:
        """A descriptor of a free lock, which is held until its last copy is closed; None if all are held."""
        locks = (_acquire(name, self._directory, os.O_CREAT) for name in self._names)
        return next((lock for lock in locks if lock is not None), None)

    def close(self) -> None:
        """Remove the files of free locks; those that are held stay so."""
        for name in self._names:
            remove_free_lock(name, self._directory)
        os.close(self._directory)
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)


def remove_free_lock(name: str, directory: int) -> None:
    """Remove the file of a lock that no process has. One that has opened it meanwhile makes a new file."""
    with suppress(FileNotFoundError):
        if (lock := _acquire(name, directory)) is not None:
            try:
                os.unlink(name, dir_fd=directory)
            finally:
                os.close(lock)


def _acquire(name: str, directory: int, create: int = 0) -> int | None:
    """A descriptor of the locked file; None if another process has the lock."""
    while True:
        lock = os.open(name, os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return lock
        except OSError as exc:
            os.close(lock)
            if isinstance(exc, BlockingIOError):
                return None
            raise
        # Another process has removed the file since it was opened.
        os.close(lock)
