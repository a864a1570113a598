"""Durable submission: a hundred callers at once, each waits until the ledger has its job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks.audit import Audit, keeper
from benchmarks.children import ProbeFailed
from benchmarks.model import Measure, percentile
from benchmarks.stages.stage import Hall, Probe, Stage
from benchmarks.stages.submit import CALLERS

BY_UPKEEP: Final = "holdfast · upkeep projects"
BY_WORKER: Final = "holdfast · a busy worker projects"
_WARM_UP: Final = 200
_SHARES: Final = {"p50": 0.50, "p99": 0.99}


class Durable(Stage):
    """Once with `holdfast upkeep` alone, once with a worker that runs the jobs as they come."""

    name = "durable"
    title = f"Durable submission, {CALLERS} callers at once"
    measures = (
        Measure("durable", "submitted and in the ledger", "jobs/s", more_is_better=True),
        *(Measure(f"durable.{name}", f"one call, {name}", "ms", digits=1) for name in _SHARES),
        Measure("durable.cpu", "CPU of the submitter", "µs/job", digits=1),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "durable")

    def prepare(self) -> None:
        self._audit.prepare()

    def probes(self) -> Sequence[Probe]:
        return [Probe(side, partial(self._run, side)) for side in (BY_UPKEEP, BY_WORKER)]

    def _run(self, side: str, round_number: int) -> str:
        hall, audit = self._hall, self._audit
        audit.reset()
        ours = audit.side(side)
        with ExitStack() as stack:
            if side == BY_UPKEEP:
                projecting = stack.enter_context(keeper(ours))
            else:
                (projecting,) = stack.enter_context(ours.workers(1, hall.board))
            producer = stack.enter_context(ours.producer())
            projecting.call("start", limit=None)
            producer.call("durable", jobs=_WARM_UP, callers=CALLERS)
            answer = producer.call("durable", jobs=hall.options.jobs, callers=CALLERS)
            self._check(hall.options.jobs + _WARM_UP)
        add, shares = hall.results.add, {name: percentile(answer["late_ms"], share) for name, share in _SHARES.items()}
        add("durable", side, round_number, answer["rate"])
        add("durable.cpu", side, round_number, answer["cpu_us"])
        for name, value in shares.items():
            add(f"durable.{name}", side, round_number, value)
        return f"{answer['rate']:,.0f} /s · p50 {shares['p50']:.1f} · p99 {shares['p99']:.1f} ms"

    def _check(self, jobs: int) -> None:
        """No submission may return before the ledger has its job."""
        if (found := int(self._audit.database.value("SELECT count(*) FROM jobs"))) != jobs:
            raise ProbeFailed(f"{jobs:,} durable submissions returned, {found:,} jobs are in the ledger")
