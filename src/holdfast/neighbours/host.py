"""Which host and which namespaces a process runs in: only within both does a pid identify a process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

import msgspec

PROC: Final = Path("/proc")
#: Fields of /proc/PID/stat after the name of the program, which may contain any character.
_STATE: Final = 0
_STARTED_AT: Final = 19


class Host(msgspec.Struct, frozen=True):
    """A boot of a host, and the namespaces of a process on it."""

    boot_id: str
    name: str
    #: Inode numbers. `time_namespace` is 0 on kernels without such namespaces.
    pid_namespace: int
    time_namespace: int


class ProcessStat(msgspec.Struct, frozen=True):
    """What /proc/PID/stat has about a process or a thread."""

    state: str
    #: Clock ticks between the boot and the start of the process; not affected by changes of the wall clock.
    started_at: int

    @property
    def has_ended(self) -> bool:
        """Whether it runs no code any more: a zombie, or removed."""
        return self.state in ("Z", "X", "x")


def read_host(proc: Path = PROC) -> Host | None:
    """The host of this process; None where its processes cannot be identified: without /proc, or with a foreign one."""
    try:
        # A /proc of another pid namespace shows this process under another pid, or not at all.
        if os.readlink(proc / "self") != str(os.getpid()):
            return None
        boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = (proc / "self/ns/pid").stat().st_ino
    except (OSError, ValueError):
        return None
    try:
        time_namespace = (proc / "self/ns/time").stat().st_ino
    except OSError:
        time_namespace = 0
    return Host(boot_id, socket.gethostname(), pid_namespace, time_namespace) if boot_id else None


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """State and start time of a process; None if they cannot be read."""
    return parse_stat(_read(f"{proc}/{pid}/stat"))


def parse_stat(data: bytes) -> ProcessStat | None:
    """The content of /proc/PID/stat; None if it is not valid."""
    fields = data.rpartition(b")")[2].split()
    if len(fields) <= _STARTED_AT or not fields[_STARTED_AT].isdigit() or len(fields[_STARTED_AT]) > 20:
        return None
    return ProcessStat(fields[_STATE].decode("latin-1"), int(fields[_STARTED_AT]))


def has_live_thread(pid: int, proc: Path = PROC) -> bool:
    """Whether a thread of the process other than its first may still run. Unreadable threads may."""
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return True
    for thread in threads:
        if thread == str(pid):
            continue
        stat = parse_stat(_read(f"{proc}/{pid}/task/{thread}/stat"))
        if stat is None or not stat.has_ended:
            return True
    return False


def _read(path: str) -> bytes:
    """The first bytes of a file of /proc; empty if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:
        return b""
    finally:
        os.close(file)
