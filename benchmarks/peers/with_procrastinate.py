"""procrastinate: five at a time, psycopg's binary build, uvloop. Three events a job by triggers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import procrastinate  # type: ignore[import-not-found]

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, main, serve, timed
from benchmarks.usage import resident_bytes

_AT_ONCE: Final = 5
_PART: Final = 1_000


def _app(spec: Spec, gauge: Gauge | None) -> procrastinate.App:
    pool = {"min_size": _AT_ONCE + 2, "max_size": _AT_ONCE + 5}
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=spec.url, **pool))

    @app.task(name="noop")
    async def noop(n: int, a: str) -> None:
        if gauge is not None:
            gauge.tick()

    return app


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    app = _app(spec, None)

    async def install() -> Answer:
        await app.schema_manager.apply_schema_async()
        return {}

    async def bulk(jobs: int) -> Answer:
        with timed(jobs) as answer:
            for start in range(0, jobs, _PART):
                await app.tasks["noop"].batch_defer_async(*([ARGUMENT] * min(_PART, jobs - start)))
        return answer

    async with app.open_async():
        await serve({"install": install, "bulk": bulk})


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    gauge = Gauge(spec.board_path, spec.row)
    app = _app(spec, gauge)
    running: list[asyncio.Task[Any]] = []

    async def start(limit: int | None) -> Answer:
        worker = app.run_worker_async(concurrency=_AT_ONCE, install_signal_handlers=False)
        running.append(asyncio.create_task(worker))
        return {}

    async def report() -> Answer:
        return {"cpu_s": gauge.cpu_s, "rss": resident_bytes()}

    async with app.open_async():
        await serve({"start": start, "report": report})
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=5)


if __name__ == "__main__":
    main({"produce": produce, "work": work})
