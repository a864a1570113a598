"""The demo's workers: real `holdfast worker` processes, as in production."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final, Self

APP: Final = "holdfast.demo.orders:app"
DRAINED_WITHIN_S: Final = 40


class Workers:
    """Starts them by name, kills one, ends them all when the block is left, however it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended_badly: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "holdfast", "worker", APP, "--name", name]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, incarnation: str) -> str:
        """kill -9 for the worker of this incarnation; returns its name."""
        name = next(name for name in self._processes if name in incarnation)
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        return name

    def check(self) -> None:
        """A worker that ended by itself is a bug: show its log."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise SystemExit(f"worker {name} ended with {process.returncode}:\n{self._log(name)}")

    def stop(self) -> None:
        """Drain them all: SIGTERM, and only if that does not help, kill."""
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            if _code(process) != 0:
                self.ended_badly.append(f"worker {name} ended with {process.returncode}:\n{self._log(name)}")
        self._processes.clear()

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]


def _code(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=DRAINED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
