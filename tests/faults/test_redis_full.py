"""A Redis that is full (`maxmemory`, `noeviction`): submissions are refused, and everything accepted still drains.

The limit is set below what the server uses already, so that it is full from then on whatever is freed: if the line
drains here it drains anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from holdfast import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable
from tests.conftest import MakeServer
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]


class Full:
    """A server of a test's own that can be filled."""

    def __init__(self, site: Site, redis: Redis) -> None:
        self.site = site
        self.redis = redis

    async def fill(self) -> None:
        await self.redis.config_set("maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            await self.redis.set("more", "x")

    async def make_room(self) -> None:
        await self.redis.config_set("maxmemory", "0")

    async def has_drained(self) -> None:
        async def look() -> bool:
            return not any((await self.site.app.engine.stats("default")).states.values())

        await eventually(look, "a full Redis to drain", within_s=8)


@pytest.fixture
async def full(make_redis: MakeServer, make_site: MakeSite) -> AsyncIterator[Full]:
    server = make_redis(maxmemory_policy="noeviction")
    site = make_site(server.url)
    async with Redis.from_url(server.url) as redis:
        # A server that has been at work before: groups are there.
        async with working(site.app):
            await (await site.tasks.work.submit(0)).result(60)
        site.runs_log.unlink()
        yield Full(site, redis)


async def test_a_submission_is_refused_with_a_clear_error(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    tasks = full.site.tasks
    accepted = await tasks.work.submit(1)
    await full.fill()
    for refused in (
        tasks.work.submit(2),
        tasks.work.submit_many([(3,), (4,)]),
        tasks.work.options(delay=0.1).submit(5),
        tasks.work.options(hold=True).submit(6),
        tasks.work.options(idempotency_key="k").submit(7),
        tasks.work.options(queue="other").submit(8),
    ):
        with pytest.raises(EngineUnavailable, match="Redis is full"):
            await refused
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    await full.make_room()
    # Nothing of what was refused is there: not even a key.
    keyed = await tasks.work.options(idempotency_key="k").submit(7)
    assert not keyed.duplicate
    async with working(full.site.app):
        await full.site.all_is_well([accepted.id, keyed.id])
    assert len(full.site.runs()) == 2


async def test_running_jobs_settle_and_the_line_drains(full: Full) -> None:
    site, gate = full.site, full.site.gate()
    async with working(site.app, concurrency=5) as worker:
        running = [await site.tasks.hold.submit(str(gate)) for _ in range(5)]
        await eventually(lambda: worker.running == 5, "all slots to be taken")
        jobs = [job.id for job in await site.tasks.work.submit_many((number,) for number in range(600))]
        await full.fill()
        gate.touch()
        await full.has_drained()
        await site.all_is_well([*jobs, *(job.id for job in running)])
        assert {(await job.info()).attempt for job in running} == {1}
    assert len(site.runs()) == 605


async def test_failures_become_dead_letters(full: Full) -> None:
    site = full.site
    jobs = [(await site.tasks.fail.submit()).id for _ in range(10)]
    await full.fill()
    async with working(site.app):
        await full.has_drained()
        await site.all_is_well(jobs, State.FAILED)
    assert (await site.app.engine.stats("default")).dead_letters == 10


async def test_retries_and_delayed_jobs_are_put_in_line(full: Full) -> None:
    """What waits for its time holds memory too: if it could not run, a full Redis would stay full for ever."""
    site = full.site
    jobs = [(await site.tasks.flaky.submit()).id for _ in range(10)]
    jobs += [(await site.tasks.work.options(delay=0.1).submit(number)).id for number in range(10)]
    await full.fill()
    async with working(site.app):
        await full.has_drained()
        await site.all_is_well(jobs)


async def test_lost_leases_are_taken_over(full: Full) -> None:
    site, gate = full.site, full.site.gate()
    worker = await site.started()
    jobs = [await site.tasks.hold.submit(str(gate)) for _ in range(3)]
    for job in jobs:
        await site.is_running(job.id)
    worker.kill()
    await full.fill()
    gate.touch()
    async with working(site.app):
        await full.has_drained()
        await site.all_is_well(job.id for job in jobs)


async def test_the_first_worker_ever_finds_it_full(make_redis: MakeServer, make_site: MakeSite) -> None:
    """Callers have filled it before anybody worked: no group is there yet."""
    server = make_redis(maxmemory_policy="noeviction")
    site = make_site(server.url)
    jobs = await site.tasks.work.submit_many((number,) for number in range(10))
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("maxmemory", "1")
        async with working(site.app):
            await site.all_is_well(job.id for job in jobs)


async def test_foreign_messages_do_not_stop_our_own(full: Full) -> None:
    """They came in before the limit was reached, and are not adopted yet."""
    site = full.site
    ours = [(await site.tasks.work.submit(number)).id for number in range(3)]
    for name, payload in (("good", '{"number": 1}'), ("bad", "{")):
        fields = {"task_id": name, "type": "work", "payload": payload}
        await full.redis.xadd(f"{site.settings['namespace']}:stream:task", fields)  # type: ignore[arg-type]
    ours += [(await site.tasks.work.submit(number)).id for number in range(3)]
    await full.fill()
    async with working(site.app):
        await full.has_drained()
        await site.all_is_well(ours)
        good, bad = await site.views(["good", "bad"])
        assert (good is not None and good.state, bad is not None and bad.state) == (State.SUCCEEDED, State.FAILED)


async def test_a_caller_can_wait_for_a_result(full: Full) -> None:
    site, gate = full.site, full.site.gate()
    async with working(site.app):
        job = await site.tasks.hold.submit(str(gate))
        await full.fill()
        waiting = asyncio.create_task(job.result(60))
        await site.is_running(job.id)
        gate.touch()
        assert await waiting == "attempt 1"


async def test_an_operator_can_make_room(full: Full) -> None:
    """Cancel and pause must work just when they are needed."""
    site = full.site
    jobs = [await site.tasks.work.submit(number) for number in range(3)]
    waiting = await site.tasks.work.options(delay=60).submit(4)
    await full.fill()
    for job in (jobs[0], waiting):
        await job.cancel("make room", actor="ada")
        assert await job.state() is State.CANCELLED
    await site.app.engine.set_control("default", QueueControl(paused=True, intake_paused=True))
    assert (await site.app.engine.get_control("default")).paused
    await site.app.engine.set_control("default", QueueControl())
    async with working(site.app):
        await full.has_drained()
    assert [await job.state() for job in jobs[1:]] == [State.SUCCEEDED] * 2
