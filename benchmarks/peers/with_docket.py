"""docket: twenty coroutines; what it knows of finished tasks is not kept."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final

from docket import Docket, Worker  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, jobs_in_loop, main, produce_by, work_in_loop
from benchmarks.sides.channel import ARGUMENT, Spec, in_parallel
from benchmarks.sides.diary import AT_ONCE

_CONCURRENCY: Final = 20
#: How long it sleeps when all coroutines are taken, whether or not one is free again sooner; 250 ms by default.
_CHECK: Final = timedelta(milliseconds=5)
#: Each has its own connection, which takes longer to make than many jobs.
_CALLERS: Final = 10
#: After which time a task of a silent worker is delivered again; five minutes by default.
_REDELIVERY: Final = timedelta(seconds=10)


def _docket(spec: Spec, record: Record | None = None) -> tuple[Docket, Any, Any, Any]:
    docket = Docket(name="bench", url=spec.url, execution_ttl=timedelta(0))
    functions = jobs_in_loop(record)
    for function in functions:
        docket.register(function)
    return (docket, *functions)


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    docket, *functions = _docket(spec)
    async with docket:
        noop, stamp, slow = (partial(_add, docket, function) for function in functions)

        async def bulk(jobs: int) -> None:
            await in_parallel(_CALLERS, jobs, partial(noop, ARGUMENT))

        await produce_by(noop=noop, stamp=stamp, slow=slow, bulk=bulk)


async def _add(docket: Docket, function: Any, argument: Any) -> None:
    # Each by a separate call: what `add` returns has one key, and the second job of a key is dropped.
    await docket.add(function)(argument)


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, concurrency=_CONCURRENCY, minimum_check_interval=_CHECK)


async def slow_work(spec: Spec) -> None:
    """Ten at a time, which is its default."""
    await _work(spec, concurrency=AT_ONCE, **({"redelivery_timeout": _REDELIVERY} if is_tuned(spec) else {}))


async def _work(spec: Spec, **settings: Any) -> None:
    record = Record(spec)
    docket, *_ = _docket(spec, record)

    async def run() -> None:
        async with docket, Worker(docket, **settings) as worker:
            await worker.run_forever()

    await work_in_loop(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
