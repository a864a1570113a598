"""A Redis that is full (`maxmemory`, `noeviction`): submissions are refused, and accepted jobs still run.

The limit is set below the memory in use, so that the server stays full whatever is freed.
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


class FullRedis:
    """A separate server that can be filled."""

    def __init__(self, site: Site, redis: Redis) -> None:
        self.site = site
        self.redis = redis

    async def fill(self) -> None:
        await self.redis.config_set("maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            await self.redis.set("more", "x")

    async def make_room(self) -> None:
        await self.redis.config_set("maxmemory", "0")

    async def wait_drained(self) -> None:
        async def check() -> bool:
            return not any((await self.site.app.engine.stats("default")).states.values())

        await eventually(check, "a full Redis to drain", within_s=8)


@pytest.fixture
async def full(make_redis: MakeServer, make_site: MakeSite) -> AsyncIterator[FullRedis]:
    server = make_redis(maxmemory_policy="noeviction")
    site = make_site(server.url)
    async with Redis.from_url(server.url) as redis:
        # The server has been used before, so that the consumer groups exist.
        async with working(site.app):
            await (await site.tasks.work.submit(0)).result(60)
        site.runs_log.unlink()
        yield FullRedis(site, redis)


async def test_a_submission_is_refused_with_a_clear_error(full: FullRedis, caplog: pytest.LogCaptureFixture) -> None:
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
    # Refused submissions left nothing, not even a key.
    keyed = await tasks.work.options(idempotency_key="k").submit(7)
    assert not keyed.duplicate
    async with working(full.site.app):
        await full.site.assert_all_ended([accepted.id, keyed.id])
    assert len(full.site.runs()) == 2


async def test_running_and_ready_jobs_end(full: FullRedis) -> None:
    site, gate = full.site, full.site.gate()
    async with working(site.app, concurrency=5) as worker:
        running = [await site.tasks.hold.submit(str(gate)) for _ in range(5)]
        await eventually(lambda: worker.running == 5, "all slots to be taken")
        jobs = [job.id for job in await site.tasks.work.submit_many((number,) for number in range(600))]
        await full.fill()
        gate.touch()
        await full.wait_drained()
        await site.assert_all_ended([*jobs, *(job.id for job in running)])
        assert {(await job.info()).attempt for job in running} == {1}
    assert len(site.runs()) == 605


async def test_failures_become_dead_letters(full: FullRedis) -> None:
    site = full.site
    jobs = [(await site.tasks.fail.submit()).id for _ in range(10)]
    await full.fill()
    async with working(site.app):
        await full.wait_drained()
        await site.assert_all_ended(jobs, State.FAILED)
    assert (await site.app.engine.stats("default")).dead_letters == 10


async def test_retries_and_delayed_jobs_run(full: FullRedis) -> None:
    """Delayed jobs use memory: if they could not run, a full Redis would stay full."""
    site = full.site
    jobs = [(await site.tasks.flaky.submit()).id for _ in range(10)]
    jobs += [(await site.tasks.work.options(delay=0.1).submit(number)).id for number in range(10)]
    await full.fill()
    async with working(site.app):
        await full.wait_drained()
        await site.assert_all_ended(jobs)


async def test_lost_leases_are_reclaimed(full: FullRedis) -> None:
    site, gate = full.site, full.site.gate()
    worker = await site.start_worker()
    jobs = [await site.tasks.hold.submit(str(gate)) for _ in range(3)]
    for job in jobs:
        await site.wait_running(job.id)
    worker.kill()
    await full.fill()
    gate.touch()
    async with working(site.app):
        await full.wait_drained()
        await site.assert_all_ended(job.id for job in jobs)


async def test_the_first_worker_starts_on_a_full_server(make_redis: MakeServer, make_site: MakeSite) -> None:
    """Callers have filled the server before a worker started: there are no consumer groups yet."""
    server = make_redis(maxmemory_policy="noeviction")
    site = make_site(server.url)
    jobs = await site.tasks.work.submit_many((number,) for number in range(10))
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("maxmemory", "1")
        async with working(site.app):
            await site.assert_all_ended(job.id for job in jobs)


async def test_foreign_messages_do_not_stop_other_jobs(full: FullRedis) -> None:
    """They were written before the limit was reached and are not adopted yet."""
    site = full.site
    own_jobs = [(await site.tasks.work.submit(number)).id for number in range(3)]
    for name, payload in (("good", '{"number": 1}'), ("bad", "{")):
        fields = {"task_id": name, "type": "work", "payload": payload}
        await full.redis.xadd(f"{site.settings['namespace']}:stream:task", fields)  # type: ignore[arg-type]
    own_jobs += [(await site.tasks.work.submit(number)).id for number in range(3)]
    await full.fill()
    async with working(site.app):
        await full.wait_drained()
        await site.assert_all_ended(own_jobs)
        good, bad = await site.get_infos(["good", "bad"])
        assert (good is not None and good.state, bad is not None and bad.state) == (State.SUCCEEDED, State.FAILED)


async def test_a_caller_can_wait_for_a_result(full: FullRedis) -> None:
    site, gate = full.site, full.site.gate()
    async with working(site.app):
        job = await site.tasks.hold.submit(str(gate))
        await full.fill()
        waiting = asyncio.create_task(job.result(60))
        await site.wait_running(job.id)
        gate.touch()
        assert await waiting == "attempt 1"


async def test_an_operator_can_make_room(full: FullRedis) -> None:
    """Cancel and pause must work on a full server."""
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
        await full.wait_drained()
    assert [await job.state() for job in jobs[1:]] == [State.SUCCEEDED] * 2
