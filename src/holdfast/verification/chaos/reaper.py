"""Cleans up after a chaos run that was killed: ends its processes, unmounts its disks, deletes its data. Logs stay.

A process of its own that waits for the end of its input, which the system closes however the run ends. Should it be
killed as well, the next run finds the record and does its work: `clear_stale`. Nothing of holdfast is imported here:
it is up at once, and needs nothing that could be broken.
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
_FAREWELL: Final = b"done"
#: Somebody may be about to start, between a fork and its first instruction: so many looks in a row find nobody.
_QUIET_LOOKS: Final = 3
_LOOK_S: Final = 0.1
_GIVE_UP_S: Final = 20.0


class RunRecord(TypedDict):
    """What belongs to a run."""

    owner: str
    folder: str
    data: list[str]


class Reaper:
    """Watches over the run of this process in `folder`, until `release`."""

    def __init__(self, folder: Path, data: Sequence[Path]) -> None:
        """`folder`: that of all logs; `data`: what is to be deleted, disks that are mounted there included."""
        claim = RunRecord(owner=_mark(os.getpid()), folder=str(folder.resolve()), data=list(map(str, data)))
        number, name = tempfile.mkstemp(prefix=_PREFIX)
        with os.fdopen(number, "w") as file:
            json.dump(claim, file)
        self._record = Path(name)
        # In a session of its own: whoever kills our process group does not mean it.
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
        """All is cleaned up: it goes. May be repeated."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(_FAREWELL)
            self._process.stdin.close()
        self._process.wait()
        self._record.unlink(missing_ok=True)


def reap_stale(folder: Path | None = None) -> list[str]:
    """Clean up after runs that are dead, and whose guardians are, too. Returns the folders of their logs."""
    found = []
    for record in Path(folder or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        claim = _read(record)
        if claim is not None and not _lives(claim["owner"]):
            _clear(record)
            found.append(claim["folder"])
    return found


def processes_of(folder: str) -> list[int]:
    """Those whose output and errors both go into this folder: the programs and servers of the run there.

    Asked of the system, not remembered: so nobody is left out who was started a moment ago, or by one of them.
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
    claim = _read(record)
    if claim is None:
        return
    _end(claim["folder"])
    for mount in _mounts_in([claim["folder"], *claim["data"]]):
        # Lazily: somebody who looks into the folder must not keep it here for ever.
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
    for path in claim["data"]:
        shutil.rmtree(path, ignore_errors=True)
    record.unlink(missing_ok=True)


def _end(folder: str) -> None:
    give_up_at, quiet = time.monotonic() + _GIVE_UP_S, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < give_up_at:
        numbers = processes_of(folder)
        quiet = 0 if numbers else quiet + 1
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _mounts_in(folders: Sequence[str]) -> list[str]:
    """Disks of chaos runs there, the innermost first."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    names = [row[1].encode().decode("unicode_escape") for row in rows if row[0] == "holdfast-chaos"]
    return [name for name in reversed(names) if any(f"{name}/".startswith(f"{folder}/") for folder in folders)]


def _read(record: Path) -> RunRecord | None:
    """What it says; nothing if it is not ours: it names what is to be deleted."""
    with suppress(OSError, ValueError):
        file = os.open(record, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(file) as text:
            if os.fstat(file).st_uid == os.geteuid():
                claim: RunRecord = json.load(text)
                return claim
    return None


def _mark(pid: int) -> str:
    """Of one process and no other, as numbers of processes come again. Nothing if there is none."""
    with suppress(OSError):
        begun = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Numbers mean something within their own space only: containers may share a /tmp.
        return f"{pid} {begun[19]} {os.readlink('/proc/self/ns/pid')}" if begun[0] != "Z" else ""
    return ""


def _lives(mark: str) -> bool:
    """Whether it does, or may: in another space nobody knows."""
    pid, _, rest = mark.partition(" ")
    return not rest.endswith(os.readlink("/proc/self/ns/pid")) or _mark(int(pid)) == mark


def _watch(record: Path, stream: IO[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if stream.read() != _FAREWELL:
        _clear(record)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), sys.stdin.buffer)
