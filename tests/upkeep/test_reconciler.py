"""Wipes of a real Redis with a real ledger: every job is restored once, in its state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select

from holdfast import Holdfast, Retry
from holdfast.client.submitter import BatchingSubmitter
from holdfast.core.job import Claim, Envelope, Failure, JobInfo, JobKey, Meta, new_job_ids
from holdfast.core.states import FINAL, RESTORED_EVENT, State
from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, Settlement, Succeed, Suspend, Verdict
from holdfast.engine.port import Engine
from holdfast.errors import IdempotencyKeyReused, LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.factory import build_engine, build_ledger
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.verification import Verifier
from holdfast.ledger.verify import verify_ledger
from holdfast.schema import anomalies, job_events
from holdfast.settings import Settings
from holdfast.upkeep import reconciler as module
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler, ReconcileReport
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakePostgres, MakeServer
from tests.upkeep.test_reconciler_histories import HastyReconciler
from tests.worker.support import eventually, working

pytestmark = [pytest.mark.redis]

QUEUE: Final = "default"
FAILURE: Final = Failure("TASK_ERROR", "no luck", "ValueError", "a stack")
HOUR_MS: Final = 3_600_000
SEED: Final = int(os.environ.get("HOLDFAST_TEST_SEED", "20261115"))


class Rig:
    """An engine on its own Redis, a ledger, a projector between them, and a reconciler."""

    def __init__(self, engine: Engine, ledger: Ledger, redis: RedisServer, projector: Projector) -> None:
        self.engine = engine
        self.redis = redis
        self._projector = projector
        self.start_projecting()
        self.ledger = ledger
        assert ledger.projection is not None
        self.projection = ledger.projection
        self.reconciler = Reconciler(engine, ledger, reach_s=10)

    def start_projecting(self) -> None:
        self._running = asyncio.create_task(self._projector.run())

    async def stop_projecting(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def wipe(self) -> None:
        client: Any = Redis.from_url(self.redis.url)
        await client.flushall()
        await client.aclose()

    async def submit(self, number: int = 1, **fields: Any) -> list[str]:
        envelopes = [
            Envelope(**{"job_id": job_id, "task": "noop", "payload": b'{"n":%d}' % index} | fields)
            for index, job_id in enumerate(new_job_ids(number))
        ]
        return [receipt.job_id for receipt in await BatchingSubmitter(self.engine, self.ledger).submit_many(envelopes)]

    async def claim(self, limit: int = 1, worker: str = "w1") -> list[Claim]:
        return await self.engine.claim(worker, [QUEUE], limit, 0)

    async def settle(self, claim: Claim, verdict: Verdict) -> None:
        await self.engine.settle([Settlement(claim, verdict, claim.claimed_at_ms)])

    async def info(self, job_id: str) -> JobInfo:
        (info,) = await self.engine.get(QUEUE, [job_id])
        assert info is not None
        return info

    async def wait_caught_up(self) -> None:
        """Wait until the ledger has the feed as it is now."""
        end = await self.engine.snapshot(QUEUE, [])

        async def reached() -> bool:
            return await module._has(self.projection, QUEUE, end, await self.projection.position(QUEUE))

        await eventually(reached, "the ledger to catch up")

    async def reconcile_all(self) -> ReconcileReport:
        """Run passes until there is nothing left to restore."""
        total = ReconcileReport()

        async def settled() -> bool:
            report = await self.reconciler.reconcile()
            total.lost += report.lost
            total.restored += report.restored
            total.skipped |= report.skipped
            return not report.lost and not report.skipped

        await eventually(settled, "the reconciler to find no lost jobs")
        return total

    async def restored_after_end(self) -> list[Any]:
        """Jobs that were restored although the ledger had their final event."""
        query = select(anomalies.c.job_id).where(anomalies.c.event.like(f"%{RESTORED_EVENT}%"))
        async with self.ledger.store.read_engine.connect() as connection:  # type: ignore[attr-defined]
            return list((await connection.execute(query)).scalars())

    async def count(self, event: str) -> int:
        query = select(func.count()).select_from(job_events).where(job_events.c.type == event)
        async with self.ledger.store.read_engine.connect() as connection:  # type: ignore[attr-defined]
            return int((await connection.execute(query)).scalar_one())

    async def state(self, job_id: str) -> State | None:
        """The job's state in the ledger, if it is open."""
        found = await self.ledger.recovery.still_open([JobKey("default", QUEUE, job_id)])
        return found[0].state if found else None

    async def check_consistent(self) -> None:
        report = await verify_ledger(self.ledger.queries)
        assert report.faults == []
        assert await self.restored_after_end() == []


