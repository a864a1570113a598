"""Code that blocks the event loop is named in the log; so is a timeout that cannot interrupt it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast import Holdfast, Retry
from tests.worker.support import PATIENCE_S, eventually, working

NEVER = Retry(max_retries=0)


class Log(logging.Handler):
    """What the worker logs, to be waited for by code that blocks the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)

    def of(self, text: str) -> list[logging.LogRecord]:
        return [record for record in self.seen if text in record.getMessage()]

    def block_until(self, text: str) -> None:
        """As bad code does; ends when the log says so, or for good."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.of(text) and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    logger = logging.getLogger("holdfast.worker")
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)


async def directly(log: Log) -> None:
    log.block_until("blocked the event loop")


async def in_a_task_of_its_own(log: Log) -> None:
    await asyncio.gather(directly(log), asyncio.sleep(0))


@pytest.mark.parametrize("way", [directly, in_a_task_of_its_own])
async def test_a_job_that_blocks_the_loop_is_named_once(
    both: Holdfast, log: Log, way: Callable[[Log], asyncio.Future[None]]
) -> None:
    @both.task
    async def bad() -> None:
        await way(log)

    async with working(both):
        job = await bad.options(trace_id="t-1").submit()
        await job.result(PATIENCE_S)
        (ended,) = await eventually(lambda: log.of("the event loop continues"), "the end of the block")
    (begun,) = log.of("has blocked the event loop")
    assert begun.levelno == logging.WARNING
    assert f"job {job.id} (bad) has blocked the event loop for" in begun.getMessage()
    assert "block_until" in begun.getMessage()
    assert (vars(begun)["job_id"], vars(begun)["task"], vars(begun)["trace_id"]) == (job.id, "bad", "t-1")
    assert f"job {job.id} (bad) blocked it for" in ended.getMessage()


async def test_a_timeout_that_cannot_interrupt_a_blocked_loop_says_so(app: Holdfast, log: Log) -> None:
    @app.task(timeout=0.1, retry=NEVER)
    async def bad() -> None:
        log.block_until("cannot be interrupted")

    async with working(app):
        job = await bad.submit()
        await eventually(lambda: log.of("the event loop continues"), "the end of the block")
    (said,) = log.of("cannot be interrupted")
    assert (
        f"the timeout of job {job.id} (bad), 0.1 s, has passed, but its code blocks the event loop" in said.getMessage()
    )


async def test_a_timeout_that_cannot_interrupt_a_thread_says_so(app: Holdfast, log: Log) -> None:
    done = threading.Event()

    @app.task(timeout=0.1, retry=NEVER)
    def slow() -> None:
        done.wait(PATIENCE_S)

    try:
        async with working(app):
            job = await slow.submit()
            (said,) = await eventually(lambda: log.of("a thread cannot be interrupted"), "the log to say so")
            done.set()
    finally:
        done.set()
    assert said.levelno == logging.WARNING
    assert f"the timeout of job {job.id} (slow), 0.1 s, has passed" in said.getMessage()
    (failed,) = log.of("failed for good")
    assert "TASK_TIMEOUT" in failed.getMessage()


async def test_a_timeout_of_a_coroutine_shows_where_it_was(app: Holdfast, log: Log) -> None:
    @app.task(timeout=0.1, retry=NEVER)
    async def slow() -> None:
        await asyncio.Event().wait()

    async with working(app):
        await slow.submit()
        (failed,) = await eventually(lambda: log.of("failed for good"), "the failure")
    assert failed.exc_info is not None
    error = failed.exc_info[1]
    assert isinstance(error, TimeoutError)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert not log.of("interrupted")


async def test_jobs_that_yield_are_not_blamed(app: Holdfast, log: Log) -> None:
    """However long they run, and however many they are."""

    @app.task
    async def busy() -> None:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.02)  # noqa: ASYNC251 - short steps
            await asyncio.sleep(0)

    async with working(app):
        jobs = [await busy.submit() for _ in range(3)]
        for job in jobs:
            await job.result(PATIENCE_S)
    assert not log.of("has blocked the event loop")
