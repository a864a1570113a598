"""Real servers for tests: found, started on free ports, killed, stopped and brought back.

A `RedisServer` keeps its port and folder for life, so that a fault test can kill it and start it again
under the same address. `find_server` says what to do about a server that is not there: fail in CI, skip elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Final

import pytest

from tools.servers import Server, find

READY_WITHIN_S: Final = 10.0
#: How long one look at a starting server may take, and the pause between two looks.
_LOOK_S: Final = 0.01


def find_server(server: Server) -> Path:
    """The server's binary; without it the test fails in CI, and is skipped elsewhere."""
    binary = find(server)
    if binary is not None:
        return binary
    message = f"{server.name} is not installed here; run: {server.how_to_install}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One `redis-server` process of our own, on a port of its own."""

    def __init__(self, binary: Path, folder: Path, options: Mapping[str, str] | None = None) -> None:
        self.binary = binary
        self.folder = folder
        self.options = dict(options or {})
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start it and wait until it answers PING."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(self.folder), **self.options}
        command = [str(self.binary), *(word for key, value in arguments.items() for word in (f"--{key}", value))]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait_ready()

    def stop(self) -> None:
        """End it as an operator would. Safe to call when it does not run."""
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(READY_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """kill -9: no farewell, no last save."""
        process = self._running()
        process.kill()
        process.wait()
        self._process = None
        self._paused = False

    def pause(self) -> None:
        """SIGSTOP: it still accepts connections, but answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        if self._paused:
            os.kill(self.pid, signal.SIGCONT)
            self._paused = False

    def restart(self) -> None:
        """Stop and start again: same port, same folder."""
        self.stop()
        self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the server on port {self.port} does not run")
        return self._process

    def _wait_ready(self) -> None:
        process, deadline = self._running(), monotonic() + READY_WITHIN_S
        while not self._answers():
            if monotonic() > deadline:
                raise TimeoutError(f"no PONG on port {self.port} within {READY_WITHIN_S} s\n{self._log()}")
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"{self.binary} ended with {process.returncode} while it started\n{self._log()}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=READY_WITHIN_S) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def _log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]
