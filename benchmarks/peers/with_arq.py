"""arq: up to 500 jobs at a time, results off, looks every 10 ms (it polls; half a second by default)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from arq import create_pool  # type: ignore[import-not-found]
from arq.connections import RedisSettings  # type: ignore[import-not-found]
from arq.worker import Worker, func  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, main, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec, in_parallel
from benchmarks.sides.diary import AT_ONCE

_MAX_JOBS: Final = 500
_POLL_S: Final = 0.010
_CALLERS: Final = 100
#: A job that is not finished 10 s after its time-out is taken again; the time-out is 300 s by default.
_TIMEOUT_S: Final = 1


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    pool = await create_pool(RedisSettings.from_dsn(spec.url))
    noop = partial(pool.enqueue_job, "noop")

    async def bulk(jobs: int) -> None:
        await in_parallel(_CALLERS, jobs, partial(noop, ARGUMENT))

    await produce_by(
        noop=noop, stamp=partial(pool.enqueue_job, "stamp"), slow=partial(pool.enqueue_job, "slow"), bulk=bulk
    )


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, max_jobs=_MAX_JOBS, poll_delay=_POLL_S)


async def slow_work(spec: Spec) -> None:
    """Ten at a time, which is its default."""
    await _work(spec, max_jobs=AT_ONCE, **({"job_timeout": _TIMEOUT_S} if is_tuned(spec) else {}))


async def _work(spec: Spec, **settings: Any) -> None:
    record = Record(spec)

    async def noop(ctx: dict[str, Any], argument: dict[str, Any]) -> None:
        record.count()

    async def stamp(ctx: dict[str, Any], sent_ns: int) -> None:
        record.stamp(sent_ns)

    async def slow(ctx: dict[str, Any], number: int) -> None:
        await record.slow(number)

    async def run() -> None:
        functions = [func(function, name=function.__name__, keep_result=0) for function in (noop, stamp, slow)]
        redis = RedisSettings.from_dsn(spec.url)
        await Worker(functions, redis_settings=redis, handle_signals=False, log_results=False, **settings).main()

    await work_in_loop(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
