"""A ledger with a long past: millions of events in PostgreSQL, and the time of the first page of every list.

    python -m benchmarks.history postgresql://… [--events 5000000]

Rows are made by the server itself (`generate_series`), so that filling takes a minute or so and not an hour. The mix is
that of a busy system: nine in ten succeeded long ago, the newest are open, three in a hundred have an error; one type,
one queue, one tenant and one text are rare and old: what a list has to look for longest.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import asyncpg
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast.core.states import State
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.jobs import Queries

EVENTS: Final = 5_000_000
EVENTS_PER_JOB: Final = 3
#: The limit on a first page.
LIMIT_MS: Final = 50.0
ROUNDS: Final = 7

_JOBS_SQL: Final = """
INSERT INTO jobs (tenant_id, job_id, queue, job_type, state, priority, attempt, retry_count, last_seq, idempotency_key,
                  trace_id, error_code, last_error, payload, result, dlq_id, created_at, updated_at, finished_at,
                  next_retry_at)
SELECT CASE WHEN n % 20 = 0 THEN 'acme' WHEN n = 77 THEN 'rare' ELSE 'default' END,
       lpad(to_hex(n), 12, '0') || md5(n::text),
       CASE WHEN n % 10 = 0 THEN 'mail' WHEN n < 500 THEN 'rare' ELSE 'default' END,
       CASE WHEN n < 500 THEN 'rare' ELSE 'task-' || n % 50 END,
       s.state, 1, 1, (s.state = 'retrying')::int, 3,
       CASE WHEN n % 10 = 1 THEN 'key-' || n ELSE lpad(to_hex(n), 12, '0') || md5(n::text) END,
       CASE WHEN n % 2 = 0 THEN 'trace-' || n / 8 ELSE '' END,
       CASE WHEN n % 33 = 0 THEN 'TASK_ERROR' END,
       CASE WHEN n < 500 AND n % 33 = 0 THEN 'RareError: needle in ' || n
            WHEN n % 33 = 0 THEN 'ValueError: the answer to ' || n || ' was wrong' END,
       '{"order":' || n || ',"note":"' || repeat('x', 120) || '"}',
       CASE WHEN s.state = 'succeeded' THEN '{"ok":true}' END,
       CASE WHEN s.state = 'failed' THEN 'dlq-' || n END,
       t.at, t.at + interval '2 s',
       CASE WHEN s.state IN ('succeeded', 'failed', 'cancelled') THEN t.at + interval '2 s' END,
       CASE WHEN s.state = 'retrying' THEN t.at + interval '10 s' END
  FROM generate_series(1, $1::int) AS n,
       LATERAL (SELECT CASE WHEN n > $1 - 2000 THEN 'queued' WHEN n % 330 = 0 THEN 'failed'
                            WHEN n % 331 = 0 THEN 'cancelled' WHEN n % 3300 = 33 THEN 'retrying'
                            WHEN n < 50 THEN 'suspended' ELSE 'succeeded' END) AS s(state),
       -- Less than the retention, or the oldest would be pruned while we measure.
       LATERAL (SELECT now() - interval '25 days' + n * interval '25 days' / $1) AS t(at)
"""

_EVENTS_SQL: Final = """
INSERT INTO job_events (tenant_id, job_id, queue, seq, type, from_state, to_state, attempt, retry_count, worker, at)
SELECT j.tenant_id, j.job_id, j.queue, e.seq, e.type, e.from_state, e.to_state, least(e.seq - 1, 1), 0, 'worker-1',
       j.created_at + e.seq * interval '1 s'
  FROM jobs j, (VALUES (1, 'task.created', NULL, 'queued'), (2, 'task.claimed', 'queued', 'running'),
                       (3, 'task.succeeded', 'running', 'succeeded')) AS e(seq, type, from_state, to_state)
"""

_INDEXES_SQL: Final = """
SELECT indexname, indexdef FROM pg_indexes
 WHERE schemaname = current_schema() AND tablename = 'jobs' AND indexname <> 'jobs_pk'
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """How long the first page of one list took."""

    name: str
    best_ms: float
    median_ms: float
    worst_ms: float
    found: int


