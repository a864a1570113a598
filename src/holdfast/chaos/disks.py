"""A small disk of its own under a server's data, that can be full for a while.

It is a `tmpfs`, which only root may mount; where that is not allowed the folder is a plain one, and `why_not` says so.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

SIZE_BYTES: Final = 4 * 1024**3
#: What is left when the disk is shrunk, to be taken by the ballast: the server may write while we do it.
_MARGIN_BYTES: Final = 1024**2
_BLOCK: Final = b"\0" * 4096


class Disk:
    """`mount` it, `fill` and `free` it as often as you like, `unmount` it. Every verb may be repeated."""

    def __init__(self, folder: Path, size_bytes: int = SIZE_BYTES) -> None:
        self.folder = folder
        self._size_bytes = size_bytes
        self._mounted = False
        #: Why it cannot be filled; empty if it can.
        self.why_not = "its disk is not mounted"

    @property
    def full(self) -> bool:
        return self._ballast.exists()

    def mount(self) -> None:
        """The folder, on a disk of its own if we may."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._mounted:
            return
        if os.geteuid() != 0:
            self.why_not = "only root can mount a disk to fill"
            return
        said = _call("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes},mode=0777", "holdfast-chaos", self.folder)
        self._mounted = not said
        self.why_not = f"no disk could be mounted to fill: {said}" if said else ""

    def fill(self) -> None:
        """Not a byte is left. What is there already can still be written over."""
        if self.why_not:
            raise RuntimeError(self.why_not)
        # Shrunk first: to fill all of it would take as much memory.
        used = _used(self.folder)
        self._resize(used + _MARGIN_BYTES)
        with suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while True:
                ballast.write(_BLOCK)

    def free(self) -> None:
        """Room again."""
        if self._mounted:
            self._resize(self._size_bytes)
            self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """All that was on it is gone."""
        if self._mounted:
            # Lazily: somebody who looks into the folder must not keep it here for ever.
            said = _call("umount", self.folder) and _call("umount", "-l", self.folder)
            if said:
                raise OSError(f"{self.folder} is still mounted: {said}; run `umount {self.folder}`")
            self._mounted = False
            self.why_not = "its disk is not mounted"

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def _resize(self, size_bytes: int) -> None:
        if said := _call("mount", "-o", f"remount,size={size_bytes}", self.folder):
            raise OSError(f"{self.folder} cannot be resized: {said}")


def _used(folder: Path) -> int:
    room = os.statvfs(folder)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def _call(*words: str | Path) -> str:
    """What it had to complain about; empty if all went well."""
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=30, check=False)
    except OSError as exc:
        return str(exc)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{words[0]} ended with {done.returncode}"
