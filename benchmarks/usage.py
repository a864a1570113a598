"""What a process has used, asked by itself or by another one."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def cpu_s() -> float:
    """User and system time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def process_cpu_s(pid: int) -> float:
    """User and system time of another process, its ended and awaited children included."""
    # The name in brackets may hold anything; the numbers come after it.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")


def tree_cpu_s(pid: int) -> float:
    """The same of a server that forks: itself, children that run, children that have ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0.0
    for child in children:
        try:
            total += process_cpu_s(int(child))
        except FileNotFoundError:
            # Ended just now: its time is with its parent's.
            continue
    return total + process_cpu_s(pid)


def descendants(pid: int) -> list[int]:
    """Everything that it has forked and that still runs, children before theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def scheduled(pid: int) -> tuple[int, int]:
    """How long the first thread of a process has run, and could have run but waited for a core, in ns."""
    ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran_ns), int(waited_ns)
