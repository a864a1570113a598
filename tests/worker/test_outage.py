"""A store that goes away in mid-work: the worker stays, comes back, and nothing is lost or run twice."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from holdfast import Holdfast, State
from holdfast.errors import EngineUnavailable
from tests.worker.support import Faults, eventually, working


@pytest.fixture
async def app(url: str, faults: Faults) -> Any:
    made = Holdfast(url, heartbeat_interval_s=0.05, reclaim_interval_s=0.05)
    yield made
    await made.close()


async def test_work_goes_on_after_an_outage(app: Holdfast, faults: Faults) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> int:
        ran.append(number)
        return number

    jobs = await work.submit_many((number,) for number in range(50))
    async with working(app) as worker:
        await jobs[0].result(10)
        faults.down.add("everything")
        await eventually(lambda: not worker.ready, "readiness to be lost")
        faults.down.clear()
        more = await work.submit_many((number,) for number in range(50, 100))
        assert [await job.result(10) for job in [*jobs, *more]] == list(range(100))
        await eventually(lambda: worker.ready)
        assert worker.counts.reconnects >= 1
    assert sorted(ran) == list(range(100))


async def test_verdicts_wait_for_the_engine(app: Holdfast, faults: Faults) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> int:
        ran.append(number)
        return number

    async with working(app) as worker:
        faults.down.add("settle")
        jobs = await work.submit_many((number,) for number in range(20))
        await eventually(lambda: len(ran) == 20 and worker.running == 0)
        assert worker.in_hand == 20
        assert await jobs[0].state() is State.RUNNING
        await eventually(lambda: faults.count("settle") >= 3, "the verdicts to be sent again")
        faults.down.clear()
        assert [await job.result(10) for job in jobs] == list(range(20))
        await eventually(lambda: worker.in_hand == 0)
    assert len(ran) == 20


async def test_leases_of_unsettled_verdicts_are_renewed(app: Holdfast, faults: Faults) -> None:
    @app.task
    async def work() -> None: ...

    async with working(app) as worker:
        faults.down.add("settle")
        job = await work.submit()
        await eventually(lambda: worker.finished == 1)
        before = faults.count("renew")
        await eventually(lambda: faults.count("renew") > before + 2, "heartbeats")
        (leases,) = next(args for name, args in reversed(faults.calls) if name == "renew")
        assert [lease.job_id for lease in leases] == [job.id]
        faults.down.clear()
        await job.result(10)


async def test_a_lost_reply_of_settle_is_no_second_end(app: Holdfast, faults: Faults) -> None:
    @app.task
    async def work() -> str:
        return "once"

    async with working(app) as worker:
        faults.lose_reply.add("settle")
        job = await work.submit()
        await eventually(lambda: worker.finished == 1 and worker.in_hand == 0)
        assert faults.count("settle") == 2
        assert await job.result(10) == "once"
        assert worker.counts.stale_settles == 0
        assert len(await job.history()) <= 1


@pytest.mark.parametrize("method", ["claim", "reclaim"])
async def test_a_lost_reply_of_a_claim_is_found_again(app: Holdfast, faults: Faults, method: str) -> None:
    attempts: list[int] = []

    @app.task
    async def work() -> str:
        attempts.append(1)
        return "found"

    async with working(app):
        faults.lose_reply.add(method)
        job = await work.submit()
        assert await job.result(10) == "found"
        await eventually(lambda: not faults.lose_reply)
    assert attempts == [1]
    assert (await job.view()).attempt == 1


async def test_a_failure_nobody_foresaw_does_not_end_the_worker(
    app: Holdfast, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work(number: int) -> int:
        return number

    await app.open()
    inner: Any = app.engine
    real_claim, real_settle = inner._engine.claim, inner._engine.settle
    broken = {"claim": 1}

    async def claim(*args: Any) -> Any:
        if broken["claim"]:
            broken["claim"] -= 1
            raise RuntimeError("a bug")
        return await real_claim(*args)

    async def settle(settlements: Any) -> Any:
        if any(settlement.claim.payload == b'{"number":13}' for settlement in settlements):
            raise RuntimeError("one of them is bad")
        return await real_settle(settlements)

    monkeypatch.setattr(inner._engine, "claim", claim)
    monkeypatch.setattr(inner._engine, "settle", settle)
    jobs = await work.submit_many((number,) for number in range(20))
    async with working(app):
        good = [job for number, job in enumerate(jobs) if number != 13]
        assert [await job.result(10) for job in good] == [number for number in range(20) if number != 13]
        assert await jobs[13].state() is State.RUNNING


async def test_verdicts_that_cannot_be_told_are_given_up_in_the_end(
    url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    app = Holdfast(url, drain_grace_s=0)

    @app.task
    async def work() -> None: ...

    async with app:
        async with working(app) as worker:
            faults.down |= {"settle", "resume", "leave"}
            await work.submit()
            await eventually(lambda: worker.finished == 1)
            worker.drain()
        faults.down.clear()
    assert "1 verdicts were not answered" in caplog.text


async def test_submitting_to_a_store_that_is_down_fails_at_once(
    app: Holdfast, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def work() -> None: ...

    await app.open()
    faults.down.add("submit")
    answers = await asyncio.gather(*(work.submit() for _ in range(100)), return_exceptions=True)
    assert all(isinstance(answer, EngineUnavailable) for answer in answers)
    lines = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert [record.getMessage() for record in lines] == [
        "100 jobs could not be submitted: submit: made to fail by the test"
    ]
    with pytest.raises(EngineUnavailable):
        await work.submit_many([(), ()])
    faults.down.clear()
    await work.submit()
