"""Parts of a deployment under chaos: processes, their disks, and the kinds of faults.

`Program` starts holdfast as an operator would, with `python -m holdfast`. It records a defect if SIGTERM does not end
the process in time with exit code 0.

`Disk` is a small `tmpfs` under a server's data that can be filled and freed. Only root may mount one; otherwise the
folder is a plain one, which cannot be filled, and `why_not` gives the reason.

`FaultKind`, `Fault` and `FaultResult` describe the faults, their targets and their results.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from math import inf
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

import holdfast
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.redis_nodes import quiet_port
from holdfast.verification.chaos.servers import PostgresServer, ServerProcess

SIZE_BYTES: Final = 4 * 1024**3
#: Free space left after shrinking, which the ballast then fills: the server may write in the meantime.
_MARGIN_BYTES: Final = 1024**2
_BLOCK: Final = b"\0" * 4096


class Disk:
    """A disk to `mount`, `fill`, `free` and `unmount`. Every method may be repeated."""

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
        """Create the folder, on a separate disk if the process may mount one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._mounted:
            return
        if os.geteuid() != 0:
            self.why_not = "only root can mount a disk to fill"
            return
        error = _call("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes},mode=0777", "holdfast-chaos", self.folder)
        self._mounted = not error
        self.why_not = f"cannot mount a disk to fill: {error}" if error else ""

    def fill(self) -> None:
        """Leave no free space. Existing data can still be overwritten."""
        if self.why_not:
            raise RuntimeError(self.why_not)
        # Shrunk first: filling the full size would use that much memory.
        used = _used_bytes(self.folder)
        self._resize(used + _MARGIN_BYTES)
        with suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while True:
                ballast.write(_BLOCK)

    def free(self) -> None:
        """Restore the free space."""
        if self._mounted:
            self._resize(self._size_bytes)
            self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Unmount the disk; its data is deleted."""
        if self._mounted:
            # Lazily if need be: another process with an open file there must not keep the disk mounted.
            error = _call("umount", self.folder) and _call("umount", "-l", self.folder)
            if error:
                raise OSError(f"{self.folder} is still mounted: {error}; run `umount {self.folder}`")
            self._mounted = False
            self.why_not = "its disk is not mounted"

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def _resize(self, size_bytes: int) -> None:
        if error := _call("mount", "-o", f"remount,size={size_bytes}", self.folder):
            raise OSError(f"cannot resize {self.folder}: {error}")


def _used_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _call(*words: str | Path) -> str:
    """Run a command. Returns its error, or an empty string on success."""
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=30, check=False)
    except OSError as exc:
        return str(exc)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{words[0]} ended with {done.returncode}"


class FaultKind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """kill -9, then started again."""
    STOP = "stop"
    """SIGSTOP, then SIGCONT later, sometimes after more than a lease."""
    RESTART = "restart"
    """Stopped as an operator would, then started again."""
    CUT = "cut"
    """All connections to it are cut once."""
    SLOW = "slow"
    """Every reply is delayed."""
    STALL = "stall"
    """Connections stay open, no data passes."""
    LOSE_REPLY = "lose-reply"
    """The request is carried out; its reply is dropped and the connection cut."""
    FILL = "fill"
    """The disk under its data is full."""
    REWIND = "rewind"
    """Killed, and started with a copy of its data that was made some seconds before."""
    FAIL_OVER = "fail-over"
    """A master is killed with kill -9, and its replica is promoted (Sentinel, Cluster)."""
    HAND_OVER = "hand-over"
    """A planned fail-over from a master to its replica (Sentinel, Cluster)."""
    HANG = "hang"
    """A master gets SIGSTOP until its replica is promoted, then SIGCONT (Sentinel, Cluster)."""
    OUTAGES = "outages"
    """Killed or stopped three times in a row, once for more than a lease (a single Redis)."""
    CRASH = "crash"
    """A job ends its worker, and then every process that runs it; other jobs run there at the same time."""


class Fault(msgspec.Struct, frozen=True):
    """One planned fault. `at`: the share of all jobs accepted when it starts (0 to 1)."""

    number: int
    at: float
    kind: FaultKind
    #: The name of a part: `worker-1`, `upkeep-1`, `server-1`, `redis` (`redis-2` …), `postgres`.
    target: str
    #: Duration, for kinds that have one.
    seconds: float = 0.0


class FaultResult(msgspec.Struct, frozen=True):
    """One fault as it happened."""

    fault: Fault
    #: Jobs accepted when it started.
    accepted: int
    #: Wall clock times of its start and end; it ends when the servers it affected have rejoined.
    began_at: float = 0.0
    ended_at: float = 0.0
    #: Recovery time: from the end of this fault, and of those that started with it, until a job submitted then had
    #: ended. -1 after the timeout.
    recovered_s: float = -1.0
    #: Why it was not injected; empty if it was.
    skipped: str = ""


T = TypeVar("T")

SOURCE: Final = Path(holdfast.__file__).resolve().parent.parent
#: A drain may have to wait for a store that is unreachable at the time.
DRAINED_WITHIN_S: Final = 30.0
_STARTED_WITHIN_S: Final = 60.0
_TRACEBACK: Final = "Traceback (most recent call last)"


class Program(ServerProcess):
    """`holdfast COMMAND …` in a separate process group, with its log in `folder`."""

    _ready_within_s = _STARTED_WITHIN_S

    def __init__(self, name: str, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(Path(sys.executable), folder)
        self.name = name
        self._words = words
        self._environment = dict(environment)
        self._log_begins = 0
        #: Unexpected exits.
        self.defects: list[str] = []
        #: When a fault or a shutdown began to end each of its processes; infinite while it runs.
        self.ends_at: dict[int, float] = {}

    def start(self) -> None:
        self._log_begins = self._log_file.stat().st_size if self._log_file.exists() else 0
        super().start()

    def kill(self) -> None:
        self.ends_at[self.pid] = time.time()
        super().kill()

    def stop(self) -> None:
        """Send SIGTERM. Records a defect if the process does not end in time with exit code 0."""
        if self._process is None or self._process.poll() is not None:
            self._process = None
            return
        self.ends_at[self.pid] = time.time()
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
        """Unexpected errors in its log: message and exception.

        Failed attempts are left out: tasks fail on purpose here, and the checks verify each job by its history.
        """
        if not self._log_file.exists():
            return []
        lines = self._log_file.read_text(errors="replace").split("\n")
        return [_summarise(line) for line in lines if _TRACEBACK in line and not _is_failed_attempt(line)]

    @property
    def _log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [str(self.binary), "-m", "holdfast", *self._words]
        # In its own group: Ctrl-C at the terminal must reach only the chaos command.
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.ends_at[process.pid] = inf
        return process

    def _answers(self) -> bool:
        with self._log_file.open("rb") as log:
            log.seek(self._log_begins)
            # A process for lost jobs, also of a worker that was killed before, writes to the same log.
            return any(b" started on " in line and b"isolated@" not in line for line in log)


class WebProgram(Program):
    """`holdfast serve` on its own port."""

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
    """PostgreSQL with its data on a `Disk` and its log outside it, where there is space."""

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

    def write_errors(self) -> int:
        """Number of writes that failed for lack of space, according to its log."""
        return self._log_file.read_bytes().count(b"No space left on device")

    def remove(self) -> None:
        self.stop()
        self.disk.unmount()
        super().remove()

    @property
    def _log_file(self) -> Path:
        return self._log_path


class Part:
    """One process of the deployment, and the faults that can be injected into it."""

    def __init__(
        self, name: str, process: ServerProcess, kinds: frozenset[FaultKind], disk: Disk | None = None
    ) -> None:
        self.name = name
        self.process = process
        self.kinds = kinds
        self.disk = disk
        #: Its connections to other parts.
        self.proxies: list[Proxy] = []
        #: Held while a fault is injected: one fault at a time, and an exit during it is expected.
        self.fault_lock = asyncio.Lock()
        #: End of the last fault, by the monotonic clock.
        self.hurt_until = 0.0

    @property
    def group(self) -> str:
        """Name of its group of like parts: `worker` for `worker-2`."""
        return group_of(self.name)

    def revive(self) -> int | None:
        """Resume it, or start it if it does not run. Returns the exit code if it had ended by itself."""
        code = self.process.ended
        if code is not None:
            self.process.reset()
        if code is not None or not self.process.started:
            self.process.start()
        else:
            self.process.resume()
        return code

    def end(self) -> None:
        """End it, even if it is paused or has already ended."""
        if self.process.ended is not None:
            self.process.reset()
        self.process.stop()


def _is_failed_attempt(line: str) -> bool:
    """Whether the line is a worker's log record of a failed attempt."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return isinstance(record, dict) and record.get("logger") == "holdfast.worker" and "error_type" in record


def _summarise(line: str) -> str:
    """Message and exception of a log line; the line itself if it is not a log record."""
    try:
        record = msgspec.json.decode(line)
        return f"{record['message']}: {record['stack'].strip().splitlines()[-1]}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return line.strip()


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work` to its end and return its result.

    If the caller is cancelled meanwhile, raise the cancellation after that.
    """
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
        # Retrieved, so that asyncio does not log it; the cancellation takes precedence.
        task.exception()
    raise interrupted


async def do(verb: Callable[[], T]) -> T:
    """Run a blocking call to its end in a thread: the event loop serves the proxies."""
    return await to_its_end(asyncio.to_thread(verb))


def group_of(name: str) -> str:
    """The part's name without its number."""
    base, dash, number = name.rpartition("-")
    return base if dash and number.isdigit() else name


def kill_group(leader: int) -> bool:
    """Send SIGKILL to a process group. Returns whether it had any processes left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
