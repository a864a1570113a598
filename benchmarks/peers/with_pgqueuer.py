"""pgqueuer: batches of 500, asyncpg, uvloop. Its log gets three rows a job: queued, picked, successful."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import asyncpg
import msgspec
from pgqueuer import PgQueuer, Queries  # type: ignore[import-not-found]
from pgqueuer.models import Job  # type: ignore[import-not-found]

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, main, serve, timed
from benchmarks.usage import resident_bytes

_BATCH: Final = 500
_PART: Final = 1_000


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    connection = await asyncpg.connect(spec.url)
    queries = Queries.from_asyncpg_connection(connection)
    payload = msgspec.json.encode(ARGUMENT)

    async def install() -> Answer:
        await queries.install()
        return {}

    async def bulk(jobs: int) -> Answer:
        with timed(jobs) as answer:
            for start in range(0, jobs, _PART):
                count = min(_PART, jobs - start)
                await queries.enqueue(["noop"] * count, [payload] * count, [0] * count)
        return answer

    await serve({"install": install, "bulk": bulk})
    await connection.close()


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    gauge = Gauge(spec.board_path, spec.row)
    pool = await asyncpg.create_pool(spec.url, min_size=4, max_size=4)
    queue = PgQueuer.from_asyncpg_pool(pool)
    running: list[asyncio.Task[Any]] = []

    @queue.entrypoint("noop")
    async def noop(job: Job) -> None:
        msgspec.json.decode(job.payload or b"{}")
        gauge.tick()

    async def start(limit: int | None) -> Answer:
        running.append(asyncio.create_task(queue.run(batch_size=_BATCH)))
        return {}

    async def report() -> Answer:
        return {"cpu_s": gauge.cpu_s, "rss": resident_bytes()}

    await serve({"start": start, "report": report})
    queue.shutdown.set()
    await asyncio.wait(running, timeout=5)
    pool.terminate()


if __name__ == "__main__":
    main({"produce": produce, "work": work})
