"""streaq: 64 coroutines, results off, no log line per task."""

from __future__ import annotations

from typing import Any, Final

from streaq import Worker  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, main, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_CONCURRENCY: Final = 64
_PART: Final = 500
#: After which time a task of a silent worker is queued again; a minute by default.
_IDLE_S: Final = 10


def _worker(spec: Spec, concurrency: int, record: Record | None = None) -> tuple[Any, Any, Any, Any]:
    tuned: dict[str, Any] = {"idle_timeout": _IDLE_S} if is_tuned(spec) else {}
    worker: Any = Worker(redis_url=spec.url, concurrency=concurrency, handle_signals=False, **tuned)

    async def noop(argument: dict[str, Any]) -> None:
        if record is not None:
            record.count()

    async def stamp(sent_ns: int) -> None:
        if record is not None:
            record.stamp(sent_ns)

    async def slow(number: int) -> None:
        if record is not None:
            await record.slow(number)

    tasks = [worker.task(name=function.__name__, ttl=0, silent=True)(function) for function in (noop, stamp, slow)]
    return (worker, *tasks)


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    worker, noop, stamp, slow = _worker(spec, _CONCURRENCY)

    async def bulk(jobs: int) -> None:
        for start in range(0, jobs, _PART):
            await worker.enqueue_many([noop.enqueue(ARGUMENT) for _ in range(min(_PART, jobs - start))])

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
