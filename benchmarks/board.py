"""Counters in shared memory: tasks count themselves, and the parent reads the counters without calling the store.

One row per worker process. Instants are `time.monotonic_ns`, which all processes of a Linux machine share.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Final

from benchmarks.usage import cpu_s

ROWS: Final = 4
_COUNT, _FIRST, _LAST, _CELLS = 0, 1, 2, 8
_BYTES: Final = ROWS * _CELLS * 8


class Board:
    """The parent's view of all rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_BYTES))
        self._cells = _map(path)

    def clear(self) -> None:
        """Reset all counters. No worker may be counting."""
        for index in range(ROWS * _CELLS):
            self._cells[index] = 0

    @property
    def done(self) -> int:
        """Executions so far, of all workers."""
        return sum(self._cells[row * _CELLS + _COUNT] for row in range(ROWS))

    @property
    def span_s(self) -> float:
        """From the first execution anywhere to the last one."""
        return (self.last_ns - self.first_ns) / 1e9

    @property
    def first_ns(self) -> int:
        """The first execution anywhere; 0 before it."""
        return min((self._cells[row + _FIRST] for row in self._used), default=0)

    @property
    def last_ns(self) -> int:
        """The last execution so far; 0 before the first."""
        return max((self._cells[row + _LAST] for row in self._used), default=0)

    @property
    def _used(self) -> list[int]:
        return [row * _CELLS for row in range(ROWS) if self._cells[row * _CELLS + _COUNT]]


class Gauge:
    """One worker's row, and the CPU time at its first execution: start-up is not drain."""

    def __init__(self, path: Path, row: int) -> None:
        self._cells = _map(path)[row * _CELLS : (row + 1) * _CELLS]
        self._cpu_at_first = 0.0

    def begin(self) -> None:
        """Record the start of the first job."""
        self._cells[_FIRST] = time.monotonic_ns()
        self._cpu_at_first = cpu_s()

    def tick(self, count: int = 1) -> None:
        """Count executed jobs."""
        cells = self._cells
        if not cells[_FIRST]:
            self.begin()
        cells[_COUNT] += count
        cells[_LAST] = time.monotonic_ns()

    @property
    def cpu_s(self) -> float:
        """CPU time since the first execution; 0 before."""
        return cpu_s() - self._cpu_at_first if self._cells[_COUNT] else 0.0


def _map(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
