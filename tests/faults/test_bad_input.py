"""Invalid calls and tasks: a clear error at once, or a dead letter with the reason, on both engines.

Afterwards the same app still works, and no job is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Holdfast, Priority, Retry, State
from holdfast.errors import (
    DuplicateTask,
    HoldfastError,
    InvalidOption,
    InvalidPayload,
    JobFailed,
    PayloadTooLarge,
    UnknownJob,
    UnknownTask,
    UsageError,
)
from tests.faults.conftest import MakeSite
from tests.faults.support import Site
from tests.worker.support import working

pytestmark = pytest.mark.faults

InvalidCall = Callable[[Site], Awaitable[Any]]

UNUSUAL = "\x1f\u2028\U0001f980 {}[]\"'\\"


async def submit_by_name(site: Site, task: str, payload: bytes, **options: Any) -> Any:
    return await site.app.submit_raw(task, payload, **options)


#: Invalid calls, and their errors. Nothing may reach the store.
REFUSED: dict[str, tuple[type[HoldfastError], str, InvalidCall]] = {
    "unknown task": (UnknownTask, "wrok", lambda s: submit_by_name(s, "wrok", b"{}")),
    "argument of the wrong type": (InvalidPayload, "number", lambda s: s.tasks.work.submit("seven")),  # type: ignore[arg-type]
    "argument missing": (InvalidPayload, "number", lambda s: s.tasks.work.submit()),  # type: ignore[call-arg]
    "argument too many": (InvalidPayload, "2", lambda s: s.tasks.work.submit(1, 2)),  # type: ignore[call-arg]
    "argument unknown": (InvalidPayload, "colour", lambda s: s.tasks.work.submit(1, colour=2)),  # type: ignore[call-arg]
    "argument twice": (InvalidPayload, "twice", lambda s: s.tasks.work.submit(1, number=2)),  # type: ignore[call-arg]
    "argument that is not JSON": (InvalidPayload, "JSON", lambda s: s.tasks.work.submit(object())),  # type: ignore[arg-type]
    "text that is not Unicode": (InvalidPayload, "", lambda s: s.tasks.hold.submit("\ud800")),
    "one bad call of many": (InvalidPayload, "", lambda s: s.tasks.work.submit_many([(1,), ("x",), (3,)])),
    "calls that are not tuples": (InvalidPayload, "tuple", lambda s: s.tasks.work.submit_many([1, 2])),  # type: ignore[list-item]
    "raw payload that is not JSON": (InvalidPayload, "", lambda s: submit_by_name(s, "work", b"{number:")),
    "raw payload that is not text": (InvalidPayload, "", lambda s: submit_by_name(s, "work", b"\xff\xfe")),
    "raw payload that is a number": (InvalidPayload, "", lambda s: submit_by_name(s, "work", b"7")),
    "raw payload nested too deep": (InvalidPayload, "", lambda s: submit_by_name(s, "work", b"[" * 100_000)),
    "payload too long": (PayloadTooLarge, "limit", lambda s: s.tasks.hold.submit("x" * (1024 * 1024))),
    "raw payload too long": (
        PayloadTooLarge,
        "limit",
        lambda s: submit_by_name(s, "hold", b'["' + b"x" * 2**20 + b'"]'),
    ),
    "context too long": (PayloadTooLarge, "", lambda s: _with(s, context={"x": "y" * 2**20})),
    "context that is not JSON": (InvalidPayload, "", lambda s: _with(s, context={"x": object()})),
    "negative delay": (InvalidOption, "negative", lambda s: _with(s, delay=-1)),
    "negative delay as a timedelta": (InvalidOption, "negative", lambda s: _with(s, delay=timedelta(seconds=-1))),
    "delay that is not a number": (InvalidOption, "delay", lambda s: _with(s, delay=float("nan"))),
    "infinite delay": (InvalidOption, "delay", lambda s: _with(s, delay=float("inf"))),
    "instant without a zone": (InvalidOption, "aware", lambda s: _with(s, run_at=datetime(2030, 1, 1))),  # noqa: DTZ001
    "delay and instant": (InvalidOption, "both", lambda s: _with(s, delay=1, run_at=datetime(2030, 1, 1, tzinfo=UTC))),
    "unknown priority": (InvalidOption, "priority", lambda s: _with(s, priority="urgent")),
    "empty idempotency key": (InvalidOption, "idempotency_key", lambda s: _with(s, idempotency_key="")),
    "zero byte in an idempotency key": (InvalidOption, "idempotency_key", lambda s: _with(s, idempotency_key="a\0b")),
    "zero byte in a trace id": (InvalidOption, "trace_id", lambda s: _with(s, trace_id="a\0b")),
    "key that is not Unicode": (InvalidOption, "idempotency_key", lambda s: _with(s, idempotency_key="\ud800")),
    "queue with a brace": (InvalidOption, "queue", lambda s: _with(s, queue="a{b}")),
    "unknown option": (InvalidOption, "colour", lambda s: _with(s, colour="red")),
    "unknown job": (UnknownJob, "no-such-job", lambda s: s.app.job("no-such-job").state()),
}


async def _with(site: Site, **options: Any) -> Any:
    return await site.tasks.work.options(**options).submit(1)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
async def test_an_invalid_call_is_refused_and_stores_nothing(
    sqlite_site: Site, case: tuple[type[HoldfastError], str, InvalidCall]
) -> None:
    """Calls are validated before anything is sent, so one engine is enough."""
    error, message, call = case
    with pytest.raises(error) as refused:
        await call(sqlite_site)
    assert isinstance(refused.value, UsageError)
    assert message in str(refused.value)
    await sqlite_site.app.open()
    await sqlite_site.assert_nothing_open()
    assert await sqlite_site.events() == []


def test_duplicate_task_names_are_refused(site: Site) -> None:
    async def work() -> None: ...

    with pytest.raises(DuplicateTask, match="'work'"):
        site.app.task(work)
    with pytest.raises(DuplicateTask, match="'flaky'"):
        site.app.task(name="flaky")(work)
    # The first task is unchanged.
    assert site.app.tasks["work"] is site.tasks.work


def test_an_invalid_policy_is_refused(site: Site) -> None:
    for wrong in ({"max_retries": -1}, {"base": -1.0}, {"delays": [-1]}, {"multiplier": 0.0}, {"jitter": -0.1}):
        with pytest.raises(InvalidOption):
            Retry(**wrong)
    with pytest.raises(InvalidOption, match="timeout"):
        site.app.task(timeout=-1)
    with pytest.raises(InvalidOption, match="heartbeat"):
        Holdfast(site.url, visibility_timeout_s=1, heartbeat_interval_s=1)


#: Jobs that fail only when they run, and their error codes.
FAILS_AT_RUN: dict[str, tuple[str, str, bytes]] = {
    "unknown task": ("UNKNOWN_TASK", "unknown", b"{}"),
    "arguments that do not fit": ("INVALID_PAYLOAD", "work", b'{"number": "seven"}'),
    "too few arguments": ("INVALID_PAYLOAD", "work", b"[]"),
    "a scalar": ("INVALID_PAYLOAD", "work", b"17"),
    "a result that is not JSON": ("INVALID_RESULT", "unwritable", b"{}"),
    "a result that is too long": ("PAYLOAD_TOO_LARGE", "big", b'{"size": 1048576}'),
}


@pytest.mark.parametrize("case", FAILS_AT_RUN.values(), ids=FAILS_AT_RUN.keys())
async def test_a_job_that_cannot_run_is_a_dead_letter_at_once(
    engine_url: str, make_site: MakeSite, case: tuple[str, str, bytes]
) -> None:
    code, task, payload = case
    site = make_site(engine_url, unknown_task_grace_s=0)
    # An app without tasks does not validate arguments, like a remote producer.
    async with Holdfast(site.url, **site.settings) as producer, working(site.app):
        bad = await producer.submit_raw(task, payload)
        good = await site.tasks.work.submit(1)
        with pytest.raises(JobFailed) as failed:
            await bad.result(60)
        assert failed.value.error_code == code
        assert await good.result(60) == 1
        history = await site.assert_all_ended([bad.id], State.FAILED)
        moves = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
        assert list(history.histories[bad.id].moves) == moves
        info = await bad.info()
        assert (info.attempt, info.meta.retry_count) == (1, 0)
        assert len(site.runs(bad.id)) == (1 if task in ("unwritable", "big") else 0)
        assert (await site.app.engine.stats("default")).dead_letters == 1


async def test_the_payload_limit_is_configurable(engine_url: str, make_site: MakeSite) -> None:
    site = make_site(engine_url, payload_limit=100)
    with pytest.raises(PayloadTooLarge) as refused:
        await site.tasks.hold.submit("x" * 100)
    assert (refused.value.limit, refused.value.size > 100) == (100, True)
    async with working(site.app):
        assert await (await site.tasks.big.submit(98)).result(60) == "x" * 98
        job = await site.tasks.big.submit(99)
        with pytest.raises(JobFailed) as failed:
            await job.result(60)
        assert failed.value.error_code == "PAYLOAD_TOO_LARGE"


async def test_unusual_but_valid_text_is_unchanged(site: Site) -> None:
    """Control characters, separators, quotes and astral characters in every text field; zero bytes in JSON."""
    text = f"\x00{UNUSUAL}"

    @site.app.task
    async def echo(text: str) -> str:
        return text

    options: dict[str, Any] = {
        "idempotency_key": UNUSUAL,
        "trace_id": UNUSUAL,
        "context": {text: text},
        "priority": Priority.HIGH,
    }
    async with working(site.app):
        job = await echo.options(**options).submit(text)
        duplicate = await echo.options(**options).submit(text)
        assert await job.result(60) == text
        assert (duplicate.id, duplicate.duplicate) == (job.id, True)
        info = await job.info()
        assert (info.trace_id, info.idempotency_key) == (UNUSUAL, UNUSUAL)
        assert info.meta.context == {text: text}
        await site.assert_all_ended([job.id])


@pytest.mark.parametrize("raises", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
async def test_a_task_that_raises_a_base_exception_fails(
    engine_url: str, make_site: MakeSite, raises: BaseException
) -> None:
    """The worker and its other jobs continue."""
    site = make_site(engine_url)

    @site.app.task(retry=Retry(max_retries=1, base=0, jitter=None))
    async def raising() -> None:
        raise raises

    async with working(site.app):
        job = await raising.submit()
        with pytest.raises(JobFailed):
            await job.result(60)
        await site.assert_all_ended([job.id], State.FAILED)
        assert await (await site.tasks.work.submit(2)).result(60) == 2
