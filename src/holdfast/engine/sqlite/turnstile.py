"""A queue for the writers of several processes: whoever has written goes to the end of it.

SQLite's own busy handler sleeps and tries again, so that a busy process starves the others for seconds. Here two
file locks make a turnstile: only the holder of the first may wait for the second, and it is given up once the second
is had. A process that writes again at once finds the next one waiting in between. The kernel keeps the
queue, and frees both locks when a process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turnstile:
    """Not for several threads at once: one writer per process goes through it."""

    def __init__(self, database: Path) -> None:
        self._waiting = os.open(f"{database}-queue", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._writing = os.open(f"{database}-lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            os.close(self._waiting)
            raise

    def enter(self) -> None:
        """Wait for our turn."""
        fcntl.flock(self._waiting, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._writing, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._waiting, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Let the next one in."""
        fcntl.flock(self._writing, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._waiting)
        os.close(self._writing)


@contextmanager
def alone(database: Path) -> Iterator[None]:
    """Nobody else writes meanwhile: for a migration. Blocks. Not for a process that has a writer on this file."""
    turnstile = Turnstile(database)
    try:
        turnstile.enter()
        yield
    finally:
        # Closing gives the locks back, too.
        turnstile.close()
