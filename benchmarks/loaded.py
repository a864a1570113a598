"""Submit to finish over HTTP on a machine without a free core: `python -m benchmarks.loaded --seconds 60 --busy 2`.

Redis, the service with its worker (`--apart`: a worker process besides), a caller of `POST /api/v1/jobs?wait=30`
at a steady pace, and busy loops. Every step of every job is stamped. From sent to answered the kernel counts how long
each process has run and has waited for a core (`/proc/PID/schedstat`), so that the report separates time that was spent
waiting for a core from time that was spent waiting for something else: what no process accounts for. Processes can wait
at the same time, so the sum may be more than the time that has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from benchmarks.audit import migrate
from benchmarks.children import Child
from benchmarks.model import percentile
from benchmarks.sides.http import HttpConnection
from benchmarks.sides.loaded import NUMBER_HEADER
from benchmarks.usage import scheduled
from holdfast.verification.chaos.servers import PostgresServer, RedisServer
from tools.servers import POSTGRES, REDIS, Server, find

_MODULE: Final = "benchmarks.sides.loaded"
STEPS: Final = (
    "sent", "received", "submitting", "submitted", "claimed", "started", "settling", "settled", "answered", "got",
)  # fmt: skip
#: What counts as evidence: p95 at most this many times the median.
SPREAD: Final = 3.0
#: Requests before the first that counts: connections are opened, scripts loaded.
_WARM_UP: Final = 20
_REST_S: Final = 2.0
_BUSY: Final = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


@dataclass(frozen=True)
class Options:
    """What is run, and for how long."""

    seconds: float
    rate: float
    busy: int
    apart: bool
    ledger: bool
    slowest: int
    out: Path | None

    @property
    def requests(self) -> int:
        return round(self.seconds * self.rate)


@dataclass(frozen=True)
class Request:
    """One request: its stamps by step, and how long each process ran and waited for a core until it was answered."""

    number: int
    stamps: Mapping[str, int]
    ran_ms: Mapping[str, float]
    waited_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        return self.spent_ms("sent", "got")

    def spent_ms(self, first: str, last: str) -> float:
        return (self.stamps[last] - self.stamps[first]) / 1e6

    @property
    def unexplained_ms(self) -> float:
        return max(0.0, self.total_ms - sum(self.ran_ms.values()) - sum(self.waited_ms.values()))


class Caller:
    """Sends requests, each on a connection that has nothing else to do."""

    def __init__(self, url: str, pids: Mapping[str, int]) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        #: Connections at rest, and since when.
        self._free: list[tuple[float, HttpConnection]] = []
        #: Processes that take part. A process id stands for its first thread, where the event loop runs.
        self._pids = {"caller": os.getpid(), **pids}

    async def send(self, number: int) -> Request:
        connection = await self._connected()
        body = msgspec.json.encode({"task": "noop", "payload": {"number": str(number)}})
        head = (
            f"POST /api/v1/jobs?wait=30 HTTP/1.1\r\nhost: {self._host}\r\n{NUMBER_HEADER.decode()}: {number}\r\n"
            f"idempotency-key: {number}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        before, sent = self._scheduled(), time.monotonic_ns()
        await connection.send(head.encode() + body, 200)
        got, after = time.monotonic_ns(), self._scheduled()
        self._free.append((time.monotonic(), connection))
        ran, waited = ({name: (after[name][n] - before[name][n]) / 1e6 for name in before} for n in (0, 1))
        return Request(number, {"sent": sent, "got": got}, ran, waited)

    async def _connected(self) -> HttpConnection:
        while self._free:
            since, connection = self._free.pop()
            # The service closes a connection that rests for longer.
            if time.monotonic() < since + _REST_S:
                return connection
            connection.close()
        return HttpConnection(*await asyncio.open_connection(self._host, self._port))

    def _scheduled(self) -> dict[str, tuple[int, int]]:
        return {name: scheduled(pid) for name, pid in self._pids.items()}

    async def run(self, first: int, count: int, rate: float) -> list[Request]:
        """At a steady pace, however long the answers take."""
        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Request]]()
        began = loop.time()
        for index in range(count):
            await asyncio.sleep(began + index / rate - loop.time())
            tasks.append(asyncio.create_task(self.send(first + index)))
        return await asyncio.gather(*tasks)

    def close(self) -> None:
        for _, connection in self._free:
            connection.close()


async def measure(options: Options, scratch: Path) -> list[Request]:
    """Start everything, send, and put the stamps together."""
    with ExitStack() as running:
        redis = RedisServer(_found(REDIS), scratch / "redis")
        redis.start()
        running.callback(redis.stop)
        settings = {"ledger": running.enter_context(_ledger())} if options.ledger else {}
        if options.ledger:
            await migrate(settings["ledger"])
        spec = {"url": redis.url, "settings": settings}
        flavour = "alone" if options.apart else "with worker"
        server = running.enter_context(Child(_MODULE, "server", {**spec, "flavour": flavour}, scratch))
        parts = {"service": server}
        if options.apart:
            parts["worker"] = running.enter_context(Child(_MODULE, "worker", spec, scratch))
        pids = {name: part.pid for name, part in parts.items()}
        caller = Caller(server.call("where")["url"], {**pids, "Redis": redis.pid})
        await caller.run(0, _WARM_UP, options.rate)
        with _busy_loops(options.busy, options.seconds + 30):
            sent = await caller.run(_WARM_UP, options.requests, options.rate)
        caller.close()
        collected = [part.call("collected")["stamps"] for part in parts.values()]
        return [_merged(request, collected) for request in sent]


def _merged(request: Request, collected: Sequence[Mapping[str, Mapping[str, int]]]) -> Request:
    stamps = dict(request.stamps)
    for part in collected:
        stamps |= part.get(str(request.number), {})
    return replace(request, stamps=stamps)


@contextmanager
def _busy_loops(count: int, at_most_s: float) -> Iterator[None]:
    """They end by themselves, too, should this process be killed."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY, str(at_most_s)]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def _ledger() -> Iterator[str]:
    server = PostgresServer(_found(POSTGRES))
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


