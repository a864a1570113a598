"""Reads /proc: the children of a process, and whether a process still runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Fields of /proc/PID/stat after the name, which may contain any character.
_STATE, _STARTED_AT = 0, 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid and its start time: pids are reused, within minutes on a busy machine."""

    pid: int
    started_at: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the process that has this pid now. Raises `ProcessLookupError` if there is none."""
        return cls(pid, _stat(pid)[_STARTED_AT])

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Parse the output of `str`, of this process or another one."""
        pid, started_at = text.split()
        return cls(int(pid), started_at)

    def __str__(self) -> str:
        return f"{self.pid} {self.started_at}"

    def is_running(self) -> bool:
        """Return False for zombies: ended processes whose parent has not waited for them."""
        try:
            stat = _stat(self.pid)
        except ProcessLookupError:
            return False
        return stat[_STATE] != "Z" and stat[_STARTED_AT] == self.started_at


def children(pid: int) -> list[ProcessId]:
    """Return the children that the main thread of a process has started and that still run."""
    found: list[ProcessId] = []
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found.append(ProcessId.of(int(word)))
        except ProcessLookupError:
            continue
    return found


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"there is no process {pid}") from None
