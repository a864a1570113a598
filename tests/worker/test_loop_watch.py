"""Code that blocks the event loop is named in the log; so is a timeout that cannot interrupt it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast import Holdfast, Retry
from tests.worker.support import TIMEOUT_S, eventually, working

NEVER = Retry(max_retries=0)


class Log(logging.Handler):
    """Collects the worker's log; code that blocks the event loop can wait for a record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def find(self, text: str) -> list[logging.LogRecord]:
        return [record for record in self.records if text in record.getMessage()]

    def block_until(self, text: str) -> None:
        """Block the calling thread until the text is logged, or until the timeout."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.find(text) and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    logger = logging.getLogger("holdfast.worker")
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)


async def block_directly(log: Log) -> None:
    log.block_until("blocked the event loop")


async def block_in_a_task(log: Log) -> None:
    await asyncio.gather(block_directly(log), asyncio.sleep(0))


@pytest.mark.parametrize("block", [block_directly, block_in_a_task])
async def test_a_job_that_blocks_the_loop_is_logged_once(
    both: Holdfast, log: Log, block: Callable[[Log], asyncio.Future[None]]
) -> None:
    @both.task
    async def bad() -> None:
        await block(log)

    async with working(both):
        job = await bad.options(trace_id="t-1").submit()
        await job.result(TIMEOUT_S)
        (ended,) = await eventually(lambda: log.find("the event loop continues"), "the end of the block")
    (begun,) = log.find("has blocked the event loop")
    assert begun.levelno == logging.WARNING
    assert f"job {job.id} (bad) has blocked the event loop for" in begun.getMessage()
    assert "block_until" in begun.getMessage()
    assert (vars(begun)["job_id"], vars(begun)["task"], vars(begun)["trace_id"]) == (job.id, "bad", "t-1")
    assert f"job {job.id} (bad) blocked it for" in ended.getMessage()


async def test_a_timeout_that_cannot_interrupt_a_blocked_loop_is_logged(app: Holdfast, log: Log) -> None:
    @app.task(timeout=0.1, retry=NEVER)
    async def bad() -> None:
        log.block_until("cannot be interrupted")

    async with working(app):
        job = await bad.submit()
        await eventually(lambda: log.find("the event loop continues"), "the end of the block")
    (record,) = log.find("cannot be interrupted")
    assert (
        f"the timeout of job {job.id} (bad), 0.1 s, has passed, but its code blocks the event loop"
        in record.getMessage()
    )


async def test_a_timeout_that_cannot_interrupt_a_thread_is_logged(app: Holdfast, log: Log) -> None:
    done = threading.Event()

    @app.task(timeout=0.1, retry=NEVER)
    def slow() -> None:
        done.wait(TIMEOUT_S)

    try:
        async with working(app):
            job = await slow.submit()
            (record,) = await eventually(lambda: log.find("a thread cannot be interrupted"), "the log record")
            done.set()
    finally:
        done.set()
    assert record.levelno == logging.WARNING
    assert f"the timeout of job {job.id} (slow), 0.1 s, has passed" in record.getMessage()
    (failed,) = log.find("failed for good")
    assert "TASK_TIMEOUT" in failed.getMessage()


async def test_a_timeout_of_a_coroutine_shows_where_it_was(app: Holdfast, log: Log) -> None:
    @app.task(timeout=0.1, retry=NEVER)
    async def slow() -> None:
        await asyncio.Event().wait()

    async with working(app):
        await slow.submit()
        (failed,) = await eventually(lambda: log.find("failed for good"), "the failure")
    assert failed.exc_info is not None
    error = failed.exc_info[1]
    assert isinstance(error, TimeoutError)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert not log.find("interrupted")


async def test_jobs_that_yield_are_not_logged_as_blocking(app: Holdfast, log: Log) -> None:
    """Neither their duration nor their number counts."""

    @app.task
    async def busy() -> None:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.02)  # noqa: ASYNC251 - short steps
            await asyncio.sleep(0)

    async with working(app):
        jobs = [await busy.submit() for _ in range(3)]
        for job in jobs:
            await job.result(TIMEOUT_S)
    assert not log.find("has blocked the event loop")
