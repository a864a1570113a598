"""`submit_many`: calls with and without own options, on both engines and inline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast import Context, Holdfast, Priority, State
from holdfast.client.task import Task
from holdfast.core.job import MAX_BATCH
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.testing import inline
from tests.worker.support import working


@pytest.fixture
def work(both: Holdfast) -> Task[..., str]:
    @both.task
    async def work(ctx: Context, number: int, word: str = "") -> str:
        return f"{number} {word} {ctx.tenant_id} {ctx.context.get('user', '')}"

    return work


@pytest.fixture(params=["engine", "inline"])
async def running_app(request: pytest.FixtureRequest, both: Holdfast) -> AsyncIterator[Holdfast]:
    """An app with a worker in the background, or in inline mode."""
    if request.param == "inline":
        with inline(both):
            yield both
    else:
        async with both, working(both, queues=["default", "mail"]):
            yield both


async def test_each_call_has_its_own_options(running_app: Holdfast, work: Task[..., str]) -> None:
    jobs = await work.options(tenant_id="acme", context={"user": "ada"}).submit_many(
        [
            (1,),
            work.options(idempotency_key="two", priority="high").bind(2, word="b"),
            work.options(tenant_id="other", queue="mail").bind(3),
            work.options(delay=0.01, context={"user": "bob"}).bind(4, "d"),
            (5, "e"),
        ]
    )
    assert [await job.result(60) for job in jobs] == [
        "1  acme ada",
        "2 b acme ada",
        "3  other ada",
        "4 d acme bob",
        "5 e acme ada",
    ]
    assert [job.queue for job in jobs] == ["default", "default", "mail", "default", "default"]
    infos = [await job.info() for job in jobs]
    assert [info.idempotency_key for info in infos] == [jobs[0].id, "two", *(job.id for job in jobs[2:])]
    assert [info.meta.priority for info in infos][:2] == [Priority.NORMAL, Priority.HIGH]


async def test_known_keys_are_reported_in_the_order_of_the_calls(running_app: Holdfast, work: Task[..., str]) -> None:
    first = await work.options(idempotency_key="b").submit(0, "first")
    keys = ["a", "b", None, "a", "c", "b"]
    jobs = await work.submit_many(
        work.options(idempotency_key=key, on_key_reuse="return").bind(number, "later")
        for number, key in enumerate(keys)
    )
    assert [job.duplicate for job in jobs] == [False, True, False, True, False, True]
    assert (jobs[1].id, jobs[5].id, jobs[3].id) == (first.id, first.id, jobs[0].id)
    assert await jobs[5].result(60) == "0 first default "
    # The whole submission can be repeated.
    again = await work.submit_many(
        work.options(idempotency_key=key, on_key_reuse="return").bind(number, "later")
        for number, key in enumerate(keys)
        if key
    )
    assert all(job.duplicate for job in again)


async def test_more_calls_than_a_batch_keep_their_options(both: Holdfast, work: Task[..., str]) -> None:
    def calls() -> Iterator[Any]:
        for number in range(2 * MAX_BATCH + 1):
            yield work.options(idempotency_key=f"k{number}").bind(number) if number % 2 else (number,)

    async with both:
        jobs = await work.submit_many(calls())
        for number in (0, 1, MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1, 2 * MAX_BATCH):
            info = await jobs[number].info()
            assert info.payload == b'{"number":%d}' % number
            assert info.idempotency_key == (f"k{number}" if number % 2 else jobs[number].id)


async def test_a_delayed_call_waits_and_the_others_do_not(both: Holdfast, work: Task[..., str]) -> None:
    async with both, working(both):
        # The call's own time takes precedence; None is not an option.
        now, later, at = await work.options(delay=3600, tenant_id="acme").submit_many(
            [
                work.options(delay=0).bind(1),
                work.options(tenant_id=None, delay=None).bind(2),
                work.options(run_at=datetime(2999, 1, 1, tzinfo=UTC)).bind(3),
            ]
        )
        assert await now.result(60) == "1  acme "
        assert [await job.state() for job in (later, at)] == [State.QUEUED, State.QUEUED]
        assert (await at.info()).next_attempt_at_ms > (await later.info()).next_attempt_at_ms > 0
        assert (await later.info()).tenant_id == "acme"


async def test_one_invalid_call_sends_none(both: Holdfast, work: Task[..., str]) -> None:
    async with both:
        good = work.options(idempotency_key="k").bind(1)
        anything: Any = work
        with pytest.raises(InvalidPayload):
            await work.submit_many([good, anything.bind("x")])
        with pytest.raises(InvalidOption, match="durable or connection, not both"):
            await work.options(connection=object()).submit_many([good, work.options(durable=True).bind(2)])
        assert await both.engine.queues() == []
