"""A ledger with a long history: the first page of every filtered list, and what projecting costs there.

Jobs are projected into the full ledger and into an empty one in turn, from the same kind of feed. CPU of PostgreSQL and
of the projector together is what is compared: a table's size shows there, and time is at the mercy of the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks import history
from benchmarks.audit import Audit
from benchmarks.model import Measure
from benchmarks.stages.projector import fill_feed, project
from benchmarks.stages.stage import Hall, Probe, Stage
from holdfast.core.job import MAX_BATCH

EMPTY: Final = "empty ledger"
#: Else the reconciler would find that the engine has lost them, and put them back.
_SET_ASIDE: Final = "UPDATE jobs SET queue = 'past' WHERE queue = 'default' AND finished_at IS NULL"
#: The feed starts again for every probe, and must not be taken for a fork of the last one.
_RESET_FEED: Final = "DELETE FROM feed_positions", "DELETE FROM feed_entries"


class History(Stage):
    """Filled once, before the first round."""

    name = "history"
    title = "A ledger with a long history"
    measures = (
        Measure("history.pages", "first page of a list, median of each filter", "ms", digits=1, compared=False),
        Measure("history.cpu", "projecting: CPU of PostgreSQL and projector", "µs/job", digits=1),
        Measure("history.postgres", "of that PostgreSQL", "µs/job", digits=1),
        Measure("history.rate", "projecting", "jobs/s", more_is_better=True),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._empty = Audit(hall, "history_empty")
        self._full = Audit(hall, "history_full")
        self._side = f"{hall.options.history_events:,} events"

    def prepare(self) -> None:
        self._empty.prepare()
        self._full.database.reset()
        history.fill(self._full.database.url, self._hall.options.history_events)
        execute = self._hall.postgres.execute
        for statement in (_SET_ASIDE, "VACUUM ANALYZE", "CHECKPOINT"):
            execute(statement, self._full.database.database)

    def probes(self) -> Sequence[Probe]:
        return [
            Probe(f"projecting, {EMPTY}", partial(self._run_projector, EMPTY, self._empty)),
            Probe(f"projecting, {self._side}", partial(self._run_projector, self._side, self._full)),
            Probe(f"lists, {self._side}", self._run_pages),
        ]

    def _run_projector(self, side: str, audit: Audit, round_number: int) -> str:
        hall, jobs = self._hall, self._hall.options.feed_jobs
        hall.redis.reset()
        if audit is self._empty:
            audit.database.reset()
        else:
            for statement in _RESET_FEED:
                audit.database.rows(statement)
            hall.postgres.execute("CHECKPOINT")
        before = audit.count()
        fill_feed(audit, jobs, jobs, MAX_BATCH)
        spent = project(hall, audit)
        audit.check(jobs, before)
        add, us = hall.results.add, 1e6 / jobs
        add("history.cpu", side, round_number, (spent.projector + spent.postgres) * us)
        add("history.postgres", side, round_number, spent.postgres * us)
        add("history.rate", side, round_number, jobs / spent.seconds)
        return spent.summary(jobs)

    def _run_pages(self, round_number: int) -> str:
        took_ms = history.first_pages(self._full.database.url)
        for name, value in took_ms.items():
            self._hall.results.add("history.pages", name, round_number, value)
        slowest = max(took_ms, key=lambda name: took_ms[name])
        return f"{len(took_ms)} filters, slowest {took_ms[slowest]:.1f} ms: {slowest}"
