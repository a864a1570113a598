"""The directory of process records: private to the user, in memory where the system has such a file system."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = Path("/dev/shm")


class DirectoryRefused(Exception):
    """The directory of process records cannot be used; the message says why, and what to do."""


def default_directory() -> Path:
    """Where the records of this user are."""
    shared = _SHARED_MEMORY
    parent = shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"holdfast-{os.geteuid()}"


def open_directory(path: Path) -> int:
    """Create the directory if it is missing; return a descriptor of it. Raises `DirectoryRefused`.

    Refuses one that another user could have written to.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise DirectoryRefused(f"cannot open {path}: {exc.strerror}; make it a directory with mode 0700") from exc
    found = os.fstat(directory)
    if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        return directory
    os.close(directory)
    if found.st_uid != os.geteuid():
        raise DirectoryRefused(f"{path} belongs to user {found.st_uid}; remove it")
    raise DirectoryRefused(f"{path} is open to other users; run chmod 700 {path}")
