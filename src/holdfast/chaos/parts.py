"""The parts of a deployment: processes that can be hurt one at a time, and brought back.

Programs of holdfast's own are started as an operator would start them, with `python -m holdfast`, and are held to what
is promised: SIGTERM ends them in time, with exit code 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

import holdfast
from holdfast.chaos.disks import Disk
from holdfast.chaos.model import Kind
from holdfast.chaos.proxy import Proxy
from holdfast.chaos.redis_nodes import quiet_port
from holdfast.chaos.servers import PostgresServer, ServerProcess

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

    def __init__(self, name: str, process: ServerProcess, kinds: frozenset[Kind], disk: Disk | None = None) -> None:
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
            self.process.forget()
        if code is not None or not self.process.started:
            self.process.start()
        else:
            self.process.resume()
        return code

    def end(self) -> None:
        """For good, whatever state it is in."""
        if self.process.ended is not None:
            self.process.forget()
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
