"""The HTTP service: how many submissions one process takes, a page of a long list, and what open event streams cost.

The generator is a separate process with plain sockets, so that one core is the server's. Submissions are single jobs
on 32 connections that stay open, each request answered before the next is sent. The streams are callers that each wait
for their own job, which is their purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.audit import Audit
from benchmarks.children import Child, ProbeFailed
from benchmarks.model import OURS_LEDGER, Measure
from benchmarks.stages.stage import Hall, Probe, Stage

CONNECTIONS: Final = 32
STREAMS: Final = 500
_PAGES: Final = 50
_WITHOUT: Final = "without streams"
_WITH: Final = f"with {STREAMS} streams"
_MODULE: Final = "benchmarks.sides.http"
#: Finished jobs of two tenants, as the projector would have left them: newest last.
_FILL: Final = """
INSERT INTO jobs (tenant_id, queue, job_id, job_type, state, priority, attempt, retry_count, last_seq, idempotency_key,
                  trace_id, payload, created_at, updated_at, finished_at)
SELECT 'tenant-' || (n % 2), 'default', lpad(to_hex(n), 32, '0'), 'noop',
       CASE n % 10 WHEN 0 THEN 'cancelled' ELSE 'succeeded' END, 1, 1, 0, 3, '', '', '{}',
       now() - (%(jobs)s - n) * interval '1 second', now(), now()
  FROM generate_series(1, %(jobs)s) AS n
"""


class Http(Stage):
    """One server process on Redis and PostgreSQL, without a worker."""

    name = "http"
    title = "HTTP service, one process"
    measures = (
        Measure("http.rate", f"submissions, {CONNECTIONS} connections", "jobs/s", more_is_better=True),
        Measure("http.p99", "submission, p99", "ms", digits=1),
        Measure("http.cpu", "submission, CPU of the server", "µs/job"),
        Measure("http.redis", "submission, CPU of Redis", "µs/job", digits=1),
        Measure("http.page", "first page of a list", "ms", digits=1, compared=False),
        Measure("http.memory", f"memory of {STREAMS} open streams", "MB", compared=False),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "http")
        self._long = Audit(hall, "http_long")

    def prepare(self) -> None:
        self._audit.prepare()
        self._long.prepare()
        self._long.database.reset()
        execute = self._hall.postgres.execute
        execute(_FILL.replace("%(jobs)s", str(self._hall.options.listed_jobs)), self._long.database.database)
        execute("VACUUM ANALYZE", self._long.database.database)

    def probes(self) -> Sequence[Probe]:
        return [
            Probe(f"submit, {_WITHOUT}", partial(self._submit, _WITHOUT, 0)),
            Probe(f"submit, {_WITH}", partial(self._submit, _WITH, STREAMS)),
            Probe(f"list, {self._hall.options.listed_jobs:,} jobs", self._list),
        ]

    def _submit(self, side: str, streams: int, round_number: int) -> str:
        self._audit.reset()
        with self._server(self._audit) as server, self._caller(server) as caller:
            before = server.call("usage")["bytes"]
            opened = caller.call("open_streams", count=streams)["open"] if streams else 0
            if opened != streams:
                raise ProbeFailed(f"{opened} of {streams} streams are open")
            grown = server.call("usage")["bytes"] - before
            jobs = self._hall.options.jobs
            caller.call("submit", connections=CONNECTIONS, jobs=jobs // 10)
            server_s, redis_s = server.call("usage")["cpu_s"], self._hall.redis.cpu_s()
            sent = caller.call("submit", connections=CONNECTIONS, jobs=jobs)
            redis_s = self._hall.redis.cpu_s() - redis_s
            server_s = server.call("usage")["cpu_s"] - server_s
        self._hall.results.add("http.rate", side, round_number, sent["rate"])
        self._hall.results.add("http.p99", side, round_number, sent["p99_ms"])
        self._hall.results.add("http.cpu", side, round_number, 1e6 * server_s / jobs)
        self._hall.results.add("http.redis", side, round_number, 1e6 * redis_s / jobs)
        summary = f"{sent['rate']:,.0f} jobs/s, p99 {sent['p99_ms']:.1f} ms"
        if streams:
            self._hall.results.add("http.memory", OURS_LEDGER, round_number, grown / 1e6)
            summary += f", streams {grown / 1e6:.0f} MB"
        return summary

    def _list(self, round_number: int) -> str:
        with self._server(self._long) as server, self._caller(server) as caller:
            durations: dict[str, float] = caller.call("list", pages=_PAGES)["median_ms"]
        for query, value in durations.items():
            self._hall.results.add("http.page", query, round_number, value)
        slowest = max(durations, key=lambda query: durations[query])
        return f"{len(durations)} lists, slowest {durations[slowest]:.1f} ms: {slowest}"

    def _server(self, audit: Audit) -> Child:
        spec = {"url": self._hall.redis.url, "settings": {"ledger": audit.database.url}}
        return Child(_MODULE, "server", spec, self._hall.scratch)

    def _caller(self, server: Child) -> Child:
        where: dict[str, Any] = server.call("where")
        return Child(_MODULE, "caller", where, self._hall.scratch)
