"""The parent's end of a contestant's process: requests and replies are lines of JSON.

A child that dies, or does not answer in time, is a `ProbeFailed` with the end of its log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.usage import descendants

ROOT: Final = Path(__file__).resolve().parent.parent
ANSWER_WITHIN_S: Final = 180.0
_END_WITHIN_S: Final = 20.0

_numbers: Final = count(1)


class ProbeFailed(Exception):
    """One measurement failed; the others continue."""


class Child:
    """One process of one side. It starts at once, and is ready inside of `with`."""

    def __init__(
        self, module: str, role: str, spec: Mapping[str, Any], scratch: Path, python: str = sys.executable
    ) -> None:
        self._log = scratch / f"{module.rpartition('.')[2]}-{role}-{next(_numbers)}.log"
        self._buffer = b""
        command = [python, "-m", module, role, json.dumps(dict(spec))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                cwd=scratch,
            )

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a request; `answer` returns the reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._failed("ended by itself") from exc

    def ready(self) -> bool:
        """Whether an answer, or the end, has come."""
        assert self._process.stdout is not None
        return bool(self._buffer or select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + ANSWER_WITHIN_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(f"did not answer within {ANSWER_WITHIN_S:.0f} s")
            if not (part := os.read(pipe, 1 << 16)):
                raise self._failed("ended by itself")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """The end of its input ends the child; one that stays is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it with -9, and all that it has forked, in the middle of whatever they do."""
        pids = [self._process.pid, *descendants(self._process.pid)]
        # The parent first: it must not replace a child that has just gone.
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        try:
            self.answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    @property
    def log_tail(self) -> str:
        """The end of what it has logged."""
        return self._log.read_text(errors="replace").strip()[-1500:]

    def _failed(self, reason: str) -> ProbeFailed:
        return ProbeFailed(f"a child process {reason}\n{self.log_tail}".strip())


def _environment() -> dict[str, str]:
    """The environment without holdfast's settings: the defaults are measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "PYTHONPATH": str(ROOT)}
