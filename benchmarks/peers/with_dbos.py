"""DBOS: a hundred workflows at a time, its queue looked at every 10 ms."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from typing import Any, Final

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig  # type: ignore[import-not-found]

from benchmarks.peers.roles import Record, blocking, main, parts, produce_by, work_blocking
from benchmarks.sides.channel import ARGUMENT, Spec
from benchmarks.sides.diary import AT_ONCE

_CONCURRENCY: Final = 100
_POLL_S: Final = 0.010
_POOL: Final = 20
#: Enqueued in one transaction, which is its way for many: concurrent threads are slower than one by one.
_PART: Final = 100
_VERSION: Final = "bench"
#: The kill test has a separate queue, with ten at a time.
_QUEUES: Final = {"noops": _CONCURRENCY, "slow": AT_ONCE}


def _launch(spec: Spec) -> None:
    config = DBOSConfig(
        name="bench",
        system_database_url=spec.url,
        sys_db_pool_size=_POOL,
        max_executor_threads=_CONCURRENCY,
        application_version=_VERSION,
        log_level="WARNING",
    )
    DBOS(config=config)
    DBOS.launch()


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    database = sqlalchemy.create_engine(spec.url.replace("postgresql:", "postgresql+psycopg:", 1))

    @cache
    def client() -> Any:
        # Made when it is first asked for: not before there are tables.
        return DBOSClient(system_database_url=spec.url, system_database_pool_size=_POOL, application_name="bench")

    def options(workflow: str, queue: str) -> Any:
        return {"queue_name": queue, "workflow_name": workflow, "app_version": _VERSION}

    def enqueue(workflow: str, queue: str, argument: Any) -> None:
        client().enqueue(options(workflow, queue), argument)

    def install() -> None:
        _launch(spec)
        for name, at_once in _QUEUES.items():
            DBOS.register_queue(name, worker_concurrency=at_once, polling_interval_sec=_POLL_S)
        DBOS.destroy()

    def bulk(jobs: int) -> None:
        for count in parts(jobs, _PART):
            with database.begin() as transaction:
                for _ in range(count):
                    client().enqueue_in_transaction(transaction, options("noop", "noops"), ARGUMENT)

    await produce_by(
        noop=blocking(lambda argument: enqueue("noop", "noops", argument)),
        stamp=blocking(lambda sent_ns: enqueue("stamp", "noops", sent_ns)),
        slow=blocking(lambda number: enqueue("slow", "slow", number)),
        bulk=blocking(bulk),
        # It refuses to be set up in a thread with an event loop.
        install=lambda: asyncio.to_thread(install),
    )


def work(spec: Spec) -> None:
    """The role of a worker process, in the kill test too: the queue says how many at a time."""
    record = Record(spec)

    @DBOS.workflow(name="noop")
    def noop(argument: dict[str, Any]) -> int:
        # Its workflows run in many threads.
        record.count_in_threads()
        return 1

    @DBOS.workflow(name="stamp")
    def stamp(sent_ns: int) -> None:
        record.stamp(sent_ns)

    @DBOS.workflow(name="slow")
    def slow(number: int) -> None:
        record.slow_in_thread(number)

    def run() -> None:
        _launch(spec)
        threading.Event().wait()

    work_blocking(record, run)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "slow_work": work})
