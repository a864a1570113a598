"""Client calls: submit, wait, read, cancel; from an event loop, from a thread, from a script."""

from __future__ import annotations

import asyncio
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Context, Holdfast, Priority, Retry, State
from holdfast.core.job import MAX_BATCH
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import (
    IntakeRefused,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    PayloadTooLarge,
    TransitionInvalid,
    UnknownJob,
    UnknownTask,
    UsageError,
    WaitTimeout,
)
from holdfast.testing.inline import ManualClock
from tests.worker.support import Faults, eventually, working


async def test_the_same_key_returns_the_first_job(both: Holdfast) -> None:
    @both.task
    async def work(number: int) -> int:
        return number

    first = await work.options(idempotency_key="order-1").submit(1)
    again = await work.options(idempotency_key="order-1").submit(1)
    elsewhere = await work.options(idempotency_key="order-1", tenant_id="other").submit(3)
    assert (again.id, first.duplicate, again.duplicate) == (first.id, False, True)
    assert elsewhere.id != first.id
    async with working(both):
        assert await again.result(60) == 1
        assert await elsewhere.result(60) == 3
        assert (await work.options(idempotency_key="order-1").submit(1)).id == first.id


async def test_options_reach_the_job(app: Holdfast, clock: ManualClock) -> None:
    @app.task(priority="low", queue="slow")
    async def work() -> None: ...

    retry = Retry(max_retries=7)
    at = datetime.fromtimestamp(clock.now_ms() / 1000, UTC) + timedelta(hours=1)
    later = await work.options(run_at=at, priority="high", retry=retry, queue="quick", context={"a": 1}).submit()
    on_hold = await work.options(hold=True).submit()
    infos = [await job.info() for job in (later, on_hold, await work.submit())]
    assert (infos[0].queue, infos[0].meta.priority, infos[0].meta.retry) == ("quick", Priority.HIGH, retry)
    assert infos[0].meta.context == {"a": 1}
    assert [info.state for info in infos] == [State.QUEUED, State.WAITING_APPROVAL, State.QUEUED]
    assert (infos[2].queue, infos[2].meta.priority) == ("slow", Priority.LOW)
    stats = await app.engine.stats("quick")
    assert (stats.states[State.QUEUED], stats.delayed) == (1, 1)


async def test_a_delayed_job_runs_when_it_is_due(both: Holdfast) -> None:
    @both.task
    async def work() -> str:
        return "done"

    async with working(both) as worker:
        started_at = asyncio.get_running_loop().time()
        job = await work.options(delay=0.3).submit()
        assert await job.state() is State.QUEUED
        assert await job.result(60) == "done"
        assert asyncio.get_running_loop().time() - started_at > 0.25
        assert worker.finished == 1


async def test_results_have_the_annotated_type(app: Holdfast) -> None:
    @app.task
    async def days(start: datetime) -> dict[str, datetime]:
        return {"next": start + timedelta(days=1)}

    start = datetime(2030, 1, 1, tzinfo=UTC)
    async with working(app):
        job = await days.submit(start)
        assert await job.result(60) == {"next": start + timedelta(days=1)}
        assert await app.job(job.id).result(60) == {"next": "2030-01-02T00:00:00Z"}


async def test_result_raises_what_the_job_ended_with(app: Holdfast) -> None:
    @app.task(retry=Retry(max_retries=0))
    async def fail() -> None:
        raise ValueError("invalid")

    @app.task(on_exhausted="suspend", retry=Retry(max_retries=0))
    async def park() -> None:
        raise ValueError

    waiting = await fail.submit()
    with pytest.raises(WaitTimeout, match=r"still queued after 0\.05 s") as timed_out:
        await waiting.result(timedelta(milliseconds=50))
    assert timed_out.value.job_id == waiting.id
    cancelled = await fail.submit()
    await cancelled.cancel("changed my mind", actor="ada")
    with pytest.raises(JobCancelled):
        await cancelled.result(1)
    with pytest.raises(TransitionInvalid):
        await cancelled.cancel()
    async with working(app):
        with pytest.raises(JobFailed, match="TASK_ERROR: invalid") as failed:
            await waiting.result(60)
        assert (failed.value.state, failed.value.error_code) == ("failed", "TASK_ERROR")
        suspended = await park.submit()
        await eventually(lambda: _is_in_state(suspended, State.SUSPENDED))
        with pytest.raises(WaitTimeout):
            await suspended.result(0.05)
    for call in (app.job("unknown").info, app.job("unknown").result, app.job("unknown").cancel):
        with pytest.raises(UnknownJob):
            await call()


async def _is_in_state(job: Any, state: State) -> bool:
    return (await job.state()) is state


async def test_arguments_are_checked_before_anything_is_sent(app: Holdfast, url: str) -> None:
    @app.task
    async def work(number: int) -> None: ...

    await app.open()
    anything: Any = work
    for args, kwargs in ((("x",), {}), ((), {}), ((1, 2), {}), ((1,), {"number": 1}), ((), {"unknown": 1})):
        with pytest.raises(InvalidPayload):
            await anything.submit(*args, **kwargs)
    for calls in ([1], [(1,), ("x",)], ["12"]):
        with pytest.raises(InvalidPayload):
            await work.submit_many(calls)  # type: ignore[arg-type]
    assert await app.engine.queues() == []
    small = Holdfast(url, payload_limit=20)

    @small.task(name="work")
    async def wordy(text: str) -> None: ...

    with pytest.raises(PayloadTooLarge):
        await wordy.submit("x" * 30)
    with pytest.raises(PayloadTooLarge):
        await small.submit_raw("work", b'"' + b"x" * 30 + b'"')
    with pytest.raises(PayloadTooLarge):
        wordy.options(context={"a": "x" * 30})


