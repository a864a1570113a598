"""Find, start, pause, kill and restart redis-server and postgres processes.

A server is started on a free port and keeps its port and folder, so that it can be killed and started again
under the same address. `find_redis` and `find_postgres` raise `UsageError` with the remedy if there is no binary.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, Final, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T")

READY_WITHIN_S: Final = 60.0
#: Poll interval while a server starts or ends.
_POLL_S: Final = 0.01


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where an event loop is already running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


class ServerProcess:
    """One server process on its own port."""

    #: The signal for a clean shutdown.
    _stop_signal = signal.SIGTERM
    _ready_within_s = READY_WITHIN_S

    def __init__(self, binary: Path, folder: Path, options: Mapping[str, str] | None = None) -> None:
        self.binary = binary
        self.folder = folder
        self.options = dict(options or {})
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def ended(self) -> int | None:
        """Exit code of a process that ended by itself; None while it runs, and after `stop` or `kill`."""
        return None if self._process is None else self._process.poll()

    @property
    def started(self) -> bool:
        """Whether there is a process: running, or ended by itself."""
        return self._process is not None

    def reset(self) -> None:
        """Clear the state of a process that ended by itself, so that it can be started again."""
        self._process = None
        self._paused = False

    def answers(self) -> bool:
        """Whether it answers now, in its own protocol."""
        return self._process is not None and self._answers()

    def start(self) -> None:
        """Start it and wait until it answers in its own protocol."""
        with self._log_file.open("ab") as log:
            self._process = self._launch(log)
        self._wait_ready()

    def stop(self) -> None:
        """Shut it down cleanly. Safe to call when it does not run."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(READY_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """kill -9: no clean shutdown, no last save."""
        process = self._running()
        process.kill()
        process.wait()
        self._process = None
        self._paused = False

    def pause(self) -> None:
        """SIGSTOP: it still accepts connections, but answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        # macOS has waitid only since Python 3.13.
        if sys.platform == "linux":
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        if self._paused:
            os.kill(self.pid, signal.SIGCONT)
            self._paused = False

    def restart(self) -> None:
        """Stop and start again, with the same port and folder."""
        self.stop()
        self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the server on port {self.port} is not running")
        return self._process

    def _wait_ready(self) -> None:
        process, deadline = self._running(), monotonic() + self._ready_within_s
        while not self._answers():
            if monotonic() > deadline:
                raise TimeoutError(f"no answer on port {self.port} within {self._ready_within_s} s\n{self._log()}")
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"{self.binary} ended with {process.returncode} during start\n{self._log()}")

    @property
    def _log_file(self) -> Path:
        return self.folder / "server.log"

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace")[-2000:]

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class RedisServer(ServerProcess):
    """`redis-server`."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().start()

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        arguments = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(self.folder), **self.options}
        command = [str(self.binary), *(word for key, value in arguments.items() for word in (f"--{key}", value))]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=READY_WITHIN_S) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class PostgresServer(ServerProcess):
    """`postgres`, with a separate folder that user postgres can access. Call `remove` at the end."""

    #: Fast shutdown: does not wait for clients to disconnect.
    _stop_signal = signal.SIGINT

    def __init__(
        self, binary: Path, options: Mapping[str, str] | None = None, *, fsync: bool = True, parent: Path = Path("/tmp")
    ) -> None:
        # pytest's folders are closed to other users, and PostgreSQL refuses to run as root.
        super().__init__(binary, Path(tempfile.mkdtemp(prefix="holdfast-postgres-", dir=parent)), options)
        self._account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        if not fsync:
            self.options = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"} | self.options
        if self._account is not None:
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)

    @property
    def url(self) -> str:
        """URL of the database `postgres`."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        if not self.data.exists():
            self._initialise()
        super().start()

    def kill(self) -> None:
        """kill -9 of all its processes, as if the machine had failed."""
        children = _children(self.pid)
        super().kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # A child that still holds the shared memory would keep the server from starting again.
        deadline = monotonic() + READY_WITHIN_S
        while any(map(_is_alive, children)) and monotonic() < deadline:
            sleep(_POLL_S)

    def pause(self) -> None:
        """SIGSTOP to all its processes: connections stay open, requests get no answer."""
        super().pause()
        for child in _children(self.pid):
            os.kill(child, signal.SIGSTOP)

    def resume(self) -> None:
        if self._paused:
            for child in _children(self.pid):
                os.kill(child, signal.SIGCONT)
        super().resume()

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Execute one statement outside a transaction."""
        in_own_loop(lambda: self._execute(statement, database))

    def remove(self) -> None:
        """Stop it and delete its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _execute(self, statement: str, database: str) -> None:
        import asyncpg  # not needed to start Redis only

        connection = await asyncpg.connect(self.url_of(database), timeout=READY_WITHIN_S)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _initialise(self) -> None:
        words = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        with self._log_file.open("ab") as log:
            done = self._spawn([str(self.binary.with_name("initdb")), "-D", str(self.data), *words], log)
        if done.wait():
            raise RuntimeError(f"initdb ended with {done.returncode}\n{self._log()}")

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        arguments = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            "dynamic_shared_memory_type": "mmap",
            **self.options,
        }
        words = [word for key, value in arguments.items() for word in ("-c", f"{key}={value}")]
        return self._spawn([str(self.binary), "-D", str(self.data), "-p", str(self.port), *words], log)

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        plain: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": self.folder}
        if self._account is None:
            return subprocess.Popen(command, **plain)
        account = self._account
        return subprocess.Popen(command, user=account.pw_uid, group=account.pw_gid, extra_groups=[], **plain)

    def _answers(self) -> bool:
        """Send a startup message; true if the reply is an authentication request, not "is starting up"."""
        parameters = b"user\0postgres\0database\0postgres\0\0"
        hello = (len(parameters) + 8).to_bytes(4) + (3 << 16).to_bytes(4) + parameters
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=READY_WITHIN_S) as connection:
                connection.sendall(hello)
                answered = connection.recv(1) == b"R"
                connection.sendall(b"X\0\0\0\4")
                return answered
        except OSError:
            return False


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


