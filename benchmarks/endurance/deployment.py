"""A deployment as a user has it: Redis with AOF, a ledger in PostgreSQL, two workers and upkeep, each a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from benchmarks.children import ROOT, ProbeFailed
from benchmarks.postgres import Postgres
from benchmarks.stores import RedisStore
from holdfast.verification.chaos.servers import free_port

APP: Final = "benchmarks.endurance.jobs:app"
WORKERS: Final = ("worker 1", "worker 2")
UPKEEP: Final = "upkeep"
_READY_WITHIN_S: Final = 30.0
_END_WITHIN_S: Final = 60.0
_POLL_S: Final = 0.05
_EXECUTED: Final = re.compile(r"^holdfast_task_process_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class Deployment:
    """Up inside of `with`. What should expire does so after `expire_s`."""

    def __init__(self, scratch: Path, expire_s: float) -> None:
        self._scratch = scratch
        self._expire_s = expire_s
        self._cleanup = ExitStack()
        self._ports = {name: free_port() for name in WORKERS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.redis = RedisStore(self._scratch / "redis", "everysec")
            stack.callback(self.redis.close)
            self.postgres = Postgres(self._scratch)
            stack.callback(self.postgres.close)
            self.postgres.start()
            self.ledger = self.postgres.database("endurance")
            self.ledger.reset()
            self._run("migrate", "migrate", "up")
            stack.callback(self._stop)
            for name in WORKERS:
                self._start(name, "worker", APP, "--metrics-port", str(self._ports[name]), "--log-level", "error")
            self._start(UPKEEP, "upkeep", APP, "--log-level", "error")
            self._until_ready()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def environment(self) -> dict[str, str]:
        """Default settings, but for how long things are kept."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "HOLDFAST_URL": self.redis.url,
            "HOLDFAST_LEDGER": self.ledger.url,
            "HOLDFAST_FINISHED_TTL_S": str(self._expire_s),
            "HOLDFAST_RESULT_TTL_S": str(self._expire_s),
            "HOLDFAST_IDEMPOTENCY_WINDOW_S": str(self._expire_s),
            "HOLDFAST_RETENTION_DAYS": str(2 * self._expire_s / 86_400),
        }

    def submitter(self, per_s: float, seconds: float) -> subprocess.Popen[bytes]:
        """A process that submits; its standard output says what, once it has ended."""
        command = [sys.executable, "-m", "benchmarks.endurance.submitter", str(per_s), str(seconds)]
        process = self._launch("submitter", command, subprocess.PIPE)
        self._cleanup.callback(_end, process)
        return process

    def executions(self) -> int:
        """What both workers have executed so far, by their metrics."""
        return sum(_executions(port) for port in self._ports.values())

    def died(self) -> str:
        """The process that ended unexpectedly and the end of its log; empty if none."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                return f"{name} ended with exit code {process.returncode}: {self._log(name)}"
        return ""

    def logged_errors(self) -> list[str]:
        """Errors in the logs of all processes; none are expected."""
        names = (*self.processes, "submitter")
        return [f"{name}: {text}" for name in names if (text := self._log(name))]

    def _start(self, name: str, *words: str) -> None:
        self.processes[name] = self._launch(name, [sys.executable, "-m", "holdfast", *words], subprocess.DEVNULL)

    def _launch(self, name: str, command: list[str], stdout: int) -> subprocess.Popen[bytes]:
        with (self._scratch / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=self.environment, cwd=self._scratch, stdout=stdout, stderr=log)

    def _run(self, name: str, *words: str) -> None:
        process = self._launch(name, [sys.executable, "-m", "holdfast", *words], subprocess.DEVNULL)
        if process.wait(_READY_WITHIN_S):
            raise ProbeFailed(f"holdfast {' '.join(words)}: {self._log(name)}")

    def _until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            if reason := self.died():
                raise ProbeFailed(reason)
            try:
                self.executions()
                return
            except OSError as exc:
                if time.monotonic() > deadline:
                    raise ProbeFailed(f"the workers do not serve metrics: {exc}") from exc
                time.sleep(_POLL_S)

    def _stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            _end(process)

    def _log(self, name: str) -> str:
        path = self._scratch / f"{name}.log"
        return path.read_text(errors="replace").strip()[-1_500:] if path.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _executions(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return sum(int(float(number)) for number in _EXECUTED.findall(text))
