"""holdfast, as a user runs it: default settings, leases, fencing, results and feed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, at_low_load, in_parallel, main, serve, timed
from benchmarks.sides.diary import AT_ONCE, SLOW_S, Diary
from benchmarks.usage import resident_bytes
from holdfast import Holdfast, Task, Worker
from holdfast.cli.lifecycle import freeze_gc

_POLL_S: Final = 0.002


class Tasks:
    """The app and its tasks."""

    def __init__(self, spec: Spec, gauge: Gauge | None = None) -> None:
        self.app = Holdfast(spec.url, **_ours(spec.settings))
        self._diary = Diary(spec.settings["log"]) if "log" in spec.settings else None
        self.late_ns: list[int] = []
        self.noop: Task[[dict[str, Any]], int] = self.app.task(name="noop")(_noop(gauge))
        self.stamp: Task[[int], None] = self.app.task(name="stamp")(self._stamp)
        self.slow: Task[[int], None] = self.app.task(name="slow")(self._slow)

    async def _stamp(self, sent_ns: int) -> None:
        self.late_ns.append(time.monotonic_ns() - sent_ns)

    async def _slow(self, number: int) -> None:
        assert self._diary is not None
        self._diary.began(number)
        await asyncio.sleep(SLOW_S)
        self._diary.ended(number)


class Producer:
    """Submits."""

    def __init__(self, tasks: Tasks) -> None:
        self._noop = tasks.noop
        self._stamp = tasks.stamp
        self._slow = tasks.slow
        self._engine = tasks.app.engine

    async def single(self, jobs: int) -> Answer:
        """One by one, each awaited."""
        with timed(jobs) as answer:
            for _ in range(jobs):
                await self._noop.submit(ARGUMENT)
        return answer

    async def bulk(self, jobs: int) -> Answer:
        """All in one call."""
        with timed(jobs) as answer:
            await self._noop.submit_many((ARGUMENT,) for _ in range(jobs))
        return answer

    async def concurrent(self, jobs: int, callers: int) -> Answer:
        """Many callers at once, each submitting one by one."""
        with timed(jobs) as answer:
            await in_parallel(callers, jobs, lambda: self._noop.submit(ARGUMENT))
        return answer

    async def paced(self, jobs: int) -> Answer:
        """At low load, each with the instant of its submission."""
        await at_low_load(jobs, self._stamp.submit)
        return {}

    async def slow(self, jobs: int) -> Answer:
        """Jobs that note when they begin and end."""
        await self._slow.submit_many((number,) for number in range(jobs))
        return {}

    async def prune(self) -> Answer:
        """Sweep what has expired, as upkeep does now and then."""
        return {"pruned": await self._engine.prune(["default"])}


class Work:
    """One real worker in this process."""

    def __init__(self, tasks: Tasks, gauge: Gauge, *, upkeep: bool = True) -> None:
        self._tasks = tasks
        self._gauge = gauge
        self._upkeep = upkeep
        self._worker: Worker | None = None
        self._running: asyncio.Task[Any] | None = None

    async def start(self, limit: int | None) -> Answer:
        """Start to work; with a limit, claim only that number of jobs."""
        # As `holdfast worker` does.
        freeze_gc()
        self._worker = Worker(self._tasks.app, upkeep=self._upkeep, max_jobs=limit)
        self._running = asyncio.create_task(self._worker.run())
        return {}

    async def listen(self) -> Answer:
        """Wait for what comes; its tasks note how late it is."""
        return await self.start(None)

    async def report(self) -> Answer:
        """What was used, once every verdict has been answered."""
        while self._worker is not None and self._worker.in_flight:  # noqa: ASYNC110 - it has no event for this
            await asyncio.sleep(_POLL_S)
        return {"cpu_s": self._gauge.cpu_s, "rss": resident_bytes()}

    async def latencies(self) -> Answer:
        """Submission to start of the function, of the jobs since the last question."""
        late_ns, self._tasks.late_ns = self._tasks.late_ns, []
        return {"late_ns": late_ns}

    async def stop(self) -> None:
        """Drain and end."""
        if self._worker is not None and self._running is not None:
            self._worker.drain()
            await self._running


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    tasks = Tasks(spec)
    async with tasks.app:
        role = Producer(tasks)
        await serve(
            {
                "single": role.single,
                "bulk": role.bulk,
                "concurrent": role.concurrent,
                "paced": role.paced,
                "slow": role.slow,
                "prune": role.prune,
            }
        )


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    gauge = Gauge(spec.board_path, spec.row)
    tasks = Tasks(spec, gauge)
    async with tasks.app:
        role = Work(tasks, gauge)
        await serve({"start": role.start, "listen": role.listen, "report": role.report, "latencies": role.latencies})
        await role.stop()


async def slow_work(spec: Spec) -> None:
    """The role of a worker process that is killed: default settings, ten jobs at a time."""
    tasks = Tasks(spec)

    async def start() -> Answer:
        running.append(asyncio.create_task(Worker(tasks.app, concurrency=AT_ONCE).run()))
        return {}

    running: list[asyncio.Task[Any]] = []
    async with tasks.app:
        await serve({"start": start})


def _ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are the test's own."""
    return {name: value for name, value in settings.items() if name not in ("log", "tuned")}


def _noop(gauge: Gauge | None) -> Any:
    async def noop(argument: dict[str, Any]) -> int:
        if gauge is not None:
            gauge.tick()
        return 1

    return noop


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
