"""Clean up after a chaos run that was killed: end its processes, unmount its disks, delete its data.

Logs are kept. The reaper is a separate process that waits for the end of its stdin, which the system closes however the
run ends. If the reaper is killed as well, the next run finds its record and cleans up: `reap_stale`. It imports nothing
from holdfast, so that it starts fast and does not depend on the code under test.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, TypedDict

_PREFIX: Final = "holdfast-chaos-run-"
_DONE: Final = b"done"
#: Consecutive polls that must find no process: one may be starting, between fork and exec.
_EMPTY_POLLS: Final = 3
_POLL_S: Final = 0.1
_TIMEOUT_S: Final = 20.0


class RunRecord(TypedDict):
    """A run's owner, log folder and data folders."""

    owner: str
    folder: str
    data: list[str]


class Reaper:
    """Cleans up after the run of this process in `folder`, unless `release` is called."""

    def __init__(self, folder: Path, data: Sequence[Path]) -> None:
        """`folder` has all logs; `data` are folders to delete, including disks mounted there."""
        run = RunRecord(owner=_mark(os.getpid()), folder=str(folder.resolve()), data=list(map(str, data)))
        number, name = tempfile.mkstemp(prefix=_PREFIX)
        with os.fdopen(number, "w") as file:
            json.dump(run, file)
        self._record = Path(name)
        # In a separate session: a signal to our process group must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self) -> None:
        """End the reaper, after the run itself has cleaned up. May be repeated."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(_DONE)
            self._process.stdin.close()
        self._process.wait()
        self._record.unlink(missing_ok=True)


def reap_stale(folder: Path | None = None) -> list[str]:
    """Clean up after killed runs whose reapers were killed as well. Returns their log folders."""
    found = []
    for record in Path(folder or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        run = _read(record)
        if run is not None and not _is_alive(run["owner"]):
            _clear(record)
            found.append(run["folder"])
    return found


def processes_of(folder: str) -> list[int]:
    """Processes of the run in this folder: those whose stdout and stderr both go to files there.

    Read from /proc instead of recorded, so that processes started just now, or by one of these, are included.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            number = int(entry.name)
            outputs = [os.readlink(entry / "fd" / str(each)) for each in (1, 2)]
            if number != os.getpid() and all(output.startswith(f"{folder}/") for output in outputs):
                found.append(number)
    return found


def _clear(record: Path) -> None:
    run = _read(record)
    if run is None:
        return
    _end(run["folder"])
    for mount in _mounts_in([run["folder"], *run["data"]]):
        # Lazily: another process with an open file there must not keep the disk mounted.
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
    for path in run["data"]:
        shutil.rmtree(path, ignore_errors=True)
    record.unlink(missing_ok=True)


def _end(folder: str) -> None:
    deadline, empty = time.monotonic() + _TIMEOUT_S, 0
    while empty < _EMPTY_POLLS and time.monotonic() < deadline:
        pids = processes_of(folder)
        empty = 0 if pids else empty + 1
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _mounts_in(folders: Sequence[str]) -> list[str]:
    """Disks of chaos runs mounted there, the innermost first."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    names = [row[1].encode().decode("unicode_escape") for row in rows if row[0] == "holdfast-chaos"]
    return [name for name in reversed(names) if any(f"{name}/".startswith(f"{folder}/") for folder in folders)]


def _read(record: Path) -> RunRecord | None:
    """The record; None if another user owns the file, since it names what is deleted."""
    with suppress(OSError, ValueError):
        file = os.open(record, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(file) as text:
            if os.fstat(file).st_uid == os.geteuid():
                run: RunRecord = json.load(text)
                return run
    return None


def _mark(pid: int) -> str:
    """Unique identity of a process, since pids are reused. Empty if it does not run."""
    with suppress(OSError):
        begun = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Pids are unique only within their namespace: containers may share a /tmp.
        return f"{pid} {begun[19]} {os.readlink('/proc/self/ns/pid')}" if begun[0] != "Z" else ""
    return ""


def _is_alive(mark: str) -> bool:
    """Whether the process runs, or may run: another pid namespace cannot be checked."""
    pid, _, rest = mark.partition(" ")
    return not rest.endswith(os.readlink("/proc/self/ns/pid")) or _mark(int(pid)) == mark


def _watch(record: Path, stream: IO[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if stream.read() != _DONE:
        _clear(record)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), sys.stdin.buffer)
