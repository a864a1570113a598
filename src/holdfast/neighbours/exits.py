"""Notice that a process has ended when it happens, where the system has process descriptors (Linux).

It only makes a check start sooner: whether the process has ended is for `liveness` to decide.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection
from typing import Final

#: Processes beyond this number are only checked once a second.
_MAX_PROCESSES: Final = 100


class ExitWatch:
    """The processes of some records. Use it on one event loop."""

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._descriptors: dict[str, int] = {}

    def add(self, name: str, pid: int) -> None:
        """Watch a process that runs. Can be repeated for the same name."""
        if sys.platform != "linux" or name in self._descriptors or len(self._descriptors) >= _MAX_PROCESSES:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            # It has ended, or the system has no process descriptors left.
            return
        self._descriptors[name] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._exited, name)

    def keep(self, names: Collection[str]) -> None:
        """Stop watching all others."""
        for name in self._descriptors.keys() - names:
            self._remove(name)

    def _exited(self, name: str) -> None:
        self._remove(name)
        self._on_exit()

    def _remove(self, name: str) -> None:
        descriptor = self._descriptors.pop(name)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
