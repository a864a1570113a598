"""Jobs that lost a lease while their code ran, run alone: by an embedded worker, and by a worker for such jobs."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, State
from holdfast.core.job import Claim
from holdfast.core.verdict import Settlement, SettleResult
from holdfast.errors import EngineUnavailable
from holdfast.neighbours.isolation_locks import IsolationLocks
from holdfast.testing.inline import ManualClock
from holdfast.upkeep.lost_leases import HasStarted, LostLeases, assume_started
from holdfast.worker.recycling import WorkerExit
from holdfast.worker.suspects import IdleIsolation
from holdfast.worker.worker import Worker
from tests.worker.support import working


class Overlap:
    """A task's counter of concurrent runs."""

    def __init__(self, app: Holdfast) -> None:
        self.running = 0
        self.highest = 0

        @app.task
        async def count(seconds: float = 0.02) -> None:
            self.running += 1
            self.highest = max(self.highest, self.running)
            await asyncio.sleep(seconds)
            self.running -= 1

        self.task = count


async def _count(app: Holdfast, event_type: str) -> int:
    """How many events of a type there are."""
    entries = await app.engine.read_feed("default", "", 1_000)
    return sum(event.type == event_type for entry in entries for event in entry.events)


async def _lose(app: Holdfast, clock: ManualClock, count: int) -> None:
    """Let a worker that has ended lose all ready jobs."""
    assert len(await app.engine.claim("dead", ["default"], count, 0)) == count
    clock.advance(31)


async def test_an_idle_worker_runs_suspects_one_by_one(app: Holdfast, clock: ManualClock) -> None:
    overlap = Overlap(app)
    async with app:
        jobs = [await overlap.task.submit() for _ in range(4)]
        await _lose(app, clock, 4)
        async with working(app):
            for job in jobs:
                await job.result(60)
        assert overlap.highest == 1
        # The verdict on one is settled before the next is claimed: only one can be lost with the worker.
        entries = await app.engine.read_feed("default", "", 1_000)
        moves = [event.type for entry in entries for event in entry.events if event.type != "task.created"]
        assert moves == ["task.claimed"] * 4 + ["task.reclaimed", "task.succeeded"] * 4


@pytest.mark.parametrize(("has_started", "highest"), [(assume_started, 1), (lambda worker, job_id: False, 4)])
async def test_jobs_that_had_not_started_are_released(
    app: Holdfast, clock: ManualClock, has_started: HasStarted, highest: int
) -> None:
    overlap = Overlap(app)
    async with app:
        jobs = [await overlap.task.submit(0.2) for _ in range(4)]
        await _lose(app, clock, 4)
        async with working(app, has_started=has_started):
            for job in jobs:
                await job.result(60)
                assert (await job.info()).meta.lost_leases == 1
        assert await _count(app, "task.released") == (4 if highest > 1 else 0)
    assert overlap.highest == highest


