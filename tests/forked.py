"""`holdfast …` as a process of its own, without the half second that Python takes to load the program.

One process has loaded it, and forks for each call; the copy then becomes a child of the test, to be waited for,
signalled, stopped and killed as any other. It has its own arguments, folder, environment and files. What it does not
show is that a module is missing or cannot be loaded, and how it behaves at a terminal: for that there are tests which
start `python -m holdfast` itself.
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

#: How a call begins that can be forked.
PROGRAM: Final = (sys.executable, "-m", "holdfast")
_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCE: Final = str(Path(holdfast.__file__).resolve().parent.parent)
_REQUEST_BYTES: Final = 1024 * 1024
_PR_SET_CHILD_SUBREAPER: Final = 36
#: What the commands load when they are called.
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
    """As `subprocess.Popen`; forked if it is the program that is called, and `Popen` is as we know it from inside."""
    forks = tuple(command[:3]) == PROGRAM and sys.platform == "linux" and sys.version_info[:2] == (3, 11)
    return _Forked(list(command), **options) if forks else subprocess.Popen(command, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with its output as text."""
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class _Forked(subprocess.Popen[Any]):
    """Only the beginning differs."""

    def _execute_child(self, args: list[str], *more: Any) -> None:
        # As `Popen` passes them on: `cwd`, `env`, both ends of three pipes (-1: there is none), `start_new_session`.
        folder, environment, pipes, new_session = more[4], more[5], more[9:15], more[20]
        request = {
            "words": args[3:],
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "new_session": bool(new_session),
        }
        files = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _mother().fork(request, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Mother:
    """The process that forks, as seen from here. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": _SOURCE},
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        with self._lock:
            # An orphan goes to its nearest ancestor that takes orphans: for this moment, we do.
            _take_orphans(True)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], files)
                answer = self._channel.recv(32)
            finally:
                _take_orphans(False)
        assert answer, "the process that forks is gone"
        return int(answer)

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


@cache
def _mother() -> _Mother:
    return _Mother()


def _take_orphans(yes: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# In the other process --------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Fork at every request until nobody asks any more. Comes back in the copies too, at the end of the program."""
    _load()
    # Ctrl-C at a terminal is meant for the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        told, files, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 3)
        if not told:
            return
        child = _fork_orphan()
        if child is None:
            _become(json.loads(told), files)
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
    """The new process, whose parent has ended already; None in it."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        child = os.fork()
        if not child:
            return None
        os.write(writing, str(child).encode())
        os._exit(0)
    child = int(os.read(reading, 32))
    os.close(reading)
    os.close(writing)
    os.waitpid(between, 0)
    return child


def _become(request: dict[str, Any], files: list[int]) -> None:
    """The program, called so."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # In the place of what the process that forks was started with: its folder and the sources.
    sys.path[:2] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = request["words"]
    runpy.run_module("holdfast", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
