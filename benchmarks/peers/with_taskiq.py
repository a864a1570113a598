"""taskiq on its Redis stream broker: 100 coroutines at a time, results off, acknowledged after execution.

Arguments are taken as they come (`--no-parse` of its command line), which saves it CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from taskiq.api import run_receiver_task  # type: ignore[import-not-found]
from taskiq_redis import RedisStreamBroker  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, is_tuned, jobs_in_loop, main, produce_by, work_in_loop
from benchmarks.sides.channel import Spec
from benchmarks.sides.diary import AT_ONCE

_MAX_TASKS: Final = 100
#: After which time an unacknowledged message is taken over, ten minutes by default; the lock for that, which a worker
#: that dies keeps for ever by default; and how many are fetched at once, 100 by default. It looks for unacknowledged
#: messages only after it has fetched new ones: none are found while none come.
_TUNED: Final = {"idle_timeout": 10_000, "unacknowledged_lock_timeout": 5, "xread_count": 1}


def _broker(spec: Spec, record: Record | None = None) -> tuple[Any, Any, Any, Any]:
    tuned: Any = _TUNED if is_tuned(spec) else {}
    broker = RedisStreamBroker(spec.url, **tuned)

    return (broker, *(broker.task(task_name=function.__name__)(function) for function in jobs_in_loop(record)))


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    broker, noop, stamp, slow = _broker(spec)
    # It also makes the consumer group: what is sent before there is one is never seen.
    await broker.startup()

    # Many one by one: it has no call for many, and a hundred callers at once are slower than one.
    await produce_by(noop=noop.kiq, stamp=stamp.kiq, slow=slow.kiq)


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    await _work(spec, _MAX_TASKS)


async def slow_work(spec: Spec) -> None:
    """Ten at a time."""
    await _work(spec, AT_ONCE)


async def _work(spec: Spec, at_once: int) -> None:
    record = Record(spec)
    broker, *_ = _broker(spec, record)
    broker.is_worker_process = True
    run = partial(run_receiver_task, broker, max_async_tasks=at_once, run_startup=True, validate_params=False)
    await work_in_loop(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
