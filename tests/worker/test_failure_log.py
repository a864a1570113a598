"""A failed attempt is logged with exception, traceback and job; the content of an exception cannot break the log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console
from rich.logging import RichHandler

from holdfast import Context, Fatal, Holdfast, Retry, Unavailable
from holdfast.observe.log_formats import JsonFormatter, PlainFormatter
from holdfast.testing import drain
from tests.worker import failing_tasks

SECRET = "hunter2-Zx9q"
AT_ONCE = Retry(max_retries=1, base=0, jitter=None)
NEVER = Retry(max_retries=0)


def records(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "holdfast.worker" and record.levelno >= level]


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("mode", ["loop", "thread"])
async def test_a_retry_logs_a_warning_and_a_final_failure_an_error_with_the_exception(
    both: Holdfast, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    if mode == "loop":

        @both.task(name="fail", retry=AT_ONCE)
        async def fail() -> None:
            boom()
    else:

        @both.task(name="fail", retry=AT_ONCE)
        def fail() -> None:
            boom()

    with caplog.at_level(logging.INFO):
        job = await fail.options(trace_id="t-1", tenant_id="acme").submit()
        await drain(both)
    retry, end = records(caplog)
    assert (retry.levelno, end.levelno) == (logging.WARNING, logging.ERROR)
    assert f"attempt 1 of job {job.id} (fail) failed, retry in 0 s: TASK_ERROR: ValueError: boom" in retry.getMessage()
    assert f"job {job.id} (fail) failed for good: TASK_ERROR: ValueError: boom" in end.getMessage()
    for attempt, record in enumerate((retry, end), start=1):
        assert record.exc_info is not None
        kind, error, trace = record.exc_info
        assert kind is ValueError
        assert isinstance(error, ValueError)
        assert trace is not None
        fields = vars(record)
        assert (fields["job_id"], fields["task"], fields["queue"]) == (job.id, "fail", "default")
        assert (fields["tenant_id"], fields["trace_id"], fields["attempt"]) == ("acme", "t-1", attempt)
        assert (fields["code"], fields["error_type"]) == ("TASK_ERROR", "ValueError")
        assert "boom()" in JsonFormatter().format(record)


async def test_a_failure_in_a_child_process_is_logged_with_its_traceback(
    both: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    app = failing_tasks.app
    app.configure(url=both.settings.url, namespace=both.settings.namespace)
    try:
        await failing_tasks.fail_in_process.submit()
        await drain(app)
    finally:
        await app.close()
    (record,) = records(caplog)
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], Exception)
    assert "tests.worker.failing_tasks.CannotBePickled" in str(record.exc_info[1])
    text = JsonFormatter().format(record)
    assert "raise_in_nested_call" in text
    assert SECRET not in text


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _UnprintableNotes(Exception):
    def __getattribute__(self, name: str) -> object:
        if name == "__notes__":
            raise RuntimeError("no notes")
        return super().__getattribute__(name)


HOSTILE: list[Callable[[], BaseException]] = [
    lambda: ValueError("one\ntwo\r\n{'level': 'error'}"),
    lambda: ValueError("\x1b[31mred\x1b]0;title\x07\x9b1m"),
    lambda: ValueError("%s %d {} \ud800 \x00"),
    lambda: ValueError("x" * 3_000_000),
    lambda: ValueError(f"password={SECRET} redis://app:{SECRET}@cache/0"),
    _Unprintable,
    _UnprintableNotes,
    lambda: ExceptionGroup("several", [ValueError(f"token={SECRET}"), _Unprintable()]),
    lambda: SystemExit(3),
]


@contextmanager
def output(kind: str) -> Iterator[io.StringIO]:
    """Capture the log during the block in the format of `holdfast worker`."""
    stream = io.StringIO()
    handler: logging.Handler
    if kind == "json":
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonFormatter())
    else:
        handler = RichHandler(console=Console(file=stream, width=200), show_path=False, markup=False)
        handler.setFormatter(PlainFormatter("%(message)s"))
    logger = logging.getLogger("holdfast.worker")
    logger.addHandler(handler)
    # pytest's handlers fail on these records.
    logger.propagate = False
    try:
        yield stream
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", ["json", "terminal"])
async def test_hostile_exceptions_do_not_break_the_log_or_the_worker(app: Holdfast, kind: str) -> None:
    @app.task(retry=NEVER)
    async def fail(number: int) -> None:
        error = HOSTILE[number]()
        raise error

    for number in range(len(HOSTILE)):
        await fail.submit(number)
    with output(kind) as stream:
        assert await drain(app) == len(HOSTILE)
    text = stream.getvalue()
    assert text.count("failed for good") == len(HOSTILE)
    assert SECRET not in text
    assert "\x1b" not in text
    assert len(text) < 400_000
    if kind == "terminal":
        assert "\x9b" not in text
    else:
        lines = [json.loads(line) for line in text.splitlines()]
        failures = [line for line in lines if "failed for good" in line["message"]]
        assert len(failures) == len(HOSTILE)
        assert all("raise error" in line["stack"] for line in failures if "cannot be" not in line["stack"])


async def test_a_failing_log_handler_does_not_cost_a_slot(app: Holdfast) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                raise RuntimeError("this handler is broken")

    @app.task(retry=NEVER)
    async def fail() -> None:
        boom()

    broken = Broken()
    logging.getLogger("holdfast.worker").addHandler(broken)
    try:
        jobs = [await fail.submit() for _ in range(3)]
        assert await drain(app) == len(jobs)
    finally:
        logging.getLogger("holdfast.worker").removeHandler(broken)


async def test_an_unavailable_dependency_is_warned_about_once(app: Holdfast, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    @app.task(retry=Retry(base=0, jitter=None))
    async def work() -> None:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise Unavailable("the mail server is down")

    with caplog.at_level(logging.INFO):
        await work.submit()
        await drain(app)
    (first,) = records(caplog)
    assert "waits for a dependency" in first.getMessage()
    assert first.exc_info is not None
    later = [record for record in records(caplog, logging.INFO) if "waits for a dependency" in record.getMessage()]
    assert [record.levelno for record in later] == [logging.WARNING, logging.INFO, logging.INFO]
    assert not any(record.exc_info for record in later[1:])


async def test_sleep_and_success_are_not_logged_as_failures(app: Holdfast, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def sleep(ctx: Context) -> None:
        await ctx.sleep(3600)

    @app.task
    async def work() -> int:
        return 1

    with caplog.at_level(logging.DEBUG):
        await sleep.submit()
        await work.submit()
        await drain(app)
    assert records(caplog) == []
    assert not any(record.exc_info for record in caplog.records if record.name == "holdfast.worker")


async def test_log_integrations_get_the_real_exception(app: Holdfast) -> None:
    """An integration reads `record.exc_info`, without holdfast's formatters."""
    errors: list[Any] = []

    class Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.levelno >= logging.ERROR:
                errors.append(record.exc_info[1])

    @app.task
    async def fail() -> None:
        raise Fatal("no") from ValueError("why")

    capture = Capture()
    logging.getLogger().addHandler(capture)
    try:
        await fail.submit()
        await drain(app)
    finally:
        logging.getLogger().removeHandler(capture)
    (error,) = errors
    assert isinstance(error, Fatal)
    assert isinstance(error.__cause__, ValueError)
    assert error.__traceback__ is not None
    assert sys.exc_info() == (None, None, None)
