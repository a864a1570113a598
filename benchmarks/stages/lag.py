"""How far the ledger is behind: 2,000 jobs a second, from an event in the engine to its row in PostgreSQL.

The event's time is the engine's clock, the reader's clock is the same machine's, and the reader looks every few
milliseconds, so that what it sees may be that much older than it says: figures err on the slow side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.audit import EVENTS_PER_JOB, Audit
from benchmarks.children import Child, ProbeFailed
from benchmarks.contest import until_done
from benchmarks.model import OURS_LEDGER, Measure, percentile
from benchmarks.postgres import Database
from benchmarks.stages.stage import Hall, Probe, Stage

PER_S: Final = 2_000
_POLL_S: Final = 0.005
_WARM_UP: Final = 200
_SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_SEEN_WITHIN_S: Final = 60.0
#: New rows lie at the table's end, or in room that was left in one of its last blocks.
_BLOCKS_BACK: Final = 2
#: When nothing new comes at the end, the whole table is looked at: that many may lie elsewhere.
_QUIET_S: Final = 2.0
_HIDDEN: Final = 0.0005
_NEW: Final = (
    "SELECT ctid::text AS place, extract(epoch FROM at)::float8 AS at FROM job_events WHERE ctid > $1::text::tid"
)


class Lag(Stage):
    """One worker that projects by itself, one process that submits."""

    name = "lag"
    title = f"Ledger lag at {PER_S:,} jobs/s, event to row"
    measures = (
        *(Measure(f"lag.{name}", name, "ms", digits=1) for name in _SHARES),
        Measure("lag.rate", "jobs submitted", "jobs/s", more_is_better=True),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "lag")

    def prepare(self) -> None:
        self._audit.prepare()

    def probes(self) -> Sequence[Probe]:
        return [Probe(OURS_LEDGER, partial(self._run, OURS_LEDGER))]

    def _run(self, side: str, round_number: int) -> str:
        hall, audit = self._hall, self._audit
        audit.reset()
        ours = audit.side(side)
        with ours.producer() as producer, ours.workers(1, hall.board) as (worker,):
            worker.call("start", limit=None)
            producer.call("bulk", jobs=_WARM_UP)
            until_done(hall.board, _WARM_UP)
            worker.call("report")
            audit.until_caught_up()
            reader = _Reader(audit.database)
            reader.read()
            reader.late_ms.clear()
            producer.send("steady", per_s=PER_S, seconds=hall.options.lag_s)
            sent = reader.watch(producer)
            reader.until(sent["jobs"] * EVENTS_PER_JOB)
        late_ms = sorted(reader.late_ms)
        shares = {name: percentile(late_ms, share) for name, share in _SHARES.items()}
        for name, value in shares.items():
            hall.results.add(f"lag.{name}", side, round_number, value)
        hall.results.add("lag.rate", side, round_number, sent["rate"])
        summary = " · ".join(f"{name} {value:.0f}" for name, value in shares.items())
        return f"{summary} ms of {len(late_ms):,} events at {sent['rate']:,.0f} jobs/s"


class _Reader:
    """Sees every new row once, soon after it can be seen."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._positions: set[str] = set()
        self._block = 0
        self.late_ms: list[float] = []

    def read(self, from_block: int | None = None) -> int:
        """Take what is new, and say how much. Counts the time of the query itself as lag."""
        start = max(0, self._block - _BLOCKS_BACK) if from_block is None else from_block
        rows = self._database.rows(_NEW, f"({start},0)")
        now = time.time()
        fresh = [row for row in rows if row["place"] not in self._positions]
        if fresh:
            self._block = int(rows[-1]["place"][1:].partition(",")[0])
            self._positions.update(row["place"] for row in fresh)
            self.late_ms += [(now - row["at"]) * 1e3 for row in fresh]
        return len(fresh)

    def watch(self, producer: Child) -> dict[str, Any]:
        """Read repeatedly until the producer has its answer."""
        while not producer.ready():
            self.read()
            time.sleep(_POLL_S)
        return producer.answer()

    def until(self, events: int) -> None:
        """Read until all events have arrived. Rows in blocks that were not read count as late as they are found."""
        deadline, quiet_at = time.monotonic() + _SEEN_WITHIN_S, time.monotonic() + _QUIET_S
        while len(self.late_ms) < events:
            if self.read():
                quiet_at = time.monotonic() + _QUIET_S
            elif time.monotonic() > quiet_at and (found := self.read(0)) > events * _HIDDEN:
                raise ProbeFailed(f"{found:,} events lay where the reader did not look")
            if time.monotonic() > deadline:
                raise ProbeFailed(f"{len(self.late_ms):,} of {events:,} events were seen in the ledger")
            time.sleep(_POLL_S)
