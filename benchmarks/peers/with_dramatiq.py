"""dramatiq: one thread, 500 messages prefetched, polls every 10 ms when idle (a second by default), default middleware.

It has no results unless asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Final

from benchmarks.peers.roles import Record, blocking, is_tuned, jobs_in_threads, main, produce_by, work_blocking
from benchmarks.sides.channel import Spec
from benchmarks.sides.diary import AT_ONCE

if sys.argv[1:2] == ["work"]:
    # Read when it is imported. Crashes are tested at its default.
    os.environ.setdefault("dramatiq_queue_prefetch", "500")
    os.environ.setdefault("dramatiq_worker_timeout", "10")

import dramatiq  # type: ignore[import-not-found]
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]

#: After which silence a worker is taken for dead; a minute by default.
_HEARTBEAT_MS: Final = 10_000
#: Which share of commands looks for dead workers, in millionths; 1,000 by default.
_MAINTENANCE: Final = 100_000


def _actors(spec: Spec, record: Record | None = None) -> tuple[Any, Any, Any, Any]:
    tuned: dict[str, Any] = (
        {"heartbeat_timeout": _HEARTBEAT_MS, "maintenance_chance": _MAINTENANCE} if is_tuned(spec) else {}
    )
    broker = RedisBroker(url=spec.url, **tuned)
    dramatiq.set_broker(broker)

    return (broker, *(dramatiq.actor(function, broker=broker) for function in jobs_in_threads(record)))


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    _, noop, stamp, slow = _actors(spec)
    await produce_by(noop=blocking(noop.send), stamp=blocking(stamp.send), slow=blocking(slow.send))


def work(spec: Spec) -> None:
    """The role of a worker process."""
    _work(spec, 1)


def slow_work(spec: Spec) -> None:
    """Ten threads."""
    _work(spec, AT_ONCE)


def _work(spec: Spec, threads: int) -> None:
    record = Record(spec)
    broker, *_ = _actors(spec, record)

    def run() -> None:
        dramatiq.Worker(broker, worker_threads=threads).start()
        threading.Event().wait()

    work_blocking(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
