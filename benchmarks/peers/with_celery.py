"""celery: results off, no gossip, mingle or events; drains in its solo pool, with its default of 4 prefetched.

A larger prefetch is not faster, and slower from 1,000 on.
"""

from __future__ import annotations

from typing import Any, Final

from celery import Celery, group  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, blocking, is_tuned, jobs_in_threads, main, parts, produce_by, work_blocking
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_PART: Final = 1_000
#: After which time an unacknowledged message is given out again, an hour by default; and every how many seconds such
#: ones are looked for, at every which of these looks in earnest, 10 and 10 by default (options of kombu's Redis
#: transport; with these two at their defaults the second look is 110 s after the start).
_TRANSPORT: Final = {"visibility_timeout": 10, "unacked_restore_interval": 2, "unacked_restore_throttle": 1}


def _app(spec: Spec, record: Record | None = None) -> Any:
    app = Celery("bench", broker=spec.url, set_as_current=True)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
    if is_tuned(spec):
        app.conf.update(
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            worker_prefetch_multiplier=1,
            broker_transport_options=_TRANSPORT,
        )
    for function in jobs_in_threads(record):
        app.task(function, name=function.__name__)
    return app


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    tasks = _app(spec).tasks

    def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            group(tasks["noop"].s(ARGUMENT) for _ in range(count)).apply_async()

    noop, stamp, slow = (blocking(tasks[name].delay) for name in ("noop", "stamp", "slow"))
    await produce_by(noop=noop, stamp=stamp, slow=slow, bulk=blocking(bulk))


def work(spec: Spec) -> None:
    """The role of a worker process: jobs run in the thread that fetches them."""
    record = Record(spec)
    app = _app(spec, record)
    app.conf.update(worker_enable_remote_control=False)
    work_blocking(record, lambda: _run(app, "solo", 1))


def slow_work(spec: Spec) -> None:
    """Ten processes, as it is by default on ten cores."""
    record = Record(spec)
    app = _app(spec, record)
    work_blocking(record, lambda: _run(app, "prefork", AT_ONCE))


def _run(app: Any, pool: str, concurrency: int) -> None:
    worker = app.WorkController(
        pool_cls=pool,
        concurrency=concurrency,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel="ERROR",
    )
    worker.start()


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": slow_work})
