"""What slow jobs write down, so that a crash shows: who began, who ended, and when.

One line per beginning and end, appended in one write: what a killed process wrote before stays whole.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

#: What every slow job takes, and how many of them a worker has under way.
SLOW_S: Final = 0.050
AT_ONCE: Final = 10

_BEGAN, _ENDED = "began", "ended"


class Diary:
    """The jobs' end; many processes and threads may write to the same file."""

    def __init__(self, path: Path | str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def began(self, number: int) -> None:
        """The job has started."""
        self._write(_BEGAN, number)

    def ended(self, number: int) -> None:
        """The job has done all that it does."""
        self._write(_ENDED, number)

    def _write(self, what: str, number: int) -> None:
        os.write(self._file, f"{what} {number} {time.monotonic_ns()}\n".encode())


@dataclass(slots=True)
class Entries:
    """What a diary says so far. Instants are `time.monotonic_ns`."""

    began: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    #: Job → the first time that it ended.
    ended_ns: dict[int, int] = field(default_factory=dict)

    @property
    def under_way(self) -> int:
        """Begun, and not ended."""
        return self.began.total() - self.ended.total()


def read(path: Path) -> Entries:
    """All whole lines; nothing was written if there is no file."""
    entries = Entries()
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        what, number, at_ns = line.split()
        if what == _BEGAN:
            entries.began[int(number)] += 1
        else:
            entries.ended[int(number)] += 1
            entries.ended_ns.setdefault(int(number), int(at_ns))
    return entries
