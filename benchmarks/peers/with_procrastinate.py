"""procrastinate: five at a time, psycopg's binary build, uvloop. Three events a job by triggers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import procrastinate  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, main, parts, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_CONCURRENCY: Final = 5
_PART: Final = 1_000
#: Workers show that they live so often (10 s by default), jobs of those that are silent for so long are tried again
#: (30 s where they are asked for), looked for so often. Its guide "Retry stalled jobs" does the latter in a periodic
#: task, which is once a minute at most; here it is a loop next to the worker.
_ALIVE_S: Final = 3
_SILENCE_S: Final = 10
_POLL_S: Final = 2


def _app(spec: Spec, connections: int, record: Record | None = None) -> procrastinate.App:
    pool = {"min_size": connections, "max_size": connections + 3}
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=spec.url, **pool))

    @app.task(name="noop")
    async def noop(n: int, a: str) -> None:
        if record is not None:
            record.count()

    @app.task(name="stamp")
    async def stamp(sent_ns: int) -> None:
        if record is not None:
            record.stamp(sent_ns)

    @app.task(name="slow")
    async def slow(number: int) -> None:
        if record is not None:
            await record.slow(number)

    return app


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    app = _app(spec, _CONCURRENCY + 2)
    tasks = app.tasks

    async def noop(argument: dict[str, Any]) -> None:
        await tasks["noop"].defer_async(**argument)

    async def stamp(sent_ns: int) -> None:
        await tasks["stamp"].defer_async(sent_ns=sent_ns)

    async def slow(number: int) -> None:
        await tasks["slow"].defer_async(number=number)

    async def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            await tasks["noop"].batch_defer_async(*([ARGUMENT] * count))

    async with app.open_async():
        install = app.schema_manager.apply_schema_async
        await produce_by(noop=noop, stamp=stamp, slow=slow, bulk=bulk, install=install)


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, _CONCURRENCY)


async def slow_work(spec: Spec) -> None:
    """Ten at a time."""
    await _work(spec, AT_ONCE)


async def _work(spec: Spec, concurrency: int) -> None:
    record = Record(spec)
    app = _app(spec, concurrency + 2, record)

    async def run() -> None:
        tuned: Any = {"update_heartbeat_interval": _ALIVE_S} if is_tuned(spec) else {}
        worker = app.run_worker_async(concurrency=concurrency, install_signal_handlers=False, **tuned)
        await asyncio.gather(worker, *([_retry_stalled(app)] if is_tuned(spec) else ()))

    async with app.open_async():
        await work_in_loop(record, run)


async def _retry_stalled(app: procrastinate.App) -> None:
    while True:
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=_SILENCE_S):
            await app.job_manager.retry_job(job)
        await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
