"""taskito: one thread, its scheduler claims 500 jobs a round and looks every 2 ms, woken by pushes if it can be."""

from __future__ import annotations

import logging
from typing import Any, Final

from taskito import Queue  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, blocking, is_tuned, jobs_in_threads, main, parts, produce_by, work_blocking
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_THREADS: Final = 1
_BATCH: Final = 500
_POLL_MS: Final = 2
_PART: Final = 1_000
#: A job that runs longer is given to another; 300 s by default.
_TIMEOUT_S: Final = 5


def _queue(spec: Spec, record: Record | None = None, **settings: Any) -> tuple[Any, Any, Any, Any]:
    logging.getLogger("taskito").setLevel(logging.ERROR)
    queue = Queue(backend="redis", db_url=spec.url, result_ttl=0, **settings)

    tuned: dict[str, Any] = {"timeout": _TIMEOUT_S} if is_tuned(spec) else {}
    return (queue, *(queue.task(name=function.__name__, **tuned)(function) for function in jobs_in_threads(record)))


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    _, noop, stamp, slow = _queue(spec)

    def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            noop.map([(ARGUMENT,)] * count)

    await produce_by(
        noop=blocking(noop.delay), stamp=blocking(stamp.delay), slow=blocking(slow.delay), bulk=blocking(bulk)
    )


def work(spec: Spec) -> None:
    """The role of a worker process."""
    _work(
        spec,
        workers=_THREADS,
        scheduler_batch_size=_BATCH,
        scheduler_poll_interval_ms=_POLL_MS,
        push_dispatch=True,
    )


def slow_work(spec: Spec) -> None:
    """Ten threads."""
    _work(spec, workers=AT_ONCE)


def _work(spec: Spec, **settings: Any) -> None:
    record = Record(spec)
    queue, *_ = _queue(spec, record, **settings)
    work_blocking(record, queue.run_worker)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