@asynccontextmanager
async def run_rig(
    redis: RedisServer, ledger_url: str, *, confirm_dead_letters: bool = True, **options: Any
) -> AsyncIterator[Rig]:
    settings = Settings(url=redis.url, ledger=ledger_url, **options)
    engine = build_engine(settings)
    ledger = build_ledger(settings, engine)
    assert ledger is not None
    await engine.open()
    await ledger.open()
    projector_engine, projector_ledger = engine.clone(), ledger.clone()
    await projector_engine.open()
    engine.on_unverified(Verifier(engine, ledger).request)
    projector = Projector(projector_engine, projector_ledger, [QUEUE], linger_s=0.01, round_s=0.1)
    if not confirm_dead_letters:
        projector._confirmer.confirm_all = confirm_nothing  # type: ignore[method-assign]
    rig = Rig(engine, ledger, redis, projector)
    try:
        yield rig
    finally:
        await rig.stop_projecting()
        for each in (projector_engine, projector_ledger, engine, ledger):
            await each.close()


async def confirm_nothing(queue: str) -> int:
    return 0


@pytest.fixture
async def rig(make_redis: MakeServer, ledger_url: str) -> AsyncIterator[Rig]:
    async with run_rig(make_redis(), ledger_url, confirm_dead_letters=False) as rig:
        yield rig


async def create_every_state(rig: Rig) -> dict[str, str]:
    """Create one job in each state in which it can be lost: description → job id."""
    jobs: dict[str, str] = {}

    async def run(name: str, verdict: Verdict | None, **fields: Any) -> None:
        (jobs[name],) = await rig.submit(**fields)
        (claim,) = await rig.claim()
        assert claim.job_id == jobs[name]
        if verdict is not None:
            await rig.settle(claim, verdict)

    policy = Meta(retry=Retry(max_retries=9), context={"for": "ada"})
    await run("retrying", RetryLater(HOUR_MS, FAILURE), meta=policy, tenant_id="acme", idempotency_key="k1")
    await run("waiting out an outage", RetryLater(HOUR_MS, FAILURE, counts=False))
    await run("suspended", Suspend(FAILURE), trace_id="trace")
    await run("waiting for approval", Hold("really?"))
    await run("asleep", Release("sleeping", HOUR_MS, started=True))
    await run("a dead letter", DeadLetter(FAILURE))
    await run("running", None)
    await run("cancelled", None)
    await rig.engine.move(QUEUE, jobs.pop("cancelled"), State.CANCELLED, actor="ann", reason="no")
    (jobs["held"],) = await rig.submit(hold=True, delay_ms=HOUR_MS)
    (jobs["delayed"],) = await rig.submit(delay_ms=HOUR_MS)
    (jobs["queued"],) = await rig.submit(meta=Meta(priority=2))
    return jobs


def comparable(info: JobInfo) -> dict[str, Any]:
    """The fields that a restore must not change."""
    meta = info.meta
    return {
        "state": State.QUEUED if info.state is State.RUNNING else info.state,
        "identity": (info.job_id, info.task, info.tenant_id, info.idempotency_key, info.trace_id, info.payload),
        "counts": (info.attempt, meta.retry_count, meta.lost_leases, meta.unavailable_count, meta.unavailable_since_ms),
        "policy": (meta.priority, meta.retry, meta.max_retries, meta.context, meta.dlq_id),
        "history": [(a.number, a.worker, a.started_at_ms, a.outcome, a.failure) for a in meta.history],
        "failure": info.failure,
        "due": info.next_attempt_at_ms,
        "created_at": info.created_at_ms,
    }


