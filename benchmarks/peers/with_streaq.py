"""streaq: 64 coroutines, results off, no log line per task."""

from __future__ import annotations

from typing import Any, Final

from streaq import Worker  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, jobs_in_loop, main, parts, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_CONCURRENCY: Final = 64
_PART: Final = 500
#: After which time a task of a silent worker is queued again; a minute by default.
_IDLE_S: Final = 10


def _worker(spec: Spec, concurrency: int, record: Record | None = None) -> tuple[Any, Any, Any, Any]:
    tuned: dict[str, Any] = {"idle_timeout": _IDLE_S} if is_tuned(spec) else {}
    worker: Any = Worker(redis_url=spec.url, concurrency=concurrency, handle_signals=False, **tuned)
    tasks = [worker.task(name=function.__name__, ttl=0, silent=True)(function) for function in jobs_in_loop(record)]
    return (worker, *tasks)


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    worker, noop, stamp, slow = _worker(spec, _CONCURRENCY)

    async def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            await worker.enqueue_many([noop.enqueue(ARGUMENT) for _ in range(count)])

    async with worker:
        await produce_by(noop=noop.enqueue, stamp=stamp.enqueue, slow=slow.enqueue, bulk=bulk)


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, _CONCURRENCY)


async def slow_work(spec: Spec) -> None:
    """Ten at a time."""
    await _work(spec, AT_ONCE)


async def _work(spec: Spec, concurrency: int) -> None:
    record = Record(spec)
    worker, *_ = _worker(spec, concurrency, record)
    await work_in_loop(record, worker.run_async)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
