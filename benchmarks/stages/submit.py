"""Submitting: one by one, in bulk, and from a hundred callers at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks.contest import Contestant
from benchmarks.model import SKETCH, Measure
from benchmarks.sketch import Sketch
from benchmarks.stages.stage import Hall, Probe, Stage

CALLERS: Final = 100
_WARM_UP: Final = 500


class Submit(Stage):
    """No worker runs meanwhile."""

    name = "submit"
    title = "Submitting from one process"
    measures = (
        Measure("submit.single", "one by one", "jobs/s", more_is_better=True),
        Measure("submit.concurrent", f"{CALLERS} callers at once", "jobs/s", more_is_better=True),
        Measure("submit.bulk", "in bulk", "jobs/s", more_is_better=True),
        Measure("submit.bulk_cpu", "CPU, in bulk", "µs/job", digits=1),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def probes(self) -> Sequence[Probe]:
        hall = self._hall
        probes = [Probe(side.name, partial(self._run, side)) for side in (*hall.ours, *hall.bare)]
        if hall.sketch is not None:
            probes.append(Probe(SKETCH, partial(self._run_sketch, hall.sketch)))
        return probes

    def _run(self, side: Contestant, round_number: int) -> str:
        options, add = self._hall.options, self._hall.results.add
        side.store.reset()
        with side.producer() as producer:
            producer.call("concurrent", jobs=_WARM_UP, callers=CALLERS)
            single = producer.call("single", jobs=options.single_jobs)
            concurrent = producer.call("concurrent", jobs=options.jobs, callers=CALLERS)
            bulk = producer.call("bulk", jobs=options.jobs)
        add("submit.single", side.name, round_number, single["rate"])
        add("submit.concurrent", side.name, round_number, concurrent["rate"])
        add("submit.bulk", side.name, round_number, bulk["rate"])
        add("submit.bulk_cpu", side.name, round_number, bulk["cpu_us"])
        return f"{single['rate']:,.0f} · {concurrent['rate']:,.0f} · {bulk['rate']:,.0f} /s"

    def _run_sketch(self, sketch: Sketch, round_number: int) -> str:
        sketch.store.reset()
        rate = sketch.submit(self._hall.options.jobs)
        self._hall.results.add("submit.bulk", SKETCH, round_number, rate)
        return f"{rate:,.0f} /s"