async def test_a_suspect_whose_claim_lost_its_reply_does_not_run_among_others(
    app: Holdfast, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker learns of the lease later, when other jobs may run."""
    overlap, lost = Overlap(app), list[Claim]()
    real = LostLeases.claim_suspect

    async def claim_suspect(leases: LostLeases, queues: Sequence[str]) -> list[Claim]:
        claims = await real(leases, queues)
        if claims and not lost:
            lost.extend(claims)
            raise EngineUnavailable("the reply was lost")
        return claims

    monkeypatch.setattr(LostLeases, "claim_suspect", claim_suspect)
    async with app:
        suspect = await overlap.task.submit()
        await _lose(app, clock, 1)
        async with working(app):
            await suspect.result(60)
        assert [claim.job_id for claim in lost] == [suspect.id]
        assert await _count(app, "task.released") == 1


async def test_other_jobs_run_after_a_suspect(app: Holdfast, clock: ManualClock) -> None:
    overlap = Overlap(app)
    async with app:
        suspect = await overlap.task.submit()
        await _lose(app, clock, 1)
        others = [await overlap.task.submit(0.05) for _ in range(20)]
        async with working(app):
            for job in (suspect, *others):
                await job.result(60)
    assert overlap.highest > 1


async def test_a_worker_for_suspects_ends_when_there_are_none(app: Holdfast, clock: ManualClock) -> None:
    overlap = Overlap(app)
    cleared: list[bool] = []
    async with app:
        jobs = [await overlap.task.submit() for _ in range(3)]
        await _lose(app, clock, 3)
        ready = await overlap.task.submit()
        worker = Worker(app, upkeep=False, on_cleared=lambda: cleared.append(True))
        async with asyncio.timeout(60):
            assert await worker.run() is WorkerExit.DRAINED
        assert [await job.state() for job in jobs] == [State.SUCCEEDED] * 3
        assert await ready.state() is State.QUEUED
    assert cleared == []


async def test_a_worker_for_suspects_waits_after_an_outage(
    app: Holdfast, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reclaims nothing for a moment, but there are more suspects."""
    overlap = Overlap(app)
    async with app:
        jobs = [await overlap.task.submit() for _ in range(2)]
        await _lose(app, clock, 2)
        engine: Any = app.engine
        settle, policy = engine.settle, engine._policy

        async def settle_late(settlements: Sequence[Settlement]) -> list[SettleResult]:
            policy.watch.interruptions += 1
            answers: list[SettleResult] = await settle(settlements)
            return answers

        monkeypatch.setattr(engine, "settle", settle_late)
        async with asyncio.timeout(60):
            await Worker(app, upkeep=False, on_cleared=lambda: None).run()
        assert [await job.state() for job in jobs] == [State.SUCCEEDED] * 2


async def test_a_worker_for_suspects_searches_twice(
    app: Holdfast, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was settling when it was searched, and no longer is when it is asked."""
    overlap = Overlap(app)
    async with app:
        jobs = [await overlap.task.submit() for _ in range(2)]
        await _lose(app, clock, 2)
        engine: Any = app.engine
        reclaim, calls = engine.reclaim, list[int]()

        async def reclaim_every_other(*arguments: Any, **options: Any) -> Any:
            calls.append(len(calls))
            return [] if len(calls) % 2 else await reclaim(*arguments, **options)

        monkeypatch.setattr(engine, "reclaim", reclaim_every_other)
        async with asyncio.timeout(60):
            await Worker(app, upkeep=False, on_cleared=lambda: None).run()
        assert [await job.state() for job in jobs] == [State.SUCCEEDED] * 2


async def test_a_suspect_that_runs_for_a_lease_is_cleared(engine_url: str, namespace: str) -> None:
    """Its process makes room for the next one, and ends with it."""
    app = Holdfast(
        engine_url, namespace=namespace, visibility_timeout_s=0.3, heartbeat_interval_s=0.05, reclaim_interval_s=0.05
    )
    gate, cleared = asyncio.Event(), asyncio.Event()

    @app.task
    async def hold() -> None:
        await gate.wait()

    async with app:
        jobs = [await hold.submit() for _ in range(2)]
        assert len(await app.engine.claim("dead", ["default"], 2, 0)) == 2
        await asyncio.sleep(0.3)
        async with asyncio.timeout(60):
            running = asyncio.create_task(Worker(app, upkeep=False, on_cleared=cleared.set).run())
            await cleared.wait()
            gate.set()
            await running
        assert sorted([await job.state() for job in jobs]) == [State.RUNNING, State.SUCCEEDED]


class _Busy:
    """A fetcher that is idle only when it has claimed nothing for some time."""

    is_idle = False

    def __init__(self, now: list[float], needs_s: float) -> None:
        self._now = now
        self._needs_s = needs_s
        self.stopped_s = 0.0
        self.runs = 0

    async def wait_idle(self, timeout_s: float) -> bool:
        waited_s = min(timeout_s, self._needs_s)
        self.stopped_s += waited_s
        self._now[0] += waited_s
        return timeout_s >= self._needs_s

    async def run_suspect(self, lease_s: float) -> bool:
        self.runs += 1
        return True


@pytest.mark.parametrize("needs_s", [10, 600])
async def test_a_busy_worker_claims_most_of_the_time(monkeypatch: pytest.MonkeyPatch, needs_s: float) -> None:
    """However long its jobs are, it runs the suspects at some time."""
    now = [1_000.0]
    monkeypatch.setattr("holdfast.worker.suspects.time.monotonic", lambda: now[0])
    isolation, fetcher = IdleIsolation(30), _Busy(now, needs_s)
    while now[0] < 50_000:
        began = now[0]
        await isolation.run_suspects(fetcher)  # type: ignore[arg-type]
        if now[0] == began:
            now[0] += 1
    assert fetcher.runs > 0
    assert fetcher.stopped_s / (now[0] - 1_000) <= 0.2


def _acquire(locks: IsolationLocks) -> int:
    lock = locks.acquire()
    assert lock is not None
    return lock


def test_a_lock_is_free_when_its_last_descriptor_is_closed(tmp_path: Path) -> None:
    locks, others = IsolationLocks("store", tmp_path / "records", 2), IsolationLocks("other", tmp_path / "records", 2)
    first, second = _acquire(locks), _acquire(locks)
    assert locks.acquire() is None
    other = _acquire(others)
    inherited = os.dup(first)
    os.close(first)
    assert locks.acquire() is None
    os.close(inherited)
    for lock in (_acquire(locks), other, second):
        os.close(lock)
    locks.close()
    others.close()
    assert list((tmp_path / "records").iterdir()) == []


def test_a_removed_lock_is_not_acquired_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker removes the file between the opening and the lock."""
    locks = IsolationLocks("store", tmp_path / "records", 1)
    flock, removed = fcntl.flock, list[Path]()

    def flock_late(lock: int, how: int) -> None:
        if not removed:
            (path,) = (tmp_path / "records").iterdir()
            path.unlink()
            removed.append(path)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    lock = _acquire(locks)
    assert removed[0].stat().st_ino == os.fstat(lock).st_ino
    os.close(lock)
    locks.close()
