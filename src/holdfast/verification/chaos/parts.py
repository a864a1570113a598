"""Parts of a deployment under chaos: processes, their disks, and the kinds of faults.

`Program` starts holdfast as an operator would, with `python -m holdfast`. It records a defect if SIGTERM does not end
the process in time with exit code 0.

`Disk` is a small `tmpfs` under a server's data that can be filled and freed. Only root may mount one; otherwise the
folder is a plain one, which cannot be filled, and `why_not` gives the reason.

`FaultKind`, `Fault` and `FaultResult` describe what is done to which part, and what came of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

import holdfast
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.redis_nodes import quiet_port
from holdfast.verification.chaos.servers import PostgresServer, ServerProcess

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


class FaultKind(StrEnum):
    """What can happen to a part of a deployment."""

    KILL = "kill"
    """kill -9, and started again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while: longer than a lease, sometimes."""
    RESTART = "restart"
    """Ended as an operator would, and started again."""
    CUT = "cut"
    """All connections to it are cut, once."""
    SLOW = "slow"
    """Every reply is held back for a while."""
    STALL = "stall"
    """Connections stay open, nothing passes."""
    LOSE_REPLY = "lose-reply"
    """It does what it was asked to; the reply is lost and the connection cut."""
    FILL = "fill"
    """The disk under its data is full."""
    FAIL_OVER = "fail-over"
    """A master dies by kill -9, and its replica takes its place (Sentinel, Cluster)."""
    HAND_OVER = "hand-over"
    """A master is asked to leave its place to its replica (Sentinel, Cluster)."""


class Fault(msgspec.Struct, frozen=True):
    """One fault, as planned. `at`: the share of all jobs that are accepted when it strikes (0 to 1)."""

    number: int
    at: float
    kind: FaultKind
    #: The name of a part: `worker-1`, `upkeep-1`, `server-1`, `redis` (`redis-2` …), `postgres`.
    target: str
    #: How long it lasts, for those that last.
    seconds: float = 0.0


class FaultResult(msgspec.Struct, frozen=True):
    """One fault, as it was."""

    fault: Fault
    #: Jobs that were accepted when it struck.
    accepted: int
    #: From when until when, by the clock; until the servers that it struck were joined again.
    began_at: float = 0.0
    over_at: float = 0.0
    #: From the moment that it, and what struck together with it, was over until a job submitted then had ended; -1 if
    #: it had not within the patience.
    recovered_s: float = -1.0
    #: Why it could not be done here; empty if it was.
    skipped: str = ""


T = TypeVar("T")

SOURCE: Final = Path(holdfast.__file__).resolve().parent.parent
#: A drain may have to wait for a store that is out of reach at the time.
DRAINED_WITHIN_S: Final = 30.0
_STARTED_WITHIN_S: Final = 60.0
_TRACEBACK: Final = "Traceback (most recent call last)"


class Program(ServerProcess):
    """`holdfast COMMAND …` in a process group of its own, with its log in `folder`."""

    _ready_within_s = _STARTED_WITHIN_S

    def __init__(self, name: str, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(Path(sys.executable), folder)
        self.name = name
        self._words = words
        self._environment = dict(environment)
        self._log_begins = 0
        #: What it did that it should not have done.
        self.defects: list[str] = []

    def start(self) -> None:
        self._log_begins = self._log_file.stat().st_size if self._log_file.exists() else 0
        super().start()

    def stop(self) -> None:
        """SIGTERM; a defect is noted if it does not end in time, or not well."""
        if self._process is None or self._process.poll() is not None:
            self._process = None
            return
        self.resume()
        self._process.terminate()
        try:
            code = self._process.wait(DRAINED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.defects.append(f"{self.name} had not ended {DRAINED_WITHIN_S:g} s after SIGTERM")
            self.kill()
            return
        if code:
            self.defects.append(f"{self.name} ended with exit code {code} after SIGTERM")
        self._process = None

    def tracebacks(self) -> list[str]:
        """What went wrong in it unexpectedly, by its log: what it says about it, and the error.

        Failed attempts are not: tasks fail on purpose here, and what became of each job is checked by its history.
        """
        if not self._log_file.exists():
            return []
        lines = self._log_file.read_text(errors="replace").split("\n")
        return [_trouble(line) for line in lines if _TRACEBACK in line and not _is_failed_attempt(line)]

    @property
    def _log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [str(self.binary), "-m", "holdfast", *self._words]
        # A group of its own: Ctrl-C at the terminal is for the one who runs all this.
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        with self._log_file.open("rb") as log:
            log.seek(self._log_begins)
            return b" started on " in log.read()


class WebProgram(Program):
    """`holdfast serve`, which answers on a port of its own."""

    def __init__(self, name: str, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name, words, folder, environment)
        self.port = quiet_port()
        self._words = [*words, "--port", str(self.port)]

    def _answers(self) -> bool:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            try:
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
            except (OSError, HTTPException):
                return False


class DiskPostgres(PostgresServer):
    """PostgreSQL with its data on a disk of its own, and its log elsewhere, where there is room for it."""

    _ready_within_s = 30.0

    def __init__(self, binary: Path, options: Mapping[str, str], log: Path) -> None:
        super().__init__(binary, options)
        self.port = quiet_port()
        self._log_path = log
        self.disk = Disk(self.folder / "disk")

    @property
    def data(self) -> Path:
        return self.disk.folder / "data"

    def start(self) -> None:
        self.disk.mount()
        if self._account is not None:
            os.chown(self.disk.folder, self._account.pw_uid, self._account.pw_gid)
        super().start()

    def complaints(self) -> int:
        """How often it had no room to write, by its log."""
        return self._log_file.read_bytes().count(b"No space left on device")

    def remove(self) -> None:
        self.stop()
        self.disk.unmount()
        super().remove()

    @property
    def _log_file(self) -> Path:
        return self._log_path


class Part:
    """One process of the deployment, and what can be done to it here."""

    def __init__(
        self, name: str, process: ServerProcess, kinds: frozenset[FaultKind], disk: Disk | None = None
    ) -> None:
        self.name = name
        self.process = process
        self.kinds = kinds
        self.disk = disk
        #: What passes between it and others.
        self.doors: list[Proxy] = []
        #: Held by whoever hurts it: one at a time, and meanwhile nobody takes its death for its own fault.
        self.in_trouble = asyncio.Lock()
        #: Until when somebody did; by the monotonic clock.
        self.hurt_until = 0.0

    @property
    def group(self) -> str:
        """Parts of one group are alike: `worker` for `worker-2`."""
        return group_of(self.name)

    def revive(self) -> int | None:
        """Awake and running. Returns the exit code if it had ended by itself."""
        code = self.process.ended
        if code is not None:
            self.process.reset()
        if code is not None or not self.process.started:
            self.process.start()
        else:
            self.process.resume()
        return code

    def end(self) -> None:
        """For good, whatever state it is in."""
        if self.process.ended is not None:
            self.process.reset()
        self.process.stop()


def _is_failed_attempt(line: str) -> bool:
    """Whether it is the worker's record of an attempt that failed."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return isinstance(record, dict) and record.get("logger") == "holdfast.worker" and "error_type" in record


def _trouble(line: str) -> str:
    """A line of the log, in short. A bare traceback is none of our logging: it is named as such."""
    try:
        record = msgspec.json.decode(line)
        return f"{record['message']}: {record['stack'].strip().splitlines()[-1]}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return line.strip()


async def to_its_end(work: Awaitable[T]) -> T:
    """Its result. Whoever is cancelled meanwhile is so only when it is over: it must not go on behind our back."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            interrupted = exc
    if interrupted is None:
        return task.result()
    if not task.cancelled():
        # Looked at, so that nobody complains about it; being cancelled matters more.
        task.exception()
    raise interrupted


async def do(verb: Callable[[], T]) -> T:
    """Something that blocks, to its end, apart from the event loop: the proxies live there."""
    return await to_its_end(asyncio.to_thread(verb))


def group_of(name: str) -> str:
    """The name without its number."""
    base, dash, number = name.rpartition("-")
    return base if dash and number.isdigit() else name


def kill_group(leader: int) -> bool:
    """kill -9 for what is left of a process group; whether there was anything."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
