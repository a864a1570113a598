"""What 10,000 jobs of an unknown task cost the other jobs of their queue.

    python -m benchmarks.unknown_tasks redis://127.0.0.1:6379/0 [--jobs 20000] [--rounds 5] [--settle-s 30]

Two namespaces (on SQLite two files) with one worker process each; one of them has the unknown jobs, which have been
offered for `--settle-s` before the first round. Rounds alternate: submit plain jobs to the paused queue, resume it,
measure wall time and the worker's CPU time until all have finished.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex
from typing import Final

from holdfast import Holdfast, State
from holdfast.engine.port.operators import QueueControl

UNKNOWN: Final = 10_000
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_WORKER: Final = """
import asyncio, sys
from holdfast import Holdfast, Worker
app = Holdfast(sys.argv[1], namespace=sys.argv[2])
@app.task
async def noop() -> None: ...
asyncio.run(Worker(app, concurrency=100).run())
"""


def cpu_s(pid: int) -> float:
    """CPU time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Site:
    """One namespace with its worker."""

    def __init__(self, url: str, unknown: int) -> None:
        self._unknown = unknown
        if url.startswith("sqlite"):
            url += f"-{token_hex(4)}"
        self.app = Holdfast(url, namespace=f"bench-{token_hex(4)}")
        self.noop = self.app.task(name="noop")(_noop)
        command = [sys.executable, "-c", _WORKER, url, self.app.settings.namespace]
        self.worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.wall_s: list[float] = []
        self.cpu_us: list[float] = []

    async def prepare(self) -> None:
        await self.app.open()
        if self._unknown:
            other = self.app.task(name="unknown")(_unknown)
            await other.submit_many([()] * self._unknown)
        # Every unknown job has been released at least once.
        while (await self.app.engine.stats("default")).backlog:  # noqa: ASYNC110 - another process works
            await asyncio.sleep(0.05)

    async def run(self, jobs: int) -> None:
        engine = self.app.engine
        await self._pause(True)
        await self.noop.submit_many([()] * jobs)
        await self._pause(False)
        began, cpu = time.monotonic(), cpu_s(self.worker.pid)
        while True:
            stats = await engine.stats("default")
            if stats.states.get(State.QUEUED, 0) - stats.delayed + stats.pending < jobs // 200:
                break
            await asyncio.sleep(0.01)
        self.wall_s.append(time.monotonic() - began)
        self.cpu_us.append((cpu_s(self.worker.pid) - cpu) / jobs * 1e6)

    async def _pause(self, paused: bool) -> None:
        await self.app.engine.set_control("default", QueueControl(paused=paused), actor="bench", reason="")

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()


async def _noop() -> None: ...


async def _unknown() -> None: ...


async def main(url: str, jobs: int, rounds: int, settle_s: float) -> None:
    sites = {"without": Site(url, 0), f"with {UNKNOWN:,} unknown": Site(url, UNKNOWN)}
    try:
        for site in sites.values():
            await site.prepare()
        await asyncio.sleep(settle_s)
        for _ in range(rounds):
            for site in sites.values():
                await site.run(jobs)
        for name, site in sites.items():
            wall, cpu = statistics.median(site.wall_s), statistics.median(site.cpu_us)
            spread = f"{min(site.wall_s):.2f}-{max(site.wall_s):.2f}"
            print(
                f"{name:22} {jobs / wall:8,.0f} jobs/s (wall {wall:.2f} s, {spread}), worker {cpu:.1f} us CPU per job"
            )
    finally:
        for site in sites.values():
            site.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=30)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.jobs, arguments.rounds, arguments.settle_s))
