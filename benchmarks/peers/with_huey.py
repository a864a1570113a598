"""huey: one thread, results off, no periodic tasks, blocking pop.

Nothing can be set against crashes: it takes tasks off its list before it runs them, and says so (its documentation,
"Consumer Shutdown": no at-least-once delivery, no acknowledgement).
"""

from __future__ import annotations

import logging
from typing import Any

from huey import RedisHuey  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, blocking, jobs_in_threads, main, produce_by, work_blocking
from benchmarks.sides.channel import Spec
from benchmarks.sides.diary import AT_ONCE


def _huey(spec: Spec, record: Record | None = None) -> tuple[Any, Any, Any, Any]:
    huey = RedisHuey("bench", url=spec.url, results=False)
    logging.getLogger("huey").setLevel(logging.ERROR)

    return (huey, *(huey.task(name=function.__name__)(function) for function in jobs_in_threads(record)))


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    _, noop, stamp, slow = _huey(spec)
    await produce_by(noop=blocking(noop), stamp=blocking(stamp), slow=blocking(slow))


def work(spec: Spec) -> None:
    """The role of a worker process."""
    _work(spec, 1)


def slow_work(spec: Spec) -> None:
    """Ten threads."""
    _work(spec, AT_ONCE)


def _work(spec: Spec, threads: int) -> None:
    record = Record(spec)
    huey, *_ = _huey(spec, record)
    consumer = huey.create_consumer(workers=threads, worker_type="thread", periodic=False)
    work_blocking(record, consumer.run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
