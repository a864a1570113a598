"""A side as the stages see it, and the three things that all of them do: fill, start workers, watch them drain."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.board import Board
from benchmarks.children import Child, ProbeFailed
from benchmarks.stores import Store

_POLL_S: Final = 0.005
#: One call of a million jobs would hold them all in the producer's memory.
_PART: Final = 50_000
#: A drain has failed if no job is executed for this time.
_STUCK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """Whose processes to start, and on which store."""

    name: str
    module: str
    store: Store
    scratch: Path
    flavour: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Peers have separate environments.
    python: str = sys.executable

    def producer(self) -> Child:
        """A process that submits."""
        return self.child("produce")

    def child(self, role: str) -> Child:
        """A process in any of the roles that its module has."""
        return Child(self.module, role, self._spec(), self.scratch, self.python)

    @contextmanager
    def workers(self, count: int, board: Board) -> Iterator[list[Child]]:
        """Worker processes, connected, not yet working."""
        board.clear()
        spec = {**self._spec(), "board": str(board.path)}
        # All are started before the first is waited for.
        specs = [{**spec, "row": row} for row in range(count)]
        children = [Child(self.module, "work", given, self.scratch, self.python) for given in specs]
        with ExitStack() as stack:
            for child in children:
                stack.callback(child.close)
            yield [stack.enter_context(child) for child in children]

    def _spec(self) -> dict[str, Any]:
        return {"url": self.store.url, "flavour": self.flavour, "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class Drained:
    """What draining some jobs took."""

    jobs: int
    seconds: float
    worker_cpu_s: float
    store_cpu_s: float
    #: Of the largest worker, when all was done.
    rss: int

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds

    @property
    def worker_us(self) -> float:
        return self.worker_cpu_s / self.jobs * 1e6

    @property
    def store_us(self) -> float:
        return self.store_cpu_s / self.jobs * 1e6

    def __str__(self) -> str:
        server = f" + {self.store_us:.1f}" if self.store_cpu_s else ""
        return f"{self.rate:,.0f} /s · CPU {self.worker_us:.1f}{server} µs/job"


def fill(side: Contestant, jobs: int) -> float:
    """Queue jobs; returns the bytes in the store per job."""
    before = side.store.used_bytes()
    with side.producer() as producer:
        for start in range(0, jobs, _PART):
            producer.call("bulk", jobs=min(_PART, jobs - start))
    return (side.store.used_bytes() - before) / jobs


def drain(
    side: Contestant,
    workers: int,
    jobs: int,
    board: Board,
    *,
    limit: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Drained:
    """Let workers execute the queued jobs, each exactly once."""
    with side.workers(workers, board) as children:
        cpu_s = side.store.cpu_s()
        for child in children:
            child.send("start", limit=limit)
        for child in children:
            child.answer()
        until_done(board, jobs, watch)
        reports = [child.call("report") for child in children]
        cpu_s = side.store.cpu_s() - cpu_s
        if board.done != jobs:
            raise ProbeFailed(f"{board.done:,} executions of {jobs:,} jobs")
        return _drained(board, jobs, cpu_s, reports)


def until_done(board: Board, jobs: int, watch: Callable[[int], None] | None = None) -> None:
    """Wait until this number of jobs is executed."""
    done, moved_at = 0, time.monotonic()
    while done < jobs:
        time.sleep(_POLL_S)
        now = board.done
        if now != done:
            done, moved_at = now, time.monotonic()
            if watch is not None:
                watch(done)
        elif time.monotonic() - moved_at > _STUCK_S:
            raise ProbeFailed(f"stuck: {done:,} of {jobs:,} jobs were executed")


def _drained(board: Board, jobs: int, store_cpu_s: float, reports: Sequence[Mapping[str, Any]]) -> Drained:
    return Drained(
        jobs=jobs,
        seconds=board.span_s,
        worker_cpu_s=sum(report["cpu_s"] for report in reports),
        store_cpu_s=store_cpu_s,
        rss=max(report["rss"] for report in reports),
    )
