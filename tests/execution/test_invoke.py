"""One run: on the loop, in a thread, with or without a context, ended by a verdict."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast import Context, Fatal, Holdfast, Retry, State, Unavailable, Worker
from holdfast.errors import InvalidOption, JobFailed
from holdfast.execution.backend import backend_of
from tests.worker.support import eventually, working

NO_RETRY = Retry(max_retries=0)
AT_ONCE = Retry(max_retries=3, base=0, jitter=None)


async def wait_outcome(app: Holdfast, job: Any) -> tuple[State, str | None]:
    """Wait for the job's end. Return its final state and failure code."""
    info = await app.engine.wait_final(job.queue, job.id, 10_000)
    assert info is not None
    return info.state, info.failure.code if info.failure else None


async def test_async_and_plain_functions_run(both: Holdfast) -> None:
    @both.task
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @both.task
    def shout(text: str) -> list[str]:
        return [text.upper(), threading.current_thread().name]

    async with working(both):
        assert await (await add.submit(1)).result(60) == 2
        assert await (await add.submit(1, b=2)).result(60) == 3
        text, thread = await (await shout.submit("hey")).result(60)
        assert (text, thread[:12]) == ("HEY", "holdfast-job")
        jobs = await add.submit_many((number, number) for number in range(1_200))
        assert [await job.result(60) for job in jobs] == [2 * number for number in range(1_200)]


async def test_the_context_describes_the_run(both: Holdfast) -> None:
    @both.task(retry=AT_ONCE, queue="mail")
    async def describe(word: str, ctx: Context) -> dict[str, Any]:
        if ctx.retry_count == 0:
            raise ValueError("retry")
        names = ("job_id", "task", "queue", "tenant_id", "attempt", "retry_count", "idempotency_key", "trace_id")
        return {name: getattr(ctx, name) for name in (*names, "run_key", "context", "cancelled")} | {"word": word}

    async with working(both, queues=["mail"]):
        # At run time the context can be any parameter; type checkers know it only as the first one.
        describe_any: Any = describe
        options = describe_any.options(tenant_id="acme", idempotency_key="k", trace_id="t", context={"user": "ada"})
        job = await options.submit(word="x")
        assert await job.result(60) == {
            "job_id": job.id,
            "task": "describe",
            "queue": "mail",
            "tenant_id": "acme",
            "attempt": 2,
            "retry_count": 1,
            "idempotency_key": "k",
            "trace_id": "t",
            "run_key": f"{job.id}:1",
            "context": {"user": "ada"},
            "cancelled": False,
            "word": "x",
        }
        plain = await describe_any.submit("y")
        assert (await plain.result(60))["idempotency_key"] == plain.id