#: Searched after PATH. `*` is a release number: the newest one first.
_FOLDERS: Final = ("/usr/bin", "/usr/local/bin", "/opt/redis/bin", "/usr/lib/postgresql/*/bin", "/opt/homebrew/bin")


def find_redis(given: Path | None = None) -> Path:
    """`redis-server`: the given one, else the first on PATH or in the usual folders. Raises `UsageError`."""
    if given is not None:
        if not given.is_file():
            raise UsageError(f"no redis-server at {given}; pass another path with --redis-server")
        return given
    found = _find("redis-server")
    if found is None:
        raise UsageError("redis-server not found; run `apt-get install redis-server`, or pass --redis-server PATH")
    return found


def find_postgres() -> Path:
    """`postgres` with `initdb` in the same folder. Raises `UsageError`."""
    # Debian's `postgres` is not on PATH; a link there may have no `initdb` next to it.
    found = next((each for each in _candidates("postgres") if each.with_name("initdb").exists()), None)
    if found is None:
        raise UsageError("no postgres with initdb in the same folder found; run `apt-get install postgresql`")
    return found


def _find(name: str) -> Path | None:
    return next(_candidates(name), None)


def _candidates(name: str) -> Iterator[Path]:
    on_path = shutil.which(name)
    if on_path is not None:
        yield Path(on_path).resolve() if name == "postgres" else Path(on_path)
    for folder in _FOLDERS:
        base, star, rest = folder.partition("*")
        matches = Path(base).glob("*" + rest) if star else [Path(folder)]
        for match in sorted(matches, key=_release, reverse=True):
            if (match / name).is_file():
                yield match / name


def _release(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]
