"""DBOS: a hundred workflows at a time, its queue looked at every 10 ms."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dbos import DBOS, DBOSClient, DBOSConfig  # type: ignore[import-not-found]

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, main, serve, timed
from benchmarks.usage import resident_bytes

_AT_ONCE: Final = 100
_POLL_S: Final = 0.010
_POOL: Final = 20
_VERSION: Final = "bench"


def _launch(spec: Spec) -> None:
    config = DBOSConfig(
        name="bench",
        system_database_url=spec.url,
        sys_db_pool_size=_POOL,
        max_executor_threads=_AT_ONCE,
        application_version=_VERSION,
        log_level="WARNING",
    )
    DBOS(config=config)
    DBOS.launch()


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""

    async def install() -> Answer:
        def migrate() -> None:
            _launch(spec)
            DBOS.register_queue("noops", worker_concurrency=_AT_ONCE, polling_interval_sec=_POLL_S)
            DBOS.destroy()

        await asyncio.to_thread(migrate)
        return {}

    async def bulk(jobs: int) -> Answer:
        return await asyncio.to_thread(_enqueue, spec.url, jobs)

    await serve({"install": install, "bulk": bulk})


def _enqueue(url: str, jobs: int) -> Answer:
    client = DBOSClient(system_database_url=url, system_database_pool_size=_POOL, application_name="bench")
    options: Any = {"queue_name": "noops", "workflow_name": "noop", "app_version": _VERSION}
    with timed(jobs) as answer, ThreadPoolExecutor(_POOL) as threads:
        list(threads.map(lambda _: client.enqueue(options, ARGUMENT), range(jobs)))
    client.destroy()
    return answer


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    gauge = Gauge(spec.board_path, spec.row)
    # Its workflows run in many threads.
    counting = threading.Lock()

    @DBOS.workflow(name="noop")
    def noop(argument: dict[str, Any]) -> int:
        with counting:
            gauge.tick()
        return 1

    async def start(limit: int | None) -> Answer:
        await asyncio.to_thread(_launch, spec)
        return {}

    async def report() -> Answer:
        return {"cpu_s": gauge.cpu_s, "rss": resident_bytes()}

    await serve({"start": start, "report": report})
    await asyncio.to_thread(DBOS.destroy)


if __name__ == "__main__":
    main({"produce": produce, "work": work})
