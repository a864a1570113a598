"""Clocks that are wrong or jump.

Redis uses the server's time: a client's clock changes neither leases nor due times. The embedded engine uses the clock
of the machine: a jump may cost a run, but never causes a second final event.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from holdfast import State
from holdfast.errors import WaitTimeout
from holdfast.testing.inline import ManualClock
from tests.faults import sample
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = pytest.mark.faults

DAY_S: Final = 86_400.0
REAL_TIME, REAL_TIME_NS = time.time, time.time_ns


def shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Shift the wall clock of this process from now on."""
    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: REAL_TIME_NS() + round(seconds * 1e9))


@pytest.mark.redis
@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S], ids=["forward", "back"])
async def test_a_callers_clock_does_not_move_due_times(
    redis_site: Site, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    shift_clock(monkeypatch, seconds)
    started_at = time.monotonic()
    job = await redis_site.tasks.work.options(delay=0.6).submit(1)
    retried = await redis_site.tasks.flaky.submit()
    due_in_s = (await job.info()).next_attempt_at_ms / 1000 - REAL_TIME()
    assert 0 < due_in_s <= 0.6
    async with working(redis_site.app):
        await job.result(60)
        assert time.monotonic() - started_at >= 0.6
        await redis_site.assert_all_ended([job.id, retried.id])
    info = await job.info()
    for instant_ms in (info.created_at_ms, info.finished_at_ms, info.meta.history[0].started_at_ms):
        assert abs(instant_ms / 1000 - REAL_TIME()) < 30


@pytest.mark.redis
@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S], ids=["forward", "back"])
async def test_a_clock_jump_during_a_run_does_not_lose_the_lease(
    redis_site: Site, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    gate = redis_site.gate()
    async with working(redis_site.app) as worker:
        job = await redis_site.tasks.hold.submit(str(gate))
        await redis_site.wait_running(job.id)
        shift_clock(monkeypatch, seconds)
        delayed = await redis_site.tasks.work.options(delay=1.2).submit(1)
        # Longer than a lease: renewals continue, and nothing is reclaimed.
        assert await delayed.result(60) == 1
        assert worker.counters.leases_lost == worker.counters.reclaimed == 0
        gate.touch()
        await redis_site.assert_all_ended([job.id, delayed.id])
        assert await job.result() == "attempt 1"


@pytest.mark.redis
async def test_workers_with_different_clocks_do_not_reclaim_from_each_other(redis_site: Site) -> None:
    gate = redis_site.gate()
    skews = (DAY_S, -DAY_S)
    workers = [redis_site.start("worker", "-c", "2", **{sample.SKEW_VARIABLE: str(skew)}) for skew in skews]
    for worker in workers:
        await worker.wait_for_log(" started on ")
    jobs = [await redis_site.tasks.hold.submit(str(gate)) for _ in range(4)]
    delayed = await redis_site.tasks.work.options(delay=1.5).submit(1)
    for job in jobs:
        await redis_site.wait_running(job.id)
    # Not before it is due, and for longer than a lease.
    with pytest.raises(WaitTimeout):
        await delayed.result(1.1)
    gate.touch()
    await redis_site.assert_all_ended([delayed.id, *(job.id for job in jobs)])
    assert {run.attempt for run in redis_site.runs()} == {1}
    assert len({run.pid for run in redis_site.runs()}) == 2


@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S], ids=["forward", "back"])
async def test_a_jump_of_the_embedded_clock_ends_each_job_once(
    make_site: MakeSite, tmp_path: Path, seconds: float
) -> None:
    """Forward, every lease expires at once; back, none expires for a day. Either way each job ends once."""
    clock = ManualClock()
    site = make_site(f"sqlite:///{tmp_path / 'holdfast.db'}", clock=clock)
    gate = site.gate()
    async with working(site.app) as worker:
        jobs = [await site.tasks.hold.submit(str(gate)) for _ in range(3)]
        await eventually(lambda: worker.running == 3, "three runs")
        clock.jump(clock.now_ms() + round(seconds * 1000))
        gate.touch()
        after = await site.tasks.work.submit(1)
        await site.assert_all_ended([after.id, *(job.id for job in jobs)])
    assert set((await site.final_events()).values()) == {1}
    assert {await job.state() for job in jobs} == {State.SUCCEEDED}