def fill(url: str, events: int = EVENTS) -> float:
    """Make the past; seconds that it took. The tables must be there and empty."""
    began = time.monotonic()
    asyncio.run(_fill(url, events // EVENTS_PER_JOB))
    return time.monotonic() - began


async def _fill(url: str, jobs: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
        # Made again at the end: building an index is several times cheaper than growing it.
        indexes = await connection.fetch(_INDEXES_SQL)
        for index in indexes:
            await connection.execute(f"DROP INDEX {index['indexname']}")
        await connection.execute(_JOBS_SQL, jobs, timeout=600)
        await connection.execute(_EVENTS_SQL, timeout=600)
        for index in indexes:
            await connection.execute(index["indexdef"], timeout=600)
        await connection.execute("VACUUM (ANALYZE) jobs", timeout=600)
        await connection.execute("ANALYZE job_events", timeout=600)
    finally:
        await connection.close()


def lists() -> dict[str, JobFilter]:
    """One of every kind, common and rare."""
    one = frozenset
    return {
        "everything": JobFilter(),
        "one tenant": JobFilter(tenant_id="acme"),
        "rare tenant": JobFilter(tenant_id="rare"),
        "queued": JobFilter(states=one({State.QUEUED})),
        "failed": JobFilter(states=one({State.FAILED})),
        "suspended (old)": JobFilter(states=one({State.SUSPENDED})),
        "open": JobFilter(states=one({State.QUEUED, State.RUNNING, State.RETRYING, State.SUSPENDED})),
        "succeeded": JobFilter(states=one({State.SUCCEEDED})),
        "type": JobFilter(job_type="task-7"),
        "rare type": JobFilter(job_type="rare"),
        "type that is not there": JobFilter(job_type="none"),
        "queue": JobFilter(queues=one({"mail"})),
        "rare queue": JobFilter(queues=one({"rare"})),
        "text in the error": JobFilter(error="WRONG"),
        "rare text": JobFilter(error="needle"),
        "text that is not there": JobFilter(error="no such text"),
        "text and state": JobFilter(error="wrong", states=one({State.FAILED})),
        "trace": JobFilter(trace_id="trace-1000"),
        "key": JobFilter(idempotency_key="key-1001"),
        "key that is not there": JobFilter(idempotency_key="none"),
        "type and state": JobFilter(job_type="task-7", states=one({State.SUCCEEDED})),
        "type and wrong queue": JobFilter(job_type="task-7", queues=one({"mail"})),
    }


def first_pages(url: str) -> dict[str, float]:
    """The median of every list's first page, in milliseconds."""
    return {timed.name: timed.median_ms for timed in measure(url)}


def measure(url: str) -> list[Timed]:
    """Time the first page of every list, and counts."""
    return asyncio.run(_measure(url))


async def _measure(url: str) -> list[Timed]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    queries = Queries(engine)
    try:
        timed = [await _time(name, partial(_first_page, queries, filters)) for name, filters in lists().items()]
        timed.append(await _time("counts", partial(_counted, queries)))
        return timed
    finally:
        await engine.dispose()


async def _first_page(queries: Queries, filters: JobFilter) -> int:
    return len((await queries.jobs(filters)).jobs)


async def _counted(queries: Queries) -> int:
    return sum((await queries.counts()).states.values())


async def _time(name: str, work: Callable[[], Awaitable[int]]) -> Timed:
    found = await work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await work()
        times.append((time.perf_counter() - began) * 1000)
    return Timed(name, min(times), statistics.median(times), max(times), found)


def _main(url: str, events: int, *, filled: bool) -> None:
    if not filled:
        print(f"filled in {fill(url, events):.0f} s", flush=True)
    for timed in measure(url):
        times = f"{timed.best_ms:8.1f} {timed.median_ms:8.1f} {timed.worst_ms:8.1f} ms"
        mark = "" if timed.median_ms < LIMIT_MS else "  TOO SLOW"
        print(f"{timed.name:<26}{times}  {timed.found:>9,} found{mark}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--filled", action="store_true", help="the database is full already")
    given = parser.parse_args()
    _main(given.url, given.events, filled=given.filled)