async def test_a_failure_is_retried_and_its_history_kept(app: Holdfast) -> None:
    runs = []

    @app.task(retry=AT_ONCE)
    async def flaky() -> str:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError(f"run {len(runs)}")
        return "done"

    async with working(app):
        job = await flaky.submit()
        assert await job.result(60) == "done"
    history = await job.history()
    assert [(attempt.number, attempt.outcome) for attempt in history] == [
        (1, "retrying"),
        (2, "retrying"),
        (3, "succeeded"),
    ]
    failure = history[0].failure
    assert failure is not None
    assert (failure.code, failure.type, failure.message) == ("TASK_ERROR", "ValueError", "run 1")
    assert "in flaky" in failure.stack


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code", "runs"),
    [
        (ValueError("x"), "TASK_ERROR", 2),
        (Fatal("never"), "TASK_FATAL", 1),
        (Broken("fatal_on"), "TASK_FATAL", 1),
        (SystemExit(3), "TASK_ERROR", 2),
        (KeyboardInterrupt(), "TASK_ERROR", 2),
        (asyncio.CancelledError(), "TASK_ERROR", 2),
        (StopIteration(), "TASK_ERROR", 2),
        (ExceptionGroup("group", [ValueError(), Fatal("one is enough")]), "TASK_FATAL", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_any_exception_of_a_task_ends_only_that_attempt(
    app: Holdfast, kind: str, error: BaseException, code: str, runs: int
) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise error

    async def fail_on_loop() -> None:
        fail()

    options: Any = {"name": "fail", "retry": Retry(max_retries=1, base=0, jitter=None), "fatal_on": Broken}
    task: Any = app.task(**options)(fail_on_loop if kind == "async" else fail)

    @app.task
    async def fine() -> str:
        return "still here"

    async with working(app):
        assert await wait_outcome(app, await task.submit()) == (State.FAILED, code)
        assert await (await fine.submit()).result(60) == "still here"
    assert len(calls) == runs


async def test_only_listed_errors_are_retried(app: Holdfast) -> None:
    runs: list[str] = []

    @app.task(retry=Retry(max_retries=1, base=0, jitter=None), retry_on=KeyError)
    async def picky(kind: str) -> None:
        runs.append(kind)
        raise KeyError(kind) if kind == "key" else OSError(kind)

    async with working(app):
        assert await wait_outcome(app, await picky.submit("key")) == (State.FAILED, "TASK_ERROR")
        assert await wait_outcome(app, await picky.submit("os")) == (State.FAILED, "TASK_FATAL")
    assert runs == ["key", "key", "os"]


async def test_an_outage_uses_up_no_retries(app: Holdfast) -> None:
    class DatabaseDown(Exception):
        pass

    runs: list[int] = []

    @app.task(retry=Retry(max_retries=0, base=0, jitter=None), unavailable_on=DatabaseDown)
    async def wait_for_database(ctx: Context) -> int:
        runs.append(1)
        if len(runs) < 4:
            raise Unavailable("down") if len(runs) % 2 else DatabaseDown
        return ctx.retry_count

    async with working(app):
        assert await (await wait_for_database.submit()).result(60) == 0
    assert len(runs) == 4


async def test_exhausted_jobs_can_be_suspended(app: Holdfast) -> None:
    @app.task(retry=NO_RETRY, on_exhausted="suspend")
    async def fail() -> None:
        raise ValueError

    async with working(app):
        job = await fail.submit()
        await eventually(lambda: _is_in_state(job, State.SUSPENDED), "suspension")


async def _is_in_state(job: Any, state: State) -> bool:
    return (await job.state()) is state


async def test_an_invalid_payload_is_dead_lettered_at_once(app: Holdfast) -> None:
    called: list[int] = []
    app.configure(unknown_task_grace_s=0)

    @app.task(on_exhausted="suspend")
    async def strict(number: int) -> None:
        called.append(number)

    sender = Holdfast(app.settings.url, clock=backend_of(app).clock)
    async with working(app), sender:
        invalid = await sender.submit_raw("strict", b'{"number": "seven"}')
        unknown = await sender.submit_raw("unknown", b"{}")
        positional = await sender.submit_raw("strict", b"[7]")
        assert await wait_outcome(app, invalid) == (State.FAILED, "INVALID_PAYLOAD")
        assert await wait_outcome(app, unknown) == (State.FAILED, "UNKNOWN_TASK")
        assert await wait_outcome(app, positional) == (State.SUCCEEDED, None)
        with pytest.raises(JobFailed, match="import the module that defines it"):
            await unknown.result(60)
    assert called == [7]


async def test_a_result_that_cannot_be_encoded_is_fatal(url: str) -> None:
    app = Holdfast(url, payload_limit=1_000)

    @app.task
    async def no_json() -> object:
        return object()

    @app.task
    def too_long() -> str:
        return "x" * 2_000

    @app.task(name="wrapped")
    def skipped_await() -> Any:
        return asyncio.sleep(0)

    async with app, working(app):
        assert await wait_outcome(app, await no_json.submit()) == (State.FAILED, "INVALID_RESULT")
        assert await wait_outcome(app, await too_long.submit()) == (State.FAILED, "PAYLOAD_TOO_LARGE")
        assert await wait_outcome(app, await skipped_await.submit()) == (State.FAILED, "INVALID_RESULT")


async def test_a_task_that_exceeds_its_timeout_is_stopped(app: Holdfast) -> None:
    stopped: list[str] = []

    @app.task(timeout=0.05, retry=NO_RETRY)
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(f"cleaned up, cancelled={ctx.cancelled}")

    async with working(app) as worker:
        assert await wait_outcome(app, await slow.submit()) == (State.FAILED, "TASK_TIMEOUT")
        await eventually(lambda: worker.running == 0)
    assert stopped == ["cleaned up, cancelled=True"]


async def test_a_result_returned_after_the_timeout_counts(app: Holdfast) -> None:
    @app.task(timeout=0.05, retry=NO_RETRY)
    async def finish_anyway() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "just made it"
        return "never"

    async with working(app):
        assert await (await finish_anyway.submit()).result(60) == "just made it"


async def test_a_task_that_swallows_its_cancellation_does_not_hang_the_worker(app: Holdfast) -> None:
    @app.task(timeout=0.05, retry=NO_RETRY)
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    @app.task
    async def next_job() -> str:
        return "served"

    async with working(app, concurrency=1, cancel_grace_s=0.05) as worker:
        job = await stubborn.submit()
        following = await next_job.submit()
        assert await wait_outcome(app, job) == (State.FAILED, "TASK_TIMEOUT")
        assert await following.result(60) == "served"
        await eventually(lambda: worker.running == 0)


async def test_a_thread_that_exceeds_its_timeout_is_settled_but_keeps_its_slot(app: Holdfast) -> None:
    release = threading.Event()
    seen_cancelled: list[bool] = []

    @app.task(timeout=0.05, retry=NO_RETRY)
    def blocking(ctx: Context) -> None:
        release.wait(20)
        seen_cancelled.append(ctx.cancelled)

    async with working(app) as worker:
        assert await wait_outcome(app, await blocking.submit()) == (State.FAILED, "TASK_TIMEOUT")
        assert worker.running == 1
        release.set()
        await eventually(lambda: worker.running == 0)
    assert seen_cancelled == [True]


@pytest.mark.parametrize("queues", ["default", [], [""]])
def test_a_worker_needs_queues(app: Holdfast, queues: Any) -> None:
    with pytest.raises(InvalidOption, match="list of queue names"):
        Worker(app, queues=queues)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": True}, {"max_jobs": 0}, {"max_rss": -1}])
def test_limits_of_a_worker_are_checked(app: Holdfast, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Worker(app, **options)
