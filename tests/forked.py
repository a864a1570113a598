"""`holdfast …` as a separate process, without the half second that Python takes to load the program.

One process loads it and forks for each call. The copy becomes a child of the test, which can wait for it, signal it,
stop it and kill it like any other. It has its own arguments, folder, environment and files. It does not detect that a
module is missing or cannot be loaded, and does not run at a terminal: other tests start `python -m holdfast` for that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import holdfast

#: First arguments of a call that can be forked.
PROGRAM: Final = (sys.executable, "-m", "holdfast")
_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCE: Final = str(Path(holdfast.__file__).resolve().parent.parent)
_REQUEST_BYTES: Final = 1024 * 1024
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Modules that the commands load when they are called.
_LOADED: Final = (
    "uvloop",
    "holdfast.engine.redis.engine",
    "holdfast.engine.sqlite.engine",
    "holdfast.ledger.sqlite.ledger",
    "holdfast.ledger.postgres.ledger",
    "holdfast.ledger.sqlite.ledger",
    "holdfast.worker.worker",
    "holdfast.upkeep",
)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Like `subprocess.Popen`. Forks if the command is `PROGRAM` and the internals of `Popen` are the known ones."""
    forks = tuple(command[:3]) == PROGRAM and sys.platform == "linux" and sys.version_info[:2] == (3, 11)
    return _Forked(list(command), **options) if forks else subprocess.Popen(command, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, with its output as text."""
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class _Forked(subprocess.Popen[Any]):
    """A process that is started by the fork server; only the start differs from `Popen`."""

    def _execute_child(self, args: list[str], *more: Any) -> None:
        # In the order of `Popen`: `cwd`, `env`, both ends of three pipes (-1: no pipe), `start_new_session`.
        folder, environment, pipes, new_session = more[4], more[5], more[9:15], more[20]
        request = {
            "words": args[3:],
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "new_session": bool(new_session),
        }
        files = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _get_fork_server().fork(request, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _ForkServer:
    """Client of the process that forks. The process ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": _SOURCE},
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        with self._lock:
            # The kernel gives an orphan to its nearest ancestor that is a subreaper: this process during the fork.
            _set_subreaper(True)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], files)
                answer = self._channel.recv(32)
            finally:
                _set_subreaper(False)
        assert answer, "the fork server has ended"
        return int(answer)

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


@cache
def _get_fork_server() -> _ForkServer:
    return _ForkServer()


def _set_subreaper(enabled: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# In the fork server ----------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Fork for each request until the channel is closed. Also returns in each copy, when its program has ended."""
    _load()
    # Ctrl-C at a terminal is for the test process only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 3)
        if not message:
            return
        child = _fork_orphan()
        if child is None:
            _run_program(json.loads(message), files)
            return
        for file in files:
            os.close(file)
        channel.send(str(child).encode())


def _load() -> None:
    from holdfast.cli.program import program

    program()
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork_orphan() -> int | None:
    """Return the pid of the new process, whose parent has already ended; None in the new process."""
    reading, writing = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        child = os.fork()
        if not child:
            return None
        os.write(writing, str(child).encode())
        os._exit(0)
    child = int(os.read(reading, 32))
    os.close(reading)
    os.close(writing)
    os.waitpid(intermediate, 0)
    return child


def _run_program(request: dict[str, Any], files: list[int]) -> None:
    """Run the program with the arguments, folder, environment and files of the request."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Replaces the fork server's own entries: its folder and the sources.
    sys.path[:2] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = request["words"]
    runpy.run_module("holdfast", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