async def test_every_job_is_restored_in_its_own_state(rig: Rig) -> None:
    jobs = await create_every_state(rig)
    before = {name: await rig.info(job_id) for name, job_id in jobs.items()}
    await rig.wait_caught_up()
    await rig.wipe()
    assert await rig.engine.get(QUEUE, list(jobs.values())) == [None] * len(jobs)

    dry_run_report = await eventually(lambda: _dry_run(rig, len(jobs)), "the reconciler to find the lost jobs")
    assert {(lost.key.job_id, lost.state) for lost in dry_run_report.jobs} == {
        (info.job_id, comparable(info)["state"]) for info in before.values()
    }
    assert dry_run_report.restored == 0
    assert await rig.engine.get(QUEUE, list(jobs.values())) == [None] * len(jobs)

    report = await rig.reconcile_all()
    assert report.restored == len(jobs)
    for name, job_id in jobs.items():
        after = await rig.info(job_id)
        assert comparable(after) == comparable(before[name]), name
        assert after.state is not State.RUNNING
    await rig.wait_caught_up()
    for name, job_id in jobs.items():
        key = JobKey(before[name].tenant_id, QUEUE, job_id)
        (found,) = await rig.ledger.recovery.still_open([key])
        assert found.state is comparable(before[name])["state"]
    assert await rig.count(RESTORED_EVENT) == len(jobs)
    await rig.check_consistent()

    # Restored jobs continue.
    claims = await rig.claim(10, "w2")
    assert {claim.job_id for claim in claims} == {jobs["running"], jobs["queued"]}
    attempts = {claim.job_id: claim.attempt for claim in claims}
    assert attempts == {jobs["running"]: 2, jobs["queued"]: 1}
    await rig.engine.move(QUEUE, jobs["suspended"], State.QUEUED, actor="ann", reason="mended")
    await rig.engine.move(QUEUE, jobs["waiting for approval"], State.QUEUED, actor="ann", reason="yes")
    for claim in [*claims, *await rig.claim(10, "w2")]:
        await rig.settle(claim, Succeed(b"1"))
    await rig.wait_caught_up()
    await rig.check_consistent()


async def _dry_run(rig: Rig, count: int) -> ReconcileReport | None:
    report = await rig.reconciler.reconcile(dry_run=True)
    return report if report.lost == count else None


async def test_repeated_and_concurrent_passes_restore_each_job_once(rig: Rig) -> None:
    jobs = await rig.submit(700)
    await rig.wait_caught_up()
    await rig.wipe()
    others = [Reconciler(rig.engine, rig.ledger, reach_s=10) for _ in range(3)]
    reports = await asyncio.gather(*(each.reconcile() for each in others))
    assert sum(report.restored for report in reports) + (await rig.reconcile_all()).restored == len(jobs)
    again = await rig.reconciler.reconcile()
    assert (again.checked, again.lost, again.restored, again.skipped) == (len(jobs), 0, 0, {})
    await rig.wait_caught_up()
    assert await rig.count(RESTORED_EVENT) == len(jobs)
    await rig.check_consistent()


async def test_jobs_that_are_not_lost_are_not_changed(rig: Rig) -> None:
    jobs = await create_every_state(rig)
    await rig.wait_caught_up()
    report = await rig.reconciler.reconcile()
    assert (report.checked, report.lost, report.restored, report.skipped) == (len(jobs), 0, 0, {})


