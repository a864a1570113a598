"""Redis comes back from the past: it is restored from an older snapshot, and the ledger knows more than it."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Holdfast, Retry, State
from holdfast.cli.session import local_principal
from holdfast.core.job import Claim, JobKey
from holdfast.core.verdict import RetryLater, Settlement, SettleResult, Succeed
from holdfast.errors import EngineUnavailable, JobCancelled, JobFailed, WaitTimeout
from holdfast.execution.backend import backend_of
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.ledger.verification import Verifier
from holdfast.operations.operations import Operations
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakePostgres, MakeServer
from tests.ledger.projection_rig import QUEUE
from tests.upkeep.projector_rig import FAILURE, ProjectorRig
from tests.worker.support import eventually, working

pytestmark = [pytest.mark.redis, pytest.mark.faults]


def app_on(redis: RedisServer, ledger: str, **more: Any) -> Holdfast:
    return Holdfast(redis.url, ledger=ledger, reconcile_interval_s=1, durable_timeout_s=50, **more)


async def save(redis: RedisServer, to: Path) -> None:
    """Keep a snapshot of what Redis has now."""
    async with Redis.from_url(redis.url) as client:
        await client.save()
    shutil.copy(redis.folder / "dump.rdb", to)


def go_back(redis: RedisServer, to: Path) -> None:
    redis.kill()
    shutil.copy(to, redis.folder / "dump.rdb")
    redis.start()


async def states_in_ledger(app: Holdfast, jobs: list[Any]) -> Counter[State]:
    ledger = backend_of(app).ledger
    assert ledger is not None
    recorded = await ledger.recovery.recorded([JobKey("default", "default", job.id) for job in jobs])
    return Counter(each.state for each in recorded.values())


async def wait_recorded(app: Holdfast, jobs: list[Any], state: State) -> None:
    async def is_recorded() -> bool:
        return (await states_in_ledger(app, jobs))[state] == len(jobs)

    await eventually(is_recorded, f"the ledger to have {len(jobs)} jobs as {state}")


async def test_jobs_that_ended_do_not_run_again(make_redis: MakeServer, ledger_url: str, tmp_path: Path) -> None:
    redis, older = make_redis(), tmp_path / "older.rdb"
    app, runs = app_on(redis, ledger_url), list[int]()

    @app.task(retry=Retry(max_retries=0))
    async def charge(number: int) -> int:
        runs.append(number)
        if number % 2:
            raise ValueError("no funds")
        return 100 * number + runs.count(number)

    async with app:
        async with working(app, queues=["other"]):
            jobs = [await charge.options(durable=True).submit(number) for number in range(20)]
            cancelled = await charge.options(durable=True).submit(99)
            await save(redis, older)
            await cancelled.cancel("changed my mind")
        async with working(app):
            await asyncio.gather(*(job.result() for job in jobs), return_exceptions=True)
            await wait_recorded(app, jobs[::2], State.SUCCEEDED)
            await wait_recorded(app, jobs[1::2], State.FAILED)
            await wait_recorded(app, [cancelled], State.CANCELLED)
        go_back(redis, older)
        async with working(app):
            last = await charge.submit(1_000)
            assert await last.result() == 100_001
            assert sorted(runs) == sorted([*range(20), 1_000])
            results = await asyncio.gather(*(job.result() for job in jobs), return_exceptions=True)
            with pytest.raises(JobCancelled):
                await cancelled.result()
    assert results[::2] == [100 * number + 1 for number in range(0, 20, 2)]
    assert all(isinstance(result, JobFailed) for result in results[1::2])


async def test_jobs_that_the_ledger_knows_better_get_its_state(
    make_redis: MakeServer, ledger_url: str, tmp_path: Path
) -> None:
    """With the retries used up, the due time, and the number of the last attempt."""
    redis, older = make_redis(), tmp_path / "older.rdb"
    app, attempts = app_on(redis, ledger_url), list[int]()

    @app.task(retry=Retry(max_retries=3, base=3_600, jitter=None))
    async def fetch(number: int) -> None:
        attempts.append(number)
        raise ConnectionError("not yet")

    async with app:
        async with working(app, queues=["other"]):
            jobs = [await fetch.options(durable=True).submit(number) for number in range(5)]
            await save(redis, older)
        async with working(app):
            await wait_recorded(app, jobs, State.RETRYING)
            before = [await job.info() for job in jobs]
        go_back(redis, older)
        async with working(app):
            await eventually(lambda: is_verified(app), "the queue to be verified")
            after = [await job.info() for job in jobs]
    assert [(info.state, info.attempt, info.next_attempt_at_ms) for info in after] == [
        (info.state, info.attempt, info.next_attempt_at_ms) for info in before
    ]
    assert len(attempts) == 5


async def is_verified(app: Holdfast) -> bool:
    gate = await backend_of(app).engine.gate("default")
    return gate.is_open and not gate.unverified_since_ms


async def test_a_worker_from_before_cannot_end_a_job_a_second_time(
    make_redis: MakeServer, ledger_url: str, tmp_path: Path
) -> None:
    """Its lease was lost, and another worker ended the job; the older Redis has its lease again."""
    redis, older = make_redis(), tmp_path / "older.rdb"
    app = app_on(redis, ledger_url, visibility_timeout_s=1, heartbeat_interval_s=0.3)

    @app.task
    async def work() -> str:
        return "second"

    async with app:
        engine = backend_of(app).engine
        async with working(app, queues=["other"]):
            job = await work.options(durable=True).submit()
            (claim,) = await claimed(app, "slow")
            await save(redis, older)
        async with working(app):
            assert await job.result() == "second"
            await wait_recorded(app, [job], State.SUCCEEDED)
        go_back(redis, older)

        async def settled() -> SettleResult | None:
            try:
                (result,) = await engine.settle([Settlement(claim, Succeed(b'"first"'), claim.claimed_at_ms)])
            except EngineUnavailable:
                return None
            return result

        assert await eventually(settled) is not SettleResult.APPLIED
        assert await job.result() == "second"


async def claimed(app: Holdfast, worker: str) -> list[Claim]:
    engine = backend_of(app).engine
    claims: list[Claim] = await eventually(lambda: engine.claim(worker, ["default"], 1, 0), "a claim")
    return claims


async def test_a_message_of_another_program_is_not_run_again(
    make_redis: MakeServer, ledger_url: str, tmp_path: Path
) -> None:
    redis, older = make_redis(), tmp_path / "older.rdb"
    app, runs = app_on(redis, ledger_url), list[int]()

    @app.task
    async def work(number: int) -> None:
        runs.append(number)

    async with app:
        await work.options(queue="other").submit(0)
        async with Redis.from_url(redis.url) as client:
            for number in range(3):
                message: dict[Any, Any] = {
                    "task_id": f"foreign-{number}",
                    "type": work.name,
                    "payload": f'{{"number": {number}}}',
                }
                await client.xadd("stream:task", message)
        await save(redis, older)
        jobs = [app.job(f"foreign-{number}") for number in range(3)]
        async with working(app):
            await eventually(lambda: len(runs) == 3)
            await wait_recorded(app, jobs, State.SUCCEEDED)
        go_back(redis, older)
        async with working(app):
            await work.submit(3)
            await eventually(lambda: 3 in runs)
            await eventually(lambda: has_no_messages(redis))
    assert sorted(runs) == [0, 1, 2, 3]


async def has_no_messages(redis: RedisServer) -> bool:
    async with Redis.from_url(redis.url) as client:
        return await client.xlen("stream:task") == 0


async def test_a_replay_is_in_the_ledger_when_it_is_confirmed(make_redis: MakeServer, ledger_url: str) -> None:
    """Until then the engine may lose it, and upkeep would not submit it again."""
    app = app_on(make_redis(), ledger_url)

    @app.task(retry=Retry(max_retries=0))
    async def work(number: int) -> None:
        raise ValueError("no funds")

    async with app, working(app):
        ledger = backend_of(app).ledger
        assert ledger is not None
        operations, ada = Operations.for_app(app).dead_letters, local_principal()
        jobs = [await work.submit(number) for number in range(5)]
        await wait_recorded(app, jobs, State.FAILED)
        for row in (await operations.list(ada, DeadLetterFilter())).dead_letters:
            done = await operations.replay(ada, row.dlq_id, reason="fixed", waits=True)
            assert await ledger.recovery.recorded([JobKey("default", "default", done.job_id)])


async def test_a_restart_that_lost_nothing_changes_nothing(
    make_redis: MakeServer, ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis = make_redis(appendonly="yes", appendfsync="always")
    app, runs = app_on(redis, ledger_url), list[int]()

    @app.task
    async def work(number: int) -> None:
        runs.append(number)

    async with app, working(app):
        done = [await work.options(durable=True).submit(number) for number in range(10)]
        await wait_recorded(app, done, State.SUCCEEDED)
        later = [await work.options(delay=3_600).submit(number) for number in range(10, 20)]
        redis.kill()
        redis.start()
        await eventually(lambda: is_verified_again(app), "the queue to be verified")
        last = await work.submit(20)
        await last.result()
        assert [await job.state() for job in later] == [State.QUEUED] * 10
    assert runs == [*range(10), 20]
    assert "went back" not in caplog.text


async def is_verified_again(app: Holdfast) -> bool:
    try:
        return await is_verified(app)
    except EngineUnavailable:
        return False


class TestWithoutTheLedger:
    """Redis is restarted while PostgreSQL is down."""

    async def test_a_projector_vouches_that_nothing_went_back(
        self, make_redis: MakeServer, make_postgres: MakePostgres
    ) -> None:
        redis, postgres = make_redis(appendonly="yes", appendfsync="always"), make_postgres(fsync=False)
        app = app_on(redis, postgres.url, on_unverified_epoch="wait")

        @app.task
        async def work(number: int) -> int:
            return number

        async with app, working(app):
            job = await work.options(durable=True).submit(1)
            await wait_recorded(app, [job], State.SUCCEEDED)
            postgres.stop()
            redis.kill()
            redis.start()
            job = await work.submit(2)
            assert await job.result(30) == 2
            gate = await backend_of(app).engine.gate("default")
            assert gate.unverified_since_ms > 0
            postgres.start()
            await eventually(lambda: is_verified_again(app), "the queue to be verified")

    async def test_an_engine_that_went_back_is_not_vouched_for(
        self, make_redis: MakeServer, make_postgres: MakePostgres, tmp_path: Path
    ) -> None:
        redis, postgres, older = make_redis(), make_postgres(fsync=False), tmp_path / "older.rdb"
        app, runs = app_on(redis, postgres.url, on_unverified_epoch="wait"), list[int]()

        @app.task
        async def work(number: int) -> None:
            runs.append(number)

        async with app:
            async with working(app, queues=["other"]):
                job = await work.options(durable=True).submit(1)
                await save(redis, older)
            async with working(app):
                await wait_recorded(app, [job], State.SUCCEEDED)
                postgres.stop()
                go_back(redis, older)
                last = await work.submit(2)
                with pytest.raises(WaitTimeout):
                    await last.result(3)
                postgres.start()
                await last.result(50)
        assert runs == [1, 2]

    async def test_after_a_while_jobs_run_without_it(
        self, make_redis: MakeServer, make_postgres: MakePostgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        redis, postgres = make_redis(appendonly="yes", appendfsync="always"), make_postgres(fsync=False)
        app = app_on(redis, postgres.url, unverified_epoch_wait_s=0.2)

        @app.task
        async def work(number: int) -> int:
            return number

        async with app:
            async with working(app):
                assert await (await work.submit(1)).result() == 1
            postgres.stop()
            redis.kill()
            redis.start()
            async with working(app):
                assert await (await work.submit(2)).result(30) == 2
                assert (await backend_of(app).engine.gate("default")).unverified_since_ms > 0
                assert "engine and ledger could not be compared" in caplog.text
                postgres.start()
                await eventually(lambda: is_verified_again(app), "the queue to be verified")


async def test_a_ledger_that_is_behind_does_not_set_a_job_back(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    """Its last entry is not in the feed, which looks as if the engine had gone back."""
    redis = make_redis()
    async with ProjectorRig(redis.url, ledger_url, namespace) as rig:
        await rig.reopen_intake()
        behind, ended = await rig.submit(2)
        (first, second) = await rig.claim()
        await rig.settle([second])
        await rig.settle([first], RetryLater(0, FAILURE))
        await rig.start()
        await rig.wait_settled()
        await rig.stop()
        await rig.engine.promote([QUEUE], 10)
        await rig.settle(await rig.claim(), RetryLater(600_000, FAILURE))
        async with Redis.from_url(redis.url) as client:
            async for key in client.scan_iter("*"):
                if key.endswith(b"stream:feed"):
                    await client.delete(key)
                elif key.endswith(b"queue:control"):
                    await client.hset(key, "cleared", "another")
        await Verifier(rig.engine, rig.ledger).ensure(QUEUE)
        (info, _) = await rig.engine.get(QUEUE, [behind, ended])
        assert info is not None
        assert (info.state, info.attempt, info.meta.retry_count) == (State.RETRYING, 2, 2)
