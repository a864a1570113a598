"""What fault tests share: a site (store, app, worker processes, the log of runs), and what must hold in the end.

`Site.all_is_well` is the claim that every test here makes: each job has exactly one final event, the feed tells a
legal story, and nothing is pending, waiting or in line.
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

PATIENCE_S: Final = 60.0
QUEUE: Final = "default"
SOURCE: Final = Path(holdfast.__file__).resolve().parent.parent
SAMPLE: Final = Path(sample.__file__).resolve()

#: Leases of a second: long enough for a busy machine to renew in time, short enough to wait for their end.
SETTINGS: Final[Mapping[str, Any]] = {
    "visibility_timeout_s": 1.0,
    "heartbeat_interval_s": 0.25,
    "reclaim_interval_s": 0.1,
    "connect_timeout_s": 2.0,
    "reply_timeout_s": 2.0,
    "feed_limit": 1_000_000,
    "drain_grace_s": 5.0,
}


async def eventually(look: Callable[[], Any | Awaitable[Any]], what: str, within_s: float = PATIENCE_S) -> Any:
    """What `look` gives once that is true; it may be async."""
    give_up_at = time.monotonic() + within_s
    while True:
        seen = look()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if seen:
            return seen
        assert time.monotonic() < give_up_at, f"waited {within_s:g} s for {what} in vain"
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Run:
    """A line of the log of runs."""

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

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    async def has_said(self, text: str) -> None:
        """Wait for a line of its log."""

        def look() -> bool:
            assert self.said(text) or self.alive, f"it ended with {self._process.returncode}:\n{self.log.read_text()}"
            return self.said(text)

        await eventually(look, f"{text!r} in the log")

    def kill(self) -> float:
        """kill -9; the wall clock's milliseconds at that moment."""
        self._process.kill()
        killed_at_ms = time.time() * 1000
        self._process.wait()
        return killed_at_ms

    def pause(self) -> None:
        """SIGSTOP, until it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()

    async def ended(self) -> int:
        """Its exit code, once it has one."""
        await eventually(lambda: not self.alive, "the process to end")
        return int(self._process.returncode)

    def clean_up(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()


def stand_still(process: WorkerProcess, url: str) -> None:
    """SIGSTOP, but not in the middle of a commit: there it would keep an SQLite file from everybody."""
    process.pause()
    while url.startswith("sqlite:///") and not _can_be_written(url.removeprefix("sqlite:///")):
        process.resume()
        time.sleep(0.01)
        process.pause()


def _can_be_written(path: str) -> bool:
    # Those who are awake hold these for milliseconds only.
    give_up_at = time.monotonic() + 2.0
    for name in ("queue", "lock"):
        with open(f"{path}-{name}", "r+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up_at:
                        return False
                    time.sleep(0.005)
    return True


class Site:
    """A store in a namespace of its own, an app on it, and the processes that a test starts."""

    def __init__(self, url: str, folder: Path, namespace: str = "", **settings: Any) -> None:
        self.url = url
        self.folder = folder
        self.settings = {**SETTINGS, "namespace": namespace, **settings}
        self.runs_log = folder / "runs.log"
        self._processes: list[WorkerProcess] = []
        self._apps: list[Holdfast] = []
        self.app, self.tasks = self.make_app()

    def make_app(self, url: str | None = None, **settings: Any) -> tuple[Holdfast, sample.Tasks]:
        """One more app on the same store, perhaps through another door."""
        app = Holdfast(url or self.url, **{**self.settings, **settings})
        self._apps.append(app)
        return app, sample.register(app)

    def gate(self, name: str = "gate") -> Path:
        """A file that is not there yet; a run that holds goes on once it is."""
        return self.folder / name

    # Processes -------------------------------------------------------------------------------------

    def start(self, command: str = "worker", *words: str, url: str | None = None, **variables: str) -> WorkerProcess:
        """`holdfast COMMAND sample.py:app …`; ended with the test."""
        line = [sys.executable, "-m", "holdfast", command, f"{SAMPLE}:app", *words]
        log = self.folder / f"{command}-{len(self._processes)}.log"
        process = WorkerProcess(line, self.folder, self._environment(url or self.url) | variables, log)
        self._processes.append(process)
        return process

    async def started(self, *words: str, **options: Any) -> WorkerProcess:
        """A worker process that is at work."""
        worker = self.start("worker", *words, **options)
        await worker.has_said(" started on ")
        return worker

    async def started_all(self, count: int, *words: str) -> list[WorkerProcess]:
        """Several of them."""
        workers = [self.start("worker", *words) for _ in range(count)]
        for worker in workers:
            await worker.has_said(" started on ")
        return workers

    def _environment(self, url: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
        settings = {f"HOLDFAST_{name.upper()}": str(value) for name, value in self.settings.items() if value != ""}
        return kept | settings | {"PYTHONPATH": path, "HOLDFAST_URL": url, sample.RUNS_VARIABLE: str(self.runs_log)}

    async def close(self) -> None:
        for process in self._processes:
            process.clean_up()
        for app in self._apps:
            await app.close()

    # What happened ---------------------------------------------------------------------------------

    def runs(self, job_id: str | None = None) -> list[Run]:
        """Every run that has begun, of one job or of all."""
        if not self.runs_log.exists():
            return []
        rows = (line.split() for line in self.runs_log.read_text().splitlines())
        runs = [Run(name, int(attempt), int(pid)) for name, attempt, pid in rows]
        return [run for run in runs if job_id in (None, run.job_id)]

    async def has_runs(self, job_ids: Iterable[str], count: int) -> None:
        """Wait until the code of each has been called so often."""
        wanted = set(job_ids)

        def look() -> bool:
            runs = Counter(run.job_id for run in self.runs())
            return all(runs[job_id] >= count for job_id in wanted)

        await eventually(look, f"{len(wanted)} jobs to run {count} times")

    async def is_running(self, job_id: str) -> None:
        """Wait until its code has been called."""
        await self.has_runs([job_id], 1)

    async def events(self) -> list[Event]:
        await self.app.open()
        entries: list[Any] = []
        page = await self.app.engine.read_feed(QUEUE, "", 1_000)
        while page:
            entries += page
            # A page begins with the last entry of the one before.
            page = (await self.app.engine.read_feed(QUEUE, entries[-1].position, 1_000))[1:]
        return [event for entry in entries for event in entry.events]

    async def views(self, job_ids: Iterable[str]) -> list[JobInfo | None]:
        await self.app.open()
        return await self.app.engine.get(QUEUE, list(job_ids))

    async def ended(self, job_ids: Iterable[str]) -> list[JobInfo]:
        """Their views, once all are final."""
        wanted = list(job_ids)

        async def look() -> list[JobInfo] | None:
            try:
                views = await self.views(wanted)
            except EngineUnavailable:
                # The store has just come back; our own connection to it may not know yet.
                return None
            final = [view for view in views if view is not None and view.state in FINAL]
            return final if len(final) == len(wanted) else None

        found: list[JobInfo] = await eventually(look, f"{len(wanted)} jobs to end")
        return found

    async def all_is_well(self, job_ids: Iterable[str], state: State = State.SUCCEEDED) -> HistoryReport:
        """These jobs end so; nothing else is left anywhere; and the feed tells a legal story with one end each."""
        wanted = list(job_ids)
        views = await self.ended(wanted)
        assert {view.state for view in views} <= {state}, [(view.job_id, view.state, view.failure) for view in views]
        await self.nothing_is_left()
        history = check_history(await self.events(), ended=True)
        assert set(wanted) <= history.histories.keys(), "the feed does not know every job"
        return history

    async def nothing_is_left(self) -> None:
        stats = await self.app.engine.stats(QUEUE)
        assert not any(stats.states.values()), f"left behind: {stats.states}"

    async def final_events(self) -> Counter[str]:
        """How many final events each job has."""
        return Counter(event.job_id for event in await self.events() if event.to_state in FINAL)
