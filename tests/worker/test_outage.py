"""Engine outages during work: the worker reconnects, and no job is lost or run twice."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import pytest

from holdfast import Holdfast, State
from holdfast.errors import EngineRefused, EngineUnavailable
from holdfast.execution.backend import backend_of
from holdfast.upkeep.lost_leases import LostLeases
from holdfast.verification.chaos.redis_nodes import call_redis
from holdfast.verification.chaos.servers import RedisServer
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.in_flight import InFlight
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from tests.conftest import MakeServer
from tests.worker.support import Faults, eventually, working


@pytest.fixture
async def app(url: str, faults: Faults) -> Any:
    made = Holdfast(url, heartbeat_interval_s=0.05, reclaim_interval_s=0.05)
    yield made
    await made.close()


async def test_work_continues_after_an_outage(app: Holdfast, faults: Faults) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> int:
        ran.append(number)
        return number

    jobs = await work.submit_many((number,) for number in range(50))
    async with working(app) as worker:
        await jobs[0].result(60)
        faults.down.add("everything")
        await eventually(lambda: not worker.ready, "readiness to be lost")
        faults.down.clear()
        more = await work.submit_many((number,) for number in range(50, 100))
        assert [await job.result(60) for job in [*jobs, *more]] == list(range(100))
        await eventually(lambda: worker.ready)
        assert worker.counters.reconnects >= 1
    assert sorted(ran) == list(range(100))


async def test_verdicts_are_sent_again_until_the_engine_answers(app: Holdfast, faults: Faults) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> int:
        ran.append(number)
        return number

    async with working(app) as worker:
        faults.down.add("settle")
        jobs = await work.submit_many((number,) for number in range(20))
        await eventually(lambda: len(ran) == 20 and worker.running == 0)
        assert worker.in_flight == 20
        assert await jobs[0].state() is State.RUNNING
        await eventually(lambda: faults.count("settle") >= 3, "the verdicts to be sent again")
        faults.down.clear()
        assert [await job.result(60) for job in jobs] == list(range(20))
        await eventually(lambda: worker.in_flight == 0)
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
        leases, *_ = next(args for name, args in reversed(faults.calls) if name == "renew")
        assert [lease.job_id for lease in leases] == [job.id]
        faults.down.clear()
        await job.result(60)


async def test_a_lost_reply_of_settle_does_not_settle_twice(app: Holdfast, faults: Faults) -> None:
    @app.task
    async def work() -> str:
        return "once"

    async with working(app) as worker:
        faults.lose_reply.add("settle")
        job = await work.submit()
        await eventually(lambda: worker.finished == 1 and worker.in_flight == 0)
        assert faults.count("settle") == 2
        assert await job.result(60) == "once"
        assert worker.counters.stale_settles == 0
        assert len(await job.history()) <= 1


@pytest.mark.parametrize("method", ["claim", "reclaim"])
async def test_a_claim_whose_reply_was_lost_is_recovered(app: Holdfast, faults: Faults, method: str) -> None:
    attempts: list[int] = []

    @app.task
    async def work() -> str:
        attempts.append(1)
        return "found"

    async with working(app):
        faults.lose_reply.add(method)
        job = await work.submit()
        assert await job.result(60) == "found"
        await eventually(lambda: not faults.lose_reply)
    assert attempts == [1]
    assert (await job.info()).attempt == 1


async def test_an_unexpected_error_does_not_end_the_worker(
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
        assert [await job.result(60) for job in good] == [number for number in range(20) if number != 13]
        assert await jobs[13].state() is State.RUNNING


async def test_verdicts_that_cannot_be_settled_are_abandoned_at_the_end(
    url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    app = Holdfast(url, drain_grace_s=0)

    @app.task
    async def work() -> None: ...

    async with app:
        async with working(app) as worker:
            faults.down |= {"settle", "recover_claims", "deregister_worker"}
            await work.submit()
            await eventually(lambda: worker.finished == 1)
            worker.drain()
        faults.down.clear()
    assert "1 verdicts were not settled" in caplog.text


async def test_submitting_to_an_unreachable_engine_fails_at_once(
    app: Holdfast, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def work() -> None: ...

    await app.open()
    faults.down.update({"submit", "submit_each"})
    results = await asyncio.gather(*(work.submit() for _ in range(100)), return_exceptions=True)
    assert all(isinstance(result, EngineUnavailable) for result in results)
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert [record.getMessage() for record in critical] == [
        "100 jobs could not be submitted: submit_each: made to fail by the test"
    ]
    with pytest.raises(EngineUnavailable):
        await work.submit_many([(), ()])
    faults.down.clear()
    await work.submit()


async def test_a_repeatedly_refused_verdict_does_not_delay_the_others(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ran = asyncio.Event(), list[int]()

    @app.task
    async def work(number: int) -> int:
        ran.append(number)
        await go.wait()
        return number

    await app.open()
    inner: Any = app.engine
    real_settle = inner._engine.settle
    sent: list[int] = []

    async def settle(settlements: Any) -> Any:
        if any(settlement.claim.payload == b'{"number":3}' for settlement in settlements):
            sent.append(len(settlements))
            raise EngineRefused("one of them makes the script fail")
        return await real_settle(settlements)

    monkeypatch.setattr(inner._engine, "settle", settle)
    jobs = await work.submit_many((number,) for number in range(8))
    async with working(app, concurrency=8) as worker:
        await eventually(lambda: len(ran) == 8)
        go.set()
        good = [job for number, job in enumerate(jobs) if number != 3]
        assert [await job.result(60) for job in good] == [0, 1, 2, 4, 5, 6, 7]
        await eventually(lambda: worker.in_flight == 0, "the refused verdict to be abandoned")
        assert await jobs[3].state() is State.RUNNING
        assert sent.count(1) == 3


async def test_temporary_refusals_lose_no_verdict(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two refusals, an outage, two refusals: not three in a row."""
    ran: list[int] = []

    @app.task
    async def work() -> str:
        ran.append(1)
        return "settled"

    await app.open()
    inner: Any = app.engine
    real_settle = inner._engine.settle
    refused, unreachable = EngineRefused("no"), EngineUnavailable("unreachable")
    failures = [refused, refused, unreachable, unreachable, unreachable, unreachable, refused, refused]

    async def settle(settlements: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real_settle(settlements)

    monkeypatch.setattr(inner._engine, "settle", settle)
    async with working(app):
        job = await work.submit()
        assert await job.result(60) == "settled"
    assert ran == [1]


async def test_a_job_of_a_lost_first_claim_is_timed_by_the_engines_clock(app: Holdfast, faults: Faults) -> None:
    @app.task
    async def work() -> None: ...

    job = await work.submit()
    before_ms = round(time.time() * 1000) - 60_000
    faults.lose_reply.add("claim")
    async with working(app):
        await job.result(60)
    assert not faults.lose_reply
    settled = [settlement for name, args in faults.calls if name == "settle" for settlement in args[0]]
    assert [settlement.finished_at_ms > before_ms for settlement in settled] == [True]


async def test_a_claim_recovered_after_an_outage_does_not_set_the_clock_back(app: Holdfast) -> None:
    @app.task
    async def work() -> None: ...

    await app.open()
    await work.submit()
    await app.engine.claim("me", ["default"], 1, 0)
    in_flight: InFlight = set()
    runner = Runner(backend_of(app).specs, Settler(app.engine, in_flight), in_flight, 1)
    lost = LostLeases(app.engine, "me")
    fetcher = Fetcher(app.engine, "me", ["default"], runner, in_flight, app.settings, lost)
    later_ms = round(time.time() * 1000) + 3_600_000
    runner.set_engine_time(later_ms)
    await fetcher.recover_claims()
    assert runner.started == 1
    assert runner.now_ms() >= later_ms
    await eventually(lambda: not in_flight, "the verdict to be settled")
    await runner.close()


def _count_refused(server: RedisServer) -> int:
    found = re.search(r"errorstat_NOREPLICAS:count=(\d+)", call_redis(server.port, "INFO", "errorstats"))
    return int(found[1]) if found else 0


@pytest.mark.redis
async def test_an_engine_that_refuses_writes_is_reported_once(
    make_redis: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers reads, so that every recovery of claims succeeds."""
    server = make_redis()
    app = Holdfast(server.url)

    @app.task
    async def work() -> None: ...

    async with app, working(app) as worker:
        await (await work.submit()).result(30)
        await eventually(lambda: worker.in_flight == 0)
        await asyncio.to_thread(call_redis, server.port, "CONFIG", "SET", "min-replicas-to-write", 1)
        await eventually(lambda: _count_refused(server) >= 4 and not worker.ready, "claims to be refused")
        await asyncio.to_thread(call_redis, server.port, "CONFIG", "SET", "min-replicas-to-write", 0)
        await eventually(lambda: worker.ready, "the worker to recover")
        assert worker.counters.reconnects == 1
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in messages if "cannot reach the engine" in line]) == 1, messages
    assert len([line for line in messages if "connection to the engine recovered" in line]) == 1, messages
