"""Shared by fault tests: a site (store, app, worker processes, the log of runs) and the final checks.

`Site.assert_all_ended` is the claim of every fault test: each job has exactly one final event, the feed contains only
legal moves, and no job is open.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import holdfast
from holdfast import Holdfast, State
from holdfast.core.history import HistoryReport, check_history
from holdfast.core.job import Event, JobInfo
from holdfast.core.states import FINAL
from holdfast.errors import EngineUnavailable
from tests import forked
from tests.faults import sample

TIMEOUT_S: Final = 60.0
QUEUE: Final = "default"
SOURCE: Final = Path(holdfast.__file__).resolve().parent.parent
SAMPLE: Final = Path(sample.__file__).resolve()

#: Leases of 1 s: a busy machine can renew them in time, and tests can wait for their expiry.
SETTINGS: Final[Mapping[str, Any]] = {
    "visibility_timeout_s": 1.0,
    "heartbeat_interval_s": 0.25,
    "reclaim_interval_s": 0.1,
    "connect_timeout_s": 2.0,
    "reply_timeout_s": 2.0,
    "feed_limit": 1_000_000,
    "drain_grace_s": 5.0,
}


async def eventually(check: Callable[[], Any | Awaitable[Any]], what: str, within_s: float = TIMEOUT_S) -> Any:
    """Poll `check`, which may be async, until its result is true. Return the result."""
    deadline = time.monotonic() + within_s
    while True:
        result = check()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        assert time.monotonic() < deadline, f"timed out after {within_s:g} s: {what}"
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Run:
    """An entry of the log of runs."""

    job_id: str
    attempt: int
    pid: int


class WorkerProcess:
    """A real `holdfast worker` (or `upkeep`) and its log."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = forked.start(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def has_logged(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    async def wait_for_log(self, text: str) -> None:
        """Wait until the text is in the log."""

        def check() -> bool:
            assert self.has_logged(text) or self.alive, (
                f"the process ended with {self._process.returncode}:\n{self.log.read_text()}"
            )
            return self.has_logged(text)

        await eventually(check, f"{text!r} in the log")

    def kill(self) -> float:
        """Send SIGKILL. Return the wall-clock time in milliseconds."""
        self._process.kill()
        killed_at_ms = time.time() * 1000
        self._process.wait()
        return killed_at_ms

    def pause(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()

    async def wait_ended(self) -> int:
        """Wait for the end of the process. Return its exit code."""
        await eventually(lambda: not self.alive, "the process to end")
        return int(self._process.returncode)

    def clean_up(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()


def pause_outside_commit(process: WorkerProcess, url: str) -> None:
    """Send SIGSTOP outside of a commit: a process stopped in a commit would keep an SQLite file locked."""
    process.pause()
    while url.startswith("sqlite:///") and not _is_unlocked(url.removeprefix("sqlite:///")):
        process.resume()
        time.sleep(0.01)
        process.pause()


def _is_unlocked(path: str) -> bool:
    # Running processes hold these locks for milliseconds only.
    deadline = time.monotonic() + 2.0
    for name in ("queue", "lock"):
        with open(f"{path}-{name}", "r+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.005)
    return True


def kill_processes_of(namespace: str) -> None:
    """Kill processes that workers have started for lost jobs, and that would outlive them for some seconds."""
    assert namespace
    own = f"HOLDFAST_NAMESPACE={namespace}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if own in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


class Site:
    """A store in a separate namespace, an app on it, and the processes that a test starts."""

    def __init__(self, url: str, folder: Path, namespace: str = "", **settings: Any) -> None:
        self.url = url
        self.folder = folder
        self.settings = {**SETTINGS, "namespace": namespace, **settings}
        self.runs_log = folder / "runs.log"
        self._processes: list[WorkerProcess] = []
        self._apps: list[Holdfast] = []
        self.app, self.tasks = self.make_app()

    def make_app(self, url: str | None = None, **settings: Any) -> tuple[Holdfast, sample.Tasks]:
        """Create another app on the same store, optionally with another URL."""
        app = Holdfast(url or self.url, **{**self.settings, **settings})
        self._apps.append(app)
        return app, sample.register(app)

    def gate(self, name: str = "gate") -> Path:
        """Return the path of a file that does not exist yet. A blocked run continues once it exists."""
        return self.folder / name

    # Processes -------------------------------------------------------------------------------------

    def start(self, command: str = "worker", *args: str, url: str | None = None, **variables: str) -> WorkerProcess:
        """Start `holdfast COMMAND sample.py:app …`. The process ends with the test."""
        command_line = [sys.executable, "-m", "holdfast", command, f"{SAMPLE}:app", *args]
        log = self.folder / f"{command}-{len(self._processes)}.log"
        process = WorkerProcess(command_line, self.folder, self._environment(url or self.url) | variables, log)
        self._processes.append(process)
        return process

    async def start_worker(self, *args: str, **options: Any) -> WorkerProcess:
        """Start a worker process and wait until it has started."""
        worker = self.start("worker", *args, **options)
        await worker.wait_for_log(" started on ")
        return worker

    async def start_workers(self, count: int, *args: str) -> list[WorkerProcess]:
        """Start several worker processes and wait until they have started."""
        workers = [self.start("worker", *args) for _ in range(count)]
        for worker in workers:
            await worker.wait_for_log(" started on ")
        return workers

    def _environment(self, url: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        path = os.pathsep.join(filter(None, [str(SOURCE), inherited.get("PYTHONPATH", "")]))
        settings = {f"HOLDFAST_{name.upper()}": str(value) for name, value in self.settings.items() if value != ""}
        return (
            inherited | settings | {"PYTHONPATH": path, "HOLDFAST_URL": url, sample.RUNS_VARIABLE: str(self.runs_log)}
        )

    async def close(self) -> None:
        for process in self._processes:
            process.clean_up()
        kill_processes_of(str(self.settings["namespace"]))
        for app in self._apps:
            await app.close()

    # Results ---------------------------------------------------------------------------------------

    def runs(self, job_id: str | None = None) -> list[Run]:
        """Return every started run, of one job or of all."""
        if not self.runs_log.exists():
            return []
        rows = (line.split() for line in self.runs_log.read_text().splitlines())
        runs = [Run(name, int(attempt), int(pid)) for name, attempt, pid in rows]
        return [run for run in runs if job_id in (None, run.job_id)]

    async def wait_runs(self, job_ids: Iterable[str], count: int) -> None:
        """Wait until each job has run `count` times."""
        expected_ids = set(job_ids)

        def check() -> bool:
            runs = Counter(run.job_id for run in self.runs())
            return all(runs[job_id] >= count for job_id in expected_ids)

        await eventually(check, f"{len(expected_ids)} jobs to run {count} times")

    async def wait_running(self, job_id: str) -> None:
        """Wait until the job has run once."""
        await self.wait_runs([job_id], 1)

    async def events(self) -> list[Event]:
        await self.app.open()
        entries: list[Any] = []
        page = await self.app.engine.read_feed(QUEUE, "", 1_000)
        while page:
            entries += page
            # A page starts with the last entry of the previous one.
            page = (await self.app.engine.read_feed(QUEUE, entries[-1].position, 1_000))[1:]
        return [event for entry in entries for event in entry.events]

    async def get_infos(self, job_ids: Iterable[str]) -> list[JobInfo | None]:
        await self.app.open()
        return await self.app.engine.get(QUEUE, list(job_ids))

    async def wait_ended(self, job_ids: Iterable[str]) -> list[JobInfo]:
        """Wait until all jobs are final. Return their infos."""
        expected_ids = list(job_ids)

        async def check() -> list[JobInfo] | None:
            try:
                infos = await self.get_infos(expected_ids)
            except EngineUnavailable:
                # The store has just recovered; the connection of this app may still be broken.
                return None
            final = [info for info in infos if info is not None and info.state in FINAL]
            return final if len(final) == len(expected_ids) else None

        infos: list[JobInfo] = await eventually(check, f"{len(expected_ids)} jobs to end")
        return infos

    async def assert_all_ended(self, job_ids: Iterable[str], state: State = State.SUCCEEDED) -> HistoryReport:
        """Wait until the jobs end in `state`. Check that no job is open and that each history is legal and final."""
        expected_ids = list(job_ids)
        infos = await self.wait_ended(expected_ids)
        assert {info.state for info in infos} <= {state}, [(info.job_id, info.state, info.failure) for info in infos]
        await self.assert_nothing_open()
        history = check_history(await self.events(), ended=True)
        assert set(expected_ids) <= history.histories.keys(), "the feed does not contain every job"
        return history

    async def assert_nothing_open(self) -> None:
        stats = await self.app.engine.stats(QUEUE)
        assert not any(stats.states.values()), f"open jobs: {stats.states}"

    async def final_events(self) -> Counter[str]:
        """Return the number of final events by job."""
        return Counter(event.job_id for event in await self.events() if event.to_state in FINAL)
