"""saq: ten coroutines, as by default; finished jobs are not kept."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from saq import Queue, Worker  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, main, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec, in_parallel
from benchmarks.sides.diary import AT_ONCE

_CALLERS: Final = 100
_NOT_KEPT: Final = -1
#: Retries of a job, its timeout, and the interval of the sweep: none, 10 s and 60 s by default.
#: Its sweep waits 5 s for the dead worker at each job, one after the other, and with less it aborts the second try too.
_RETRIES, _TIMEOUT_S, _SWEEP_S = 5, 2, 1


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    queue: Any = Queue.from_url(spec.url)
    await queue.connect()
    tuned = {"retries": _RETRIES, "timeout": _TIMEOUT_S} if is_tuned(spec) else {}

    async def noop(argument: dict[str, Any]) -> None:
        await queue.enqueue("noop", ttl=_NOT_KEPT, argument=argument)

    async def stamp(sent_ns: int) -> None:
        await queue.enqueue("stamp", ttl=_NOT_KEPT, sent_ns=sent_ns)

    async def slow(number: int) -> None:
        await queue.enqueue("slow", number=number, **tuned)

    async def bulk(jobs: int) -> None:
        await in_parallel(_CALLERS, jobs, partial(noop, ARGUMENT))

    await produce_by(noop=noop, stamp=stamp, slow=slow, bulk=bulk)


async def work(spec: Spec) -> None:
    """The role of a worker process; ten at a time in every case."""
    record = Record(spec)
    queue: Any = Queue.from_url(spec.url)

    async def noop(ctx: Any, *, argument: dict[str, Any]) -> None:
        record.count()

    async def stamp(ctx: Any, *, sent_ns: int) -> None:
        record.stamp(sent_ns)

    async def slow(ctx: Any, *, number: int) -> None:
        await record.slow(number)

    async def run() -> None:
        timers: Any = {"sweep": _SWEEP_S} if is_tuned(spec) else None
        functions: Any = [(function.__name__, function) for function in (noop, stamp, slow)]
        await queue.connect()
        await Worker(queue, functions=functions, concurrency=AT_ONCE, timers=timers).start()

    await work_in_loop(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": work})
