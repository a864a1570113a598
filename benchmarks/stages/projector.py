"""The projector alone: a prepared feed into an empty ledger, by `holdfast upkeep` without any worker.

Three feeds: lives in one piece; a backlog (all jobs are created first, then claimed and settled 500 at a time, as when
a queue is drained), so that each job's row is written in one batch and changed in another; and, the hard case, lives
that are spread out (all created, then all claimed, then all settled), so that it is changed in two. The yardstick, if
one is named, writes whole lives only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.audit import Audit, keeper
from benchmarks.children import ANSWER_WITHIN_S, ProbeFailed
from benchmarks.model import SKETCH, Measure
from benchmarks.stages.stage import Hall, Probe, Stage

WHOLE: Final = "holdfast · lives in one piece"
BACKLOG: Final = "holdfast · created before"
SPREAD: Final = "holdfast · lives spread out"
_PART: Final = 500
#: A lease must outlive the preparation.
_LEASE_S: Final = 3_600
_RATE: Final = re.compile(r"([\d,.]+) jobs/s")


class Projector(Stage):
    """From the start of the projector until its position is at the end of the feed."""

    name = "projector"
    title = "The projector alone"
    measures = (
        Measure("projector", "jobs with a row and three events each", "jobs/s", more_is_better=True),
        Measure("projector.cpu", "CPU of the projector", "µs/job", digits=1),
        Measure("projector.redis", "CPU of Redis", "µs/job", digits=1),
        Measure("projector.postgres", "CPU of PostgreSQL", "µs/job", digits=1),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "projector")

    def prepare(self) -> None:
        self._audit.prepare()

    def probes(self) -> Sequence[Probe]:
        hall = self._hall
        jobs, sketch = hall.options.feed_jobs, hall.options.ledger_sketch
        probes = [
            Probe(WHOLE, partial(self._run, WHOLE, _PART, _PART)),
            Probe(BACKLOG, partial(self._run, BACKLOG, jobs, _PART)),
            Probe(SPREAD, partial(self._run, SPREAD, jobs, jobs)),
        ]
        if sketch is not None:
            probes.append(Probe(SKETCH, partial(self._run_sketch, sketch)))
        return probes

    def _run(self, side: str, created: int, run: int, round_number: int) -> str:
        jobs = self._hall.options.feed_jobs
        self._audit.reset()
        fill_feed(self._audit, jobs, created, run)
        spent = project(self._hall, self._audit)
        self._audit.check(jobs)
        add = self._hall.results.add
        add("projector", side, round_number, jobs / spent.seconds)
        for measure, cpu_s in (("cpu", spent.projector), ("redis", spent.redis), ("postgres", spent.postgres)):
            add(f"projector.{measure}", side, round_number, cpu_s / jobs * 1e6)
        return spent.summary(jobs)

    def _run_sketch(self, script: Path, round_number: int) -> str:
        rate = _sketch_rate(script, self._hall.postgres.running.port)
        self._hall.results.add("projector", SKETCH, round_number, rate)
        return f"{rate:,.0f} /s"


@dataclass(frozen=True, slots=True)
class Projected:
    """What projecting a feed took; CPU in seconds."""

    seconds: float
    projector: float
    redis: float
    postgres: float

    def summary(self, jobs: int) -> str:
        us = 1e6 / jobs
        parts = " + ".join(f"{cpu_s * us:.1f}" for cpu_s in (self.projector, self.redis, self.postgres))
        return f"{jobs / self.seconds:,.0f} /s · CPU {parts} µs/job"


def fill_feed(audit: Audit, jobs: int, created: int, run: int) -> None:
    """Write a feed of whole histories: jobs are created in batches, then claimed and settled in batches."""
    with audit.side("", visibility_timeout_s=_LEASE_S).producer() as producer:
        producer.call("lives", jobs=jobs, created=created, run=run)


def project(hall: Hall, audit: Audit) -> Projected:
    """Let a projector that is connected work until it is at the end of the feed."""
    with keeper(audit.side("")) as child:
        redis, postgres, began = hall.redis.cpu_s(), hall.postgres.cpu_s(), time.monotonic()
        child.call("start", limit=None)
        audit.until_caught_up()
        seconds = time.monotonic() - began
        cpu_s = child.call("report")["cpu_s"]
        return Projected(seconds, cpu_s, hall.redis.cpu_s() - redis, hall.postgres.cpu_s() - postgres)


def _sketch_rate(script: Path, port: int) -> float:
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PGPORT": str(port)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ProbeFailed("the yardstick does not end") from exc
    found = _RATE.search(done.stdout)
    if done.returncode or found is None:
        raise ProbeFailed(f"the yardstick ended with {done.returncode}\n{(done.stderr or done.stdout)[-1500:]}")
    return float(found[1].replace(",", ""))