async def test_idempotency_keys_are_restored_after_a_wipe(rig: Rig) -> None:
    (first,) = await rig.submit(idempotency_key="order-17", tenant_id="acme")
    (ended,) = await rig.submit(idempotency_key="order-18")
    for claim in await rig.claim(5):
        if claim.job_id == ended:
            await rig.settle(claim, Succeed(b"1"))
    await rig.wait_caught_up()
    await rig.wipe()
    # Before any reconciler pass: the submission itself restores the keys.
    assert await rig.submit(idempotency_key="order-17", tenant_id="acme") == [first]
    assert await rig.submit(idempotency_key="order-18") == [ended]
    # So are their fingerprints: another request with the key is refused.
    for key, tenant in (("order-17", "acme"), ("order-18", "default")):
        with pytest.raises(IdempotencyKeyReused):
            await rig.submit(idempotency_key=key, tenant_id=tenant, payload=b'{"other":1}')
    assert await rig.submit(idempotency_key="order-17") != [first]
    assert await rig.submit(idempotency_key="order-19") != [ended]
    assert (await rig.reconcile_all()).restored == 1
    assert (await rig.info(first)).state is State.QUEUED
    with pytest.raises(IdempotencyKeyReused):
        await rig.submit(idempotency_key="order-17", tenant_id="acme", payload=b'{"other":1}')
    await rig.wait_caught_up()
    await rig.check_consistent()


@pytest.mark.parametrize("reconciler_class", [Reconciler, HastyReconciler])
async def test_a_job_whose_final_event_is_unread_is_not_restored(
    make_redis: MakeServer, ledger_url: str, reconciler_class: type[Reconciler]
) -> None:
    """Records of finished jobs are deleted and the projector is stopped: the engine knows none of the jobs,
    and in the ledger all are open. A reconciler that does not wait restores every one of them."""
    async with run_rig(make_redis(), ledger_url) as rig:
        jobs = await rig.submit(50)
        await rig.wait_caught_up()
        await rig.stop_projecting()
        for claim in await rig.claim(50):
            await rig.settle(claim, Succeed(b"1"))
        client: Any = Redis.from_url(rig.redis.url)
        await client.delete(*[key async for key in client.scan_iter() if any(job in key.decode() for job in jobs)])
        await client.aclose()
        assert await rig.engine.get(QUEUE, jobs) == [None] * len(jobs)

        report = await reconciler_class(rig.engine, rig.ledger, reach_s=0.2).reconcile()
        assert report.restored == (len(jobs) if reconciler_class is HastyReconciler else 0)
        if reconciler_class is Reconciler:
            assert report.skipped == {module.LEDGER_BEHIND: len(jobs)}
            rig.start_projecting()
            await rig.wait_caught_up()
            assert (await rig.reconciler.reconcile()).checked == 0
            await rig.check_consistent()


async def test_an_outage_of_the_ledger_during_a_wipe_loses_nothing(
    make_redis: MakeServer, make_postgres: MakePostgres
) -> None:
    postgres = make_postgres()
    async with run_rig(make_redis(), postgres.url, reply_timeout_s=2.0, connect_timeout_s=2.0) as rig:
        jobs = await rig.submit(20, idempotency_key="")
        await rig.wait_caught_up()
        postgres.kill()
        await rig.wipe()
        with pytest.raises(LedgerUnavailable):
            await rig.reconciler.reconcile()
        # Intake continues without the ledger (requirement L3).
        (new,) = await rig.submit()
        postgres.start()
        await rig.reconcile_all()
        assert all(info is not None for info in await rig.engine.get(QUEUE, [*jobs, new]))
        await rig.wait_caught_up()
        await rig.check_consistent()


async def test_random_histories_with_wipes_lose_no_job_and_repeat_no_final_event(
    make_redis: MakeServer, ledger_url: str
) -> None:
    """Work, wipes and reconcilers run concurrently; every job in the ledger gets one final event."""
    print(f"seed {SEED}")
    random = Random(SEED)
    async with run_rig(make_redis(), ledger_url, visibility_timeout_s=1, heartbeat_interval_s=0.5) as rig:
        submitted: list[str] = []
        for number in range(8):
            submitted += await _one_history(rig, random, number)
        await _finish_all(rig)
        await rig.wait_caught_up()
        assert [job async for page in rig.ledger.recovery.open_jobs(QUEUE, 500) for job in page] == []
        await rig.check_consistent()
        assert await rig.count(RESTORED_EVENT) > 0
        # Every job that was durable before a wipe is recorded.
        keys = [JobKey("default", QUEUE, job_id) for job_id in submitted]
        assert await rig.projection.wait_recorded(keys, 10_000) == set(keys)


