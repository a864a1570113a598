"""pgqueuer: batches of 500, asyncpg, uvloop. Its log gets three rows a job: queued, picked, successful."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import asyncpg
import msgspec
from pgqueuer import PgQueuer, Queries  # type: ignore[import-not-found]
from pgqueuer.models import Job  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, main, parts, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_BATCH: Final = 500
_PART: Final = 1_000
_CONNECTIONS: Final = 4
#: After which silence a job is picked again, and how often it polls without a notification; 30 s each by default.
_TUNED: Final = {"heartbeat_timeout": timedelta(seconds=10), "dequeue_timeout": timedelta(seconds=2)}


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    connection = await asyncpg.connect(spec.url)
    queries = Queries.from_asyncpg_connection(connection)

    async def noop(argument: dict[str, Any]) -> None:
        await queries.enqueue("noop", msgspec.json.encode(argument))

    async def stamp(sent_ns: int) -> None:
        await queries.enqueue("stamp", msgspec.json.encode(sent_ns))

    async def slow(number: int) -> None:
        await queries.enqueue("slow", msgspec.json.encode(number))

    async def bulk(jobs: int) -> None:
        payload = msgspec.json.encode(ARGUMENT)
        for count in parts(jobs, _PART):
            await queries.enqueue(["noop"] * count, [payload] * count, [0] * count)

    await produce_by(noop=noop, stamp=stamp, slow=slow, bulk=bulk, install=queries.install)


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, batch_size=_BATCH)


async def slow_work(spec: Spec) -> None:
    """Ten at a time, in batches of five: it wants twice its batch."""
    tuned = _TUNED if is_tuned(spec) else {}
    await _work(spec, batch_size=AT_ONCE // 2, max_concurrent_tasks=AT_ONCE, **tuned)


async def _work(spec: Spec, **settings: Any) -> None:
    record = Record(spec)
    pool = await asyncpg.create_pool(spec.url, min_size=_CONNECTIONS, max_size=_CONNECTIONS)
    queue = PgQueuer.from_asyncpg_pool(pool)

    @queue.entrypoint("noop")
    async def noop(job: Job) -> None:
        msgspec.json.decode(job.payload or b"{}")
        record.count()

    @queue.entrypoint("stamp")
    async def stamp(job: Job) -> None:
        record.stamp(msgspec.json.decode(job.payload or b"0"))

    @queue.entrypoint("slow")
    async def slow(job: Job) -> None:
        await record.slow(msgspec.json.decode(job.payload or b"0"))

    await work_in_loop(record, lambda: queue.run(**settings))


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