async def test_jobs_can_be_submitted_by_task_name(app: Holdfast, url: str) -> None:
    @app.task(queue="mail", priority="high")
    async def work(number: int) -> int:
        return number

    job = await app.submit_raw("work", b"[1]", idempotency_key="k")
    assert (job.queue, (await job.info()).meta.priority) == ("mail", Priority.HIGH)
    assert (await app.submit_raw("work", b'{"number": 1}', idempotency_key="k")).duplicate
    with pytest.raises(UnknownTask):
        await app.submit_raw("unknown", b"{}")
    with pytest.raises(InvalidPayload):
        await app.submit_raw("work", b'{"number": "x"}')
    async with Holdfast(url) as sender:
        assert (await sender.submit_raw("unregistered", b"{}")).queue == "default"
        with pytest.raises(InvalidPayload, match="cannot be read as JSON"):
            await sender.submit_raw("unregistered", b"{")


async def test_concurrent_submissions_share_calls(url: str, faults: Faults) -> None:
    app = Holdfast(url)

    @app.task
    async def work(number: int) -> None: ...

    async with app:
        jobs = await asyncio.gather(*(work.submit(number) for number in range(1_200)))
        assert len({job.id for job in jobs}) == 1_200
        assert faults.count("submit_each") == 3
        await work.submit(1)
        assert faults.count("submit_each") == 4
        batches = [len(args[0]) for name, args in faults.calls if name == "submit_each"]
        assert batches == [MAX_BATCH, MAX_BATCH, 200, 1]
        await work.submit_many((number,) for number in range(2 * MAX_BATCH + 1))
        assert faults.count("submit") == 3


async def test_a_queue_that_refuses_intake_does_not_affect_other_queues(url: str) -> None:
    app = Holdfast(url)

    @app.task
    async def work() -> None: ...

    async with app:
        await app.engine.set_control("full", QueueControl(intake_paused=True))
        results = await asyncio.gather(
            *(work.options(queue=queue).submit() for queue in ("full", "open", "full", "open")), return_exceptions=True
        )
        assert [isinstance(result, IntakeRefused) for result in results] == [True, False, True, False]


async def test_a_cancelled_caller_does_not_cancel_others(url: str, faults: Faults) -> None:
    app = Holdfast(url)

    @app.task
    async def work(number: int) -> None: ...

    async with app:
        first, second = (asyncio.create_task(work.submit(number)) for number in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).id
        assert (await app.engine.stats("default")).states[State.QUEUED] == 2


def test_blocking_calls_from_scripts_threads_and_loops(url: str) -> None:
    """A script without an event loop; then the same app on a loop and from several threads."""
    app = Holdfast(url)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    job = double.submit_sync(21)
    keyed = double.options(idempotency_key="k").submit_sync(4)
    assert double.options(idempotency_key="k").submit_sync(4).id == keyed.id

    async def work() -> None:
        with pytest.raises(UsageError, match=r"use `await task.submit\(…\)`"):
            double.submit_sync(1)
        with pytest.raises(UsageError, match=r"use `await job.result\(…\)`"):
            job.result_sync(1)
        async with working(app):
            assert await job.result(60) == 42
            assert await asyncio.to_thread(keyed.result_sync, 10) == 8
            results = await asyncio.gather(
                *(asyncio.to_thread(lambda n: double.submit_sync(n).result_sync(60), n) for n in range(5))
            )
            assert results == [0, 2, 4, 6, 8]
        await app.close()

    asyncio.run(work())
    assert [thread for thread in threading.enumerate() if thread.name == "holdfast-portal"] == []
    assert job.result_sync(60) == 42  # the portal opens again
    asyncio.run(app.close())


def test_an_app_serves_one_event_loop_after_another(url: str) -> None:
    app = Holdfast(url)

    @app.task
    async def work() -> None: ...

    first = asyncio.run(work.submit())
    second = asyncio.run(work.submit())

    async def read_states() -> list[State]:
        async with app:
            return [await job.state() for job in (first, second)]

    assert asyncio.run(read_states()) == [State.QUEUED, State.QUEUED]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_the_portal_opens_again_in_a_forked_process(redis_url: str, namespace: str) -> None:
    """As in a pre-forking web server that submitted a job before it forked."""
    app = Holdfast(redis_url, namespace=namespace)

    @app.task
    async def work() -> None: ...

    work.submit_sync()
    child = os.fork()
    if not child:
        exit_code = 1
        try:
            work.submit_sync()
            exit_code = 0
        finally:
            os._exit(exit_code)
    assert os.waitpid(child, 0)[1] == 0

    async def count() -> int:
        async with app:
            return (await app.engine.stats("default")).states[State.QUEUED]

    assert asyncio.run(count()) == 2


async def test_a_task_can_submit_jobs(both: Holdfast) -> None:
    @both.task
    async def child(number: int) -> int:
        return number + 1

    @both.task
    def from_thread(number: int) -> int:
        return child.submit_sync(number).result_sync(60)

    @both.task
    async def parent(ctx: Context) -> int:
        return await (await from_thread.submit(1)).result(60)

    async with working(both):
        assert await (await parent.submit()).result(60) == 2


async def test_plain_calls_run_the_function(app: Holdfast) -> None:
    @app.task
    async def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    assert await add(1, 2) == 3
    assert add.__doc__ == "Adds."
    assert repr(add) == "<Task 'add' on queue 'default'>"
    job = await add.options(idempotency_key="k").submit(1, 2)
    assert repr(job) == f"<Job {job.id} in 'default'>"
    assert dict(app.tasks) == {"add": add}
