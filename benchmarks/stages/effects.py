"""Once-only effects: queued jobs, a hundred at a time, each with one effect that is reserved, done and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks.audit import MODULE, Audit
from benchmarks.children import ProbeFailed
from benchmarks.contest import Contestant, drain
from benchmarks.model import OURS_LEDGER, OURS_SQLITE, Measure
from benchmarks.postgres import Database
from benchmarks.stages.stage import Hall, Probe, Stage

_DONE: Final = "SELECT count(*) FROM idempotency_keys WHERE state = 'done'"


class Effects(Stage):
    """In PostgreSQL with Redis, and in the embedded engine's own file. The effect itself does nothing."""

    name = "effects"
    title = "Jobs with one effect each, 1 worker"
    measures = (
        Measure("effects", "reserved, done and recorded", "effects/s", more_is_better=True),
        Measure("effects.cpu", "CPU of the worker, job and projector included", "µs/effect", digits=1),
        Measure("effects.postgres", "CPU of PostgreSQL until then", "µs/effect", digits=1),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "effects")

    def prepare(self) -> None:
        self._audit.prepare()

    def probes(self) -> Sequence[Probe]:
        embedded = Contestant(OURS_SQLITE, MODULE, self._hall.sqlite, self._hall.scratch)
        return [
            Probe(OURS_LEDGER, self._run_on_postgres),
            Probe(OURS_SQLITE, partial(self._run, embedded, None)),
        ]

    def _run_on_postgres(self, round_number: int) -> str:
        self._audit.reset()
        side = self._audit.side(OURS_LEDGER)
        return self._run(side, self._audit.database, round_number)

    def _run(self, side: Contestant, database: Database | None, round_number: int) -> str:
        hall, jobs = self._hall, max(1, self._hall.options.jobs // 2)
        side.store.reset()
        with side.producer() as producer:
            producer.call("pays", jobs=jobs)
        postgres = database.cpu_s() if database else 0.0
        drained = drain(side, 1, jobs, hall.board)
        add = hall.results.add
        add("effects", side.name, round_number, drained.rate)
        add("effects.cpu", side.name, round_number, drained.worker_us)
        if database is not None:
            add("effects.postgres", side.name, round_number, (database.cpu_s() - postgres) / jobs * 1e6)
            if (done := database.value(_DONE)) != jobs:
                raise ProbeFailed(f"{done:,} effects are recorded of {jobs:,}")
        return f"{drained.rate:,.0f} effects/s · CPU {drained.worker_us:.1f} µs each"
