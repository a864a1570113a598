"""Full audit in PostgreSQL, end to end: jobs queued, run, settled and recorded, compared with other task systems.

Ours begins when the worker starts and ends when the ledger has a final row of every job and every event, at
the end of the feed. A peer begins with its first execution, which is to its favour, and ends when its own tables say
that all is settled. Its jobs are in PostgreSQL by then, ours are not: the ledger hears of them after the start. So
there is a second figure, with the time that their submission took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.audit import NO_UPKEEP, Audit, keeper
from benchmarks.children import Child, ProbeFailed
from benchmarks.contest import Contestant, until_done
from benchmarks.model import OURS_LEDGER, OURS_UPKEEP, Measure
from benchmarks.peers import venv
from benchmarks.peers.field import ON_POSTGRES, Peer, on
from benchmarks.stages.stage import Hall, Probe, Stage

_POLL_S: Final = 0.005
_SETTLED_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What one probe took; CPU in seconds."""

    jobs: int
    submitted_s: float
    seconds: float
    worker: float
    keeper: float
    redis: float
    postgres: float

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds

    @property
    def whole_rate(self) -> float:
        return self.jobs / (self.submitted_s + self.seconds)

    @property
    def total(self) -> float:
        return self.worker + self.keeper + self.redis + self.postgres


class Audited(Stage):
    """One worker process each."""

    name = "audited"
    title = "Queued jobs run, settled and recorded in PostgreSQL, 1 worker"
    measures = (
        Measure("audited", "until all is recorded", "jobs/s", more_is_better=True),
        Measure("audited.run", "of that, until the last execution", "jobs/s", more_is_better=True),
        Measure("audited.whole", "the same, and submitted before in bulk", "jobs/s", more_is_better=True),
        Measure("audited.total", "CPU of all processes", "µs/job", digits=1),
        Measure("audited.worker", "CPU of the worker", "µs/job", digits=1),
        Measure("audited.upkeep", "CPU of upkeep", "µs/job", digits=1),
        Measure("audited.redis", "CPU of Redis", "µs/job", digits=1),
        Measure("audited.postgres", "CPU of PostgreSQL", "µs/job", digits=1),
        Measure("audited.bytes", "in PostgreSQL afterwards", "bytes/job"),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "holdfast")
        self._peers: list[Peer] = []

    def prepare(self) -> None:
        self._audit.prepare()
        peers = [peer for peer in on(ON_POSTGRES) if peer.name in self._hall.options.peers]
        found = venv.ensure(peer.name for peer in peers)
        self._peers = [peer for peer in peers if venv.is_there(found[peer.name])]
        summary = [f"{peer.side} {found[peer.name]}" for peer in peers]
        self._hall.results.settings["peers"] = ", ".join(summary) or "none"

    def probes(self) -> Sequence[Probe]:
        ours = [
            Probe(OURS_LEDGER, partial(self._run_ours, OURS_LEDGER, False)),
            Probe(OURS_UPKEEP, partial(self._run_ours, OURS_UPKEEP, True)),
        ]
        return ours + [Probe(peer.side, partial(self._run_peer, peer)) for peer in self._peers]

    def _run_ours(self, name: str, apart: bool, round_number: int) -> str:
        hall, audit, jobs = self._hall, self._audit, self._hall.options.feed_jobs
        audit.reset()
        side, base = audit.side(name, NO_UPKEEP if apart else ""), audit.database.used_bytes()
        with side.producer() as producer:
            submitted_s = _submit(producer, jobs)
        with ExitStack() as stack:
            (worker,) = stack.enter_context(side.workers(1, hall.board))
            keepers = [stack.enter_context(keeper(side))] if apart else []
            redis, postgres, began = hall.redis.cpu_s(), hall.postgres.cpu_s(), time.monotonic()
            _start([*keepers, worker])
            until_done(hall.board, jobs)
            # Answers once every verdict is settled: from then on the feed has its end.
            worker.call("report")
            audit.until_caught_up()
            seconds = time.monotonic() - began
            spent = Spent(
                jobs,
                submitted_s,
                seconds,
                worker=worker.call("report")["cpu_s"],
                keeper=sum(child.call("report")["cpu_s"] for child in keepers),
                redis=hall.redis.cpu_s() - redis,
                postgres=hall.postgres.cpu_s() - postgres,
            )
            ran_s = hall.board.last_ns / 1e9 - began
        audit.check(jobs)
        return self._note(name, round_number, spent, jobs / ran_s, (audit.database.used_bytes() - base) / jobs)

    def _run_peer(self, peer: Peer, round_number: int) -> str:
        hall = self._hall
        jobs = max(1, round(hall.options.feed_jobs * peer.share))
        database = hall.postgres.database(f"peer_{peer.name}")
        database.reset()
        side = Contestant(peer.side, peer.module, database, hall.scratch, python=venv.python(peer.name))
        with side.producer() as producer:
            producer.call("install")
            base = database.used_bytes()
            submitted_s = _submit(producer, jobs)
        with side.workers(1, hall.board) as (worker,):
            postgres = hall.postgres.cpu_s()
            _start([worker])
            until_done(hall.board, jobs)
            _until_none(lambda: int(database.value(peer.left)))
            seconds = time.monotonic() - hall.board.first_ns / 1e9
            cpu_s = worker.call("report")["cpu_s"]
            postgres_s = hall.postgres.cpu_s() - postgres
            spent = Spent(jobs, submitted_s, seconds, worker=cpu_s, keeper=0, redis=0, postgres=postgres_s)
            if hall.board.done != jobs:
                raise ProbeFailed(f"{hall.board.done:,} executions of {jobs:,} jobs")
        size = (database.used_bytes() - base) / jobs
        summary = self._note(peer.side, round_number, spent, jobs / hall.board.span_s, size)
        database.drop()
        return summary

    def _note(self, side: str, round_number: int, spent: Spent, run_rate: float, size: float) -> str:
        add, us = self._hall.results.add, 1e6 / spent.jobs
        add("audited", side, round_number, spent.rate)
        add("audited.run", side, round_number, run_rate)
        add("audited.whole", side, round_number, spent.whole_rate)
        add("audited.total", side, round_number, spent.total * us)
        for part in ("worker", "keeper", "redis", "postgres"):
            if value := getattr(spent, part):
                add(f"audited.{'upkeep' if part == 'keeper' else part}", side, round_number, value * us)
        add("audited.bytes", side, round_number, size)
        parts = (spent.worker + spent.keeper, spent.redis, spent.postgres)
        cpu = " + ".join(f"{part * us:.0f}" for part in parts if part)
        return f"{spent.rate:,.0f} /s (run at {run_rate:,.0f}; whole {spent.whole_rate:,.0f}) · CPU {cpu} µs/job"


def _submit(producer: Child, jobs: int) -> float:
    """Queue jobs; returns the seconds it took."""
    return float(jobs / producer.call("bulk", jobs=jobs)["rate"])


def _start(children: Sequence[Child]) -> None:
    for child in children:
        child.send("start", limit=None)
    for child in children:
        child.answer()


def _until_none(left: Callable[[], int]) -> None:
    deadline = time.monotonic() + _SETTLED_WITHIN_S
    while rest := left():
        if time.monotonic() > deadline:
            raise ProbeFailed(f"{rest:,} jobs were executed and are not settled")
        time.sleep(_POLL_S)
