"""Latency at low load: from the call of `submit` to the first line of the function, in an idle worker's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.children import Child, ProbeFailed
from benchmarks.contest import Contestant
from benchmarks.model import Measure, percentile
from benchmarks.stages.stage import Hall, Probe, Stage

_SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_WARM_UP: Final = 30
_ARRIVED_WITHIN_S: Final = 30.0
_POLL_S: Final = 0.02


class Latency(Stage):
    """About a hundred jobs a second, one at a time."""

    name = "latency"
    title = "Latency at low load, submit to start"
    measures = tuple(Measure(f"latency.{name}", name, "ms", digits=2) for name in _SHARES)

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def probes(self) -> Sequence[Probe]:
        hall = self._hall
        return [Probe(side.name, partial(self._run, side)) for side in (*hall.ours, *hall.bare)]

    def _run(self, side: Contestant, round_number: int) -> str:
        results, jobs = self._hall.results, self._hall.options.latency_jobs
        self._fresh(side)
        with side.producer() as producer, side.workers(1, self._hall.board) as (worker,):
            worker.call("listen")
            _send(producer, worker, _WARM_UP)
            late_ms = sorted(nanoseconds / 1e6 for nanoseconds in _send(producer, worker, jobs))
        for name, share in _SHARES.items():
            results.add(f"latency.{name}", side.name, round_number, percentile(late_ms, share))
        pooled = results.latencies_ms.setdefault(side.name, [])
        pooled += late_ms
        pooled.sort()
        return " · ".join(f"{name} {percentile(late_ms, share):.2f}" for name, share in _SHARES.items()) + " ms"

    def _fresh(self, side: Contestant) -> None:
        side.store.reset()


def _send(producer: Child, worker: Child, jobs: int) -> list[int]:
    producer.call("paced", jobs=jobs)
    late_ns: list[Any] = []
    deadline = time.monotonic() + _ARRIVED_WITHIN_S
    while len(late_ns) < jobs:
        late_ns += worker.call("latencies")["late_ns"]
        if time.monotonic() > deadline:
            raise ProbeFailed(f"{len(late_ns)} of {jobs} jobs arrived")
        time.sleep(_POLL_S)
    return late_ns
