"""Draining a full queue of no-ops with one and with two worker processes: rate, CPU, memory, bytes per queued job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks.contest import Contestant, drain, fill
from benchmarks.model import OURS_REDIS, SKETCH, Measure
from benchmarks.sketch import Sketch
from benchmarks.stages.stage import Hall, Probe, Stage

WORKERS: Final = (1, 2)
#: Bare loops are so fast that they need more jobs for the same precision.
_BARE_TIMES: Final = 3
_FEED: Final = "stream:feed"


class Drain(Stage):
    """Filled first, workers connected, then the start; from the first execution to the last."""

    name = "drain"
    title = "Draining a full queue"
    measures = (
        Measure("drain.1", "1 worker", "jobs/s", more_is_better=True),
        Measure("drain.2", "2 workers", "jobs/s", more_is_better=True),
        Measure("drain.1.cpu", "1 worker: its CPU", "µs/job", digits=1),
        Measure("drain.1.redis", "1 worker: CPU of Redis", "µs/job", digits=1),
        Measure("drain.2.cpu", "2 workers: their CPU", "µs/job", digits=1),
        Measure("drain.2.redis", "2 workers: CPU of Redis", "µs/job", digits=1),
        Measure("drain.rss", "worker's memory after", "MB", digits=1),
        Measure("drain.bytes", "stored per queued job", "bytes"),
        Measure("drain.bytes_feed", "of that the feed", "bytes"),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def probes(self) -> Sequence[Probe]:
        hall, probes = self._hall, list[Probe]()
        for workers in WORKERS:
            for side in (*hall.ours, *hall.bare):
                probes.append(Probe(f"{side.name} × {workers}", partial(self._run, side, workers)))
            if hall.sketch is not None:
                probes.append(Probe(f"{SKETCH} × {workers}", partial(self._run_sketch, hall.sketch, workers)))
        return probes

    def _run(self, side: Contestant, workers: int, round_number: int) -> str:
        hall = self._hall
        jobs = hall.options.jobs * (_BARE_TIMES if side.flavour else 1)
        side.store.reset()
        per_job = fill(side, jobs)
        add = partial(self._add, side.name, round_number)
        if workers == 1:
            add("drain.bytes", per_job)
            if side.name == OURS_REDIS:
                add("drain.bytes_feed", hall.redis.key_bytes(_FEED) / jobs)
        drained = drain(side, workers, jobs, hall.board)
        add(f"drain.{workers}", drained.rate)
        add(f"drain.{workers}.cpu", drained.worker_us)
        if drained.store_cpu_s:
            add(f"drain.{workers}.redis", drained.store_us)
        if workers == 1:
            add("drain.rss", drained.rss / 1e6)
        return str(drained)

    def _run_sketch(self, sketch: Sketch, workers: int, round_number: int) -> str:
        jobs, store = self._hall.options.jobs, sketch.store
        store.reset()
        sketch.submit(jobs)
        cpu_s = store.cpu_s()
        rate = sketch.drain(jobs, workers)
        self._add(SKETCH, round_number, f"drain.{workers}", rate)
        self._add(SKETCH, round_number, f"drain.{workers}.redis", (store.cpu_s() - cpu_s) / jobs * 1e6)
        return f"{rate:,.0f} /s"

    def _add(self, side: str, round_number: int, measure: str, value: float) -> None:
        self._hall.results.add(measure, side, round_number, value)
