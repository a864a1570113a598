"""rq: `SimpleWorker`, which runs jobs in its own process, results off; ten forking workers in the kill test.

Nothing can be set against crashes that would act within the test's minute: a job with retries left is queued again, but
no sooner than 60 s after its dead worker's last sign of life, whatever is set.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from redis import Redis
from rq import Queue, SimpleWorker  # type: ignore[import-not-found]
from rq.worker_pool import WorkerPool  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, blocking, main, parts, produce_by, work_blocking
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_PART: Final = 1_000
#: rq finds jobs by the name of their function.
_JOBS: Final = "benchmarks.peers.with_rq"

_records: Final[list[Record]] = []


def noop(argument: dict[str, Any]) -> None:
    """A job that does nothing."""
    _records[0].count()


def stamp(sent_ns: int) -> None:
    """A job that notes how late it is."""
    _records[0].stamp(sent_ns)


def slow(number: int, log: str) -> None:
    """A job of 50 ms; it runs in processes that know nothing but what it carries."""
    spec = Spec(url="", settings={"log": log})
    Record(spec).slow_in_thread(number)


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    queue = Queue(connection=Redis.from_url(spec.url))
    one = partial(queue.enqueue, result_ttl=0)

    def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            queue.enqueue_many(
                [Queue.prepare_data(f"{_JOBS}.noop", args=(ARGUMENT,), result_ttl=0) for _ in range(count)]
            )

    await produce_by(
        noop=blocking(partial(one, f"{_JOBS}.noop")),
        stamp=blocking(partial(one, f"{_JOBS}.stamp")),
        slow=blocking(lambda number: one(f"{_JOBS}.slow", number, spec.settings["log"])),
        bulk=blocking(bulk),
    )


def work(spec: Spec) -> None:
    """The role of a worker process."""
    record = Record(spec)
    _records.append(record)
    worker = SimpleWorker([Queue(connection=(redis := Redis.from_url(spec.url)))], connection=redis)
    work_blocking(record, lambda: worker.work(logging_level="ERROR"))


def slow_work(spec: Spec) -> None:
    """`rq worker-pool` with ten workers."""
    redis = Redis.from_url(spec.url)
    pool = WorkerPool(["default"], connection=redis, num_workers=AT_ONCE)
    work_blocking(Record(spec), lambda: pool.start(logging_level="ERROR"))


if __name__ == "__main__":
    # Jobs look for their module by its name, so the roles must be that module's.
    from benchmarks.peers import with_rq

    main({"produce": with_rq.produce, "work": with_rq.work, "slow_work": with_rq.slow_work})