def _found(server: Server) -> Path:
    binary = find(server)
    if binary is None:
        raise SystemExit(f"{server.name} not found; run: {server.how_to_install}")
    return binary


# The report ------------------------------------------------------------------------------------------


def report(requests: Sequence[Request], options: Options) -> bool:
    """Print it; whether the spread is within its limit."""
    totals = sorted(request.total_ms for request in requests)
    p50, p95, p99 = (percentile(totals, share) for share in (0.5, 0.95, 0.99))
    print(f"{len(totals)} requests at {options.rate:g}/s with {options.busy} busy loops, submit to finish over HTTP:")
    print(f"  p50 {p50:.1f} ms, p95 {p95:.1f} ms ({p95 / p50:.1f} × p50), p99 {p99:.1f} ms, max {totals[-1]:.1f} ms")
    print("\nstep               p50 ms    p95 ms")
    for first, last in pairwise(STEPS):
        gaps = sorted(request.spent_ms(first, last) for request in requests)
        print(f"  → {last:12}  {percentile(gaps, 0.5):8.2f}  {percentile(gaps, 0.95):8.2f}")
    late = [request for request in requests if request.total_ms >= p95]
    for name, chosen in (("all requests", requests), ("the slowest twentieth", late)):
        print(f"\n{name}, mean ms: {_shares(chosen)}")
    print("\nthe slowest, ms since they were sent:")
    for request in sorted(requests, key=lambda request: -request.total_ms)[: options.slowest]:
        print(f"  {_trace(request)}")
    return p95 <= SPREAD * p50


def _shares(requests: Sequence[Request]) -> str:
    words = [f"{fmean(request.total_ms for request in requests):.1f} in all"]
    for name in requests[0].ran_ms:
        ran, waited = fmean(each.ran_ms[name] for each in requests), fmean(each.waited_ms[name] for each in requests)
        words.append(f"{name} ran {ran:.1f}, waited for a core {waited:.1f}")
    return f"{'; '.join(words)}; neither {fmean(request.unexplained_ms for request in requests):.1f}"


def _trace(request: Request) -> str:
    words = [f"{step} {request.spent_ms('sent', step):.1f}" for step in STEPS[1:]]
    waited = ", ".join(f"{name} {ms:.1f}" for name, ms in request.waited_ms.items())
    return f"{', '.join(words)}; waited for a core: {waited}; neither {request.unexplained_ms:.1f}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loaded", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--busy", type=int, default=2, help="busy loops")
    parser.add_argument("--apart", action="store_true", help="the worker in a process besides the service")
    parser.add_argument("--ledger", action="store_true", help="with PostgreSQL as ledger")
    parser.add_argument("--slowest", type=int, default=5, help="how many requests are shown step by step")
    parser.add_argument("--out", type=Path, help="a JSON file for all stamps")
    options = Options(**vars(parser.parse_args(words)))
    with tempfile.TemporaryDirectory(prefix="holdfast-loaded-") as scratch:
        began = time.monotonic()
        requests = asyncio.run(measure(options, Path(scratch)))
    if options.out is not None:
        options.out.write_text(json.dumps([dict(request.stamps) for request in requests]))
    fine = report(requests, options)
    print(f"\n{time.monotonic() - began:.0f} s; p95 at most {SPREAD:g} × p50: {'yes' if fine else 'no'}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
