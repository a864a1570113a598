"""The program on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.cli.harness import TIMEOUT_S, Shell

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r")


@dataclass
class Terminal:
    """A running program and what it has written so far."""

    process: subprocess.Popen[bytes]
    _screen: int
    raw: bytes = b""
    output: str = field(default="", init=False)

    def read_until(self, text: str) -> str:
        """Everything up to now, once this text is in it."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.output:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"no {text!r} in:\n{self.output}")
        return self.output

    def read_all(self) -> str:
        """Everything until it ends."""
        while self._read(TIMEOUT_S):
            pass
        return self.output

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._screen], [], [], max(0, timeout_s))
        try:
            chunk = os.read(self._screen, 65536) if ready else b""
        except OSError:  # Linux raises EIO when the other end is closed
            chunk = b""
        self.raw += chunk
        self.output = _ESCAPES.sub(b"", self.raw).decode(errors="replace")
        return bool(chunk)


@contextmanager
def terminal(
    shell: Shell, *words: str, width: int = 160, start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
) -> Iterator[Terminal]:
    """The program with stdout and stderr on a terminal of `width` columns; no variable sets the width."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in shell.environment.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    process = start(shell.command(*words), cwd=shell.folder, env=environment, stdin=end, stdout=end, stderr=end)
    os.close(end)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_lists_and_findings_are_coloured_tables(shell: Shell) -> None:
    job_id = shell.run("submit", "--force", "add", "[1]").stdout.strip()
    with terminal(shell, "jobs", "list") as screen:
        shown = screen.read_all()
    assert re.search(rf"{job_id} +add +default +queued", shown)
    assert b"\x1b[36mqueued" in screen.raw
    with terminal(shell, "jobs", "show", job_id) as screen:
        assert re.search(r"created +task add, queue default", screen.read_all())
    with terminal(shell, "doctor") as screen:
        assert re.search(r"clock +ok +", screen.read_all())


def test_json_is_plain_at_a_terminal_too(shell: Shell) -> None:
    shell.run("submit", "--force", "add", "[1]")
    with terminal(shell, "queues", "list", "--json") as screen:
        assert screen.read_all().startswith("[")
    assert b"\x1b" not in screen.raw


def test_watch_is_a_live_table_until_ctrl_c(shell: Shell) -> None:
    shell.run("submit", "--force", "add", "[1]")
    with terminal(shell, "jobs", "watch", "--interval", "0.1") as screen:
        screen.read_until("Ctrl-C to stop")
        assert re.search(r"queue +default\nqueued +1", screen.read_until("cancelled/s"))
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(TIMEOUT_S) == 0


def test_a_worker_logs_text_at_a_terminal(shell: Shell) -> None:
    with terminal(shell, "worker", "sample.py:app", "--name", "blue") as screen:
        # Where the line is broken depends on the length of its names.
        output = " ".join(screen.read_until("slow").split())
        assert "INFO" in output
        assert "tasks add, elsewhere, flaky, refuse, slow" in output
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(TIMEOUT_S) == 0
        assert "ended" in screen.read_until("drained")