async def _one_history(rig: Rig, random: Random, number: int) -> list[str]:
    jobs = await rig.submit(random.randrange(10, 40))
    await rig.projection.wait_recorded([JobKey("default", QUEUE, job_id) for job_id in jobs], 10_000)
    passes = [asyncio.create_task(rig.reconciler.reconcile()) for _ in range(2)]
    for _ in range(random.randrange(5, 15)):
        for claim in await rig.claim(random.randrange(1, 8), f"w{number}"):
            await rig.settle(claim, random.choice(_VERDICTS))
        if random.random() < 0.2:
            await rig.wipe()
        await asyncio.sleep(random.random() / 50)
    await asyncio.gather(*passes)
    return jobs


_VERDICTS: Final[list[Verdict]] = [
    Succeed(b"1"),
    Succeed(b"1"),
    RetryLater(20, FAILURE),
    Suspend(FAILURE),
    DeadLetter(FAILURE),
    Release("later", 10, started=True),
]


async def _finish_all(rig: Rig) -> None:
    async def done() -> bool:
        await rig.reconciler.reconcile()
        await rig.engine.promote([QUEUE], 500)
        for info in await rig.engine.find(QUEUE, [State.SUSPENDED], 500):
            await rig.engine.move(QUEUE, info.job_id, State.QUEUED, actor="ann", reason="continue")
        claims = [*await rig.claim(500, "last"), *await rig.engine.reclaim("last", [QUEUE], 500)]
        for claim in claims:
            await rig.settle(claim, Succeed(b"1"))
        await rig.wait_caught_up()
        return [page async for page in rig.ledger.recovery.open_jobs(QUEUE, 500)] == []

    await eventually(done, "every job to end")


async def test_durable_jobs_survive_a_wipe_during_their_run(make_redis: MakeServer, ledger_url: str) -> None:
    redis = make_redis()
    settings: dict[str, Any] = {
        "visibility_timeout_s": 2,
        "heartbeat_interval_s": 0.5,
        "reconcile_interval_s": 1,
        "durable_timeout_s": 50,
    }
    app = Holdfast(redis.url, ledger=ledger_url, **settings)
    runs: list[int] = []

    @app.task
    async def work(number: int) -> int:
        await asyncio.sleep(0.01)
        runs.append(number)
        return number

    async with app:
        async with working(app, concurrency=20):
            client: Any = Redis.from_url(redis.url)
            jobs = await asyncio.gather(*(work.options(durable=True).submit(number) for number in range(200)))
            later_jobs = asyncio.gather(*(work.options(durable=True).submit(number) for number in range(200, 400)))
            await client.flushall()
            jobs += await later_jobs
            await client.flushall()
            await client.aclose()
            ledger = backend_of(app).ledger
            assert ledger is not None
            keys = [JobKey("default", QUEUE, job.id) for job in jobs]

            async def ended() -> bool:
                return await ledger.recovery.still_open(keys) == []

            await eventually(ended, "every durable job to end")
            assert ledger.projection is not None
            assert await ledger.projection.wait_recorded(keys, 10_000) == set(keys)
        histories = await ledger.recovery.histories(keys)
        final_states = [
            [event.to_state for event in history if event.to_state in FINAL] for history in histories.values()
        ]
        assert final_states == [[State.SUCCEEDED]] * len(jobs)
        assert set(runs) == set(range(400))
        report = await verify_ledger(ledger.queries)
        assert report.faults == []
        assert report.restores > 0
