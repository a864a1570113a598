"""A Redis that is down, restarted, stopped, read-only or wiped. Each test has a server of its own to hurt."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from holdfast import Holdfast, State, Worker
from holdfast.errors import EngineUnavailable, UnknownJob
from holdfast.verification.chaos.servers import free_port
from tests.conftest import MakeServer
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

#: A refused connection is known at once: much sooner than any of these timeouts.
LONG: Final[dict[str, Any]] = {"connect_timeout_s": 60.0, "reply_timeout_s": 60.0}
AT_ONCE_S: Final = 20.0


def critical_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.CRITICAL]


# Down ------------------------------------------------------------------------------------------------


async def test_down_at_the_first_submit(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(f"redis://127.0.0.1:{free_port()}/0", **LONG)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="cannot reach"):
        await site.tasks.work.submit(1)
    with pytest.raises(EngineUnavailable):
        await site.tasks.work.submit_many([(1,), (2,)])
    assert time.monotonic() - began < AT_ONCE_S
    assert len(critical_lines(caplog)) == 2


async def test_down_at_a_later_submit_and_back(
    make_redis: MakeServer, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """What was accepted before is not lost; the same app goes on once the server is back."""
    server = make_redis(appendonly="yes", appendfsync="always")
    site = make_site(server.url, **LONG)
    before = await site.tasks.work.submit(1)
    server.kill()
    began = time.monotonic()
    refused = await asyncio.gather(*(site.tasks.work.submit(n) for n in range(20)), return_exceptions=True)
    assert time.monotonic() - began < AT_ONCE_S
    assert all(isinstance(error, EngineUnavailable) for error in refused)
    assert critical_lines(caplog)
    server.start()
    after = await site.tasks.work.submit(2)
    async with working(site.app):
        await site.all_is_well([before.id, after.id])
    assert len(site.runs()) == 2


async def test_a_blocking_submit_fails_at_once_too(make_site: MakeSite) -> None:
    site = make_site(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(EngineUnavailable):
        await asyncio.to_thread(site.tasks.work.submit_sync, 1)


async def test_a_worker_that_starts_before_its_redis(make_redis: MakeServer, make_site: MakeSite) -> None:
    """In a program of one's own the worker waits for it; `holdfast worker` ends with a code that says so."""
    server = make_redis()
    site = make_site(server.url)
    job = await site.tasks.work.submit(1)
    await site.app.close()
    server.kill()
    process = site.start()
    assert await process.ended() == 3
    assert process.said("ENGINE_UNAVAILABLE")
    assert not process.said("Traceback")

    worker = Worker(site.app)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker._engine is None and not worker.ready, "the worker to try")
    server.start()
    await eventually(lambda: worker.ready, "the worker to be ready")
    # This server kept nothing: the job is gone, and whoever asks is told so.
    with pytest.raises(UnknownJob):
        await job.result(60)
    again = await site.tasks.work.submit(2)
    assert await again.result(60) == 2
    worker.drain()
    await running


# Restarted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_restarted_in_mid_work(make_redis: MakeServer, make_site: MakeSite, how: str) -> None:
    """With an append-only file nothing accepted is lost; the worker is the same process all along."""
    server = make_redis(appendonly="yes", appendfsync="always")
    site = make_site(server.url)
    worker = await site.started("--concurrency", "20")
    gate = site.gate()
    held = [await site.tasks.hold.submit(str(gate)) for _ in range(3)]
    jobs = [job.id for job in await site.tasks.nap.submit_many((number, 0.02) for number in range(200))]
    jobs += [(await site.tasks.flaky.submit()).id for _ in range(10)]
    jobs += [(await site.tasks.work.options(delay=0.5).submit(number)).id for number in range(10)]
    await eventually(lambda: len(site.runs()) >= 60, "a part to have run")
    getattr(server, how)()
    await worker.has_said("cannot reach the engine")
    server.start()
    gate.touch()

    await site.all_is_well([*jobs, *(job.id for job in held)])
    assert set((await site.final_events()).values()) == {1}
    assert worker.alive
    worker.terminate()
    assert await worker.ended() == 0
    assert (await site.app.engine.stats("default")).workers == 0


# Silent ----------------------------------------------------------------------------------------------


async def test_stopped_for_longer_than_the_reply_timeout(make_redis: MakeServer, make_site: MakeSite) -> None:
    """SIGSTOP: it accepts connections and answers nothing. Leases that outlast the pause are kept."""
    server = make_redis()
    site = make_site(server.url, reply_timeout_s=0.5, visibility_timeout_s=20, heartbeat_interval_s=0.2)
    worker = await site.started()
    gate = site.gate()
    held = await site.tasks.hold.submit(str(gate))
    await site.is_running(held.id)
    server.pause()
    with pytest.raises(EngineUnavailable, match="no reply"):
        await site.tasks.work.options(idempotency_key="k").submit(1)
    gate.touch()
    await worker.has_said("verdicts wait for the engine")
    server.resume()

    # Whether the first one arrived nobody knows; the key makes sure.
    again = await site.tasks.work.options(idempotency_key="k").submit(1)
    await site.all_is_well([held.id, again.id])
    assert await held.result() == "attempt 1"
    assert len(site.runs()) == 2
    assert worker.alive


# Read-only -------------------------------------------------------------------------------------------


async def test_read_only_and_writable_again(
    make_redis: MakeServer, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """It has become a replica of a master that cannot be reached, as after a fail-over; then the master again."""
    server = make_redis()
    site = make_site(server.url)
    worker = await site.started()
    gate = site.gate()
    held = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    for job in held:
        await site.is_running(job.id)
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        with pytest.raises(EngineUnavailable, match="read-only replica"):
            await site.tasks.work.submit(1)
        assert critical_lines(caplog)
        gate.touch()
        await worker.has_said("verdicts wait for the engine")
        # It can still be looked at.
        assert [await job.state() for job in held] == [State.RUNNING] * 2
        await redis.execute_command("REPLICAOF", "NO", "ONE")
    after = await site.tasks.work.submit(2)
    await site.all_is_well([after.id, *(job.id for job in held)])
    assert worker.alive


# Wiped -----------------------------------------------------------------------------------------------


async def test_wiped_under_a_running_worker(make_redis: MakeServer, make_site: MakeSite) -> None:
    """FLUSHALL loses every open job, also those that run: their verdicts are refused, and nobody can look them up.
    (A ledger would bring them back.) The worker makes its groups again, from the beginning, and runs what comes."""
    server = make_redis()
    site = make_site(server.url)
    worker = await site.started("--concurrency", "2")
    gate = site.gate()
    running = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    waiting = await site.tasks.work.submit(1)
    delayed = await site.tasks.work.options(delay=0.2).submit(2)
    for job in running:
        await site.is_running(job.id)
    async with Redis.from_url(server.url) as redis:
        await redis.flushall()
    # In line before the worker has noticed anything: groups at `$` would never see these.
    fresh = [await site.tasks.work.submit(number) for number in range(5)]
    gate.touch()

    await site.all_is_well(job.id for job in fresh)
    later = await site.tasks.work.options(delay=0.1).submit(9)
    retried = await site.tasks.flaky.submit()
    await site.all_is_well([later.id, retried.id])
    for lost in (*(job.id for job in running), waiting.id, delayed.id):
        with pytest.raises(UnknownJob):
            await site.app.job(lost).state()
        assert lost not in await site.final_events()
    assert worker.alive
    assert await site.app.engine.queues() == ["default"]


async def test_idle_workers_survive_a_wipe(make_redis: MakeServer, make_site: MakeSite) -> None:
    """They block on streams that are gone."""
    server = make_redis()
    site = make_site(server.url)
    async with working(site.app), Redis.from_url(server.url) as redis:
        for number in range(3):
            await redis.flushall()
            job = await site.tasks.work.submit(number)
            assert await job.result(60) == number
            await site.all_is_well([job.id])


async def test_scripts_forgotten_by_the_server_are_loaded_again(redis_site: Site) -> None:
    async with working(redis_site.app), Redis.from_url(redis_site.url) as redis:
        jobs = []
        for number in range(5):
            await redis.script_flush()
            jobs.append(await redis_site.tasks.work.submit(number))
            await jobs[-1].result(60)
        await redis_site.all_is_well(job.id for job in jobs)
    assert len(redis_site.runs()) == 5


# Refused ---------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_said_so_and_not_repeated(make_redis: MakeServer) -> None:
    server = make_redis()
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("requirepass", "right")
    for url in (server.url, f"redis://:wrong-secret@127.0.0.1:{server.port}/0"):
        app = Holdfast(url)
        with pytest.raises(EngineUnavailable, match="password") as refused:
            await app.open()
        assert "wrong-secret" not in str(refused.value)
        await app.close()
    async with Holdfast(f"redis://:right@127.0.0.1:{server.port}/0"):
        pass


async def test_no_room_for_another_connection(make_redis: MakeServer, make_site: MakeSite) -> None:
    server = make_redis(maxclients="1")
    site = make_site(server.url)
    async with Redis.from_url(server.url) as redis:
        await redis.ping()
        with pytest.raises(EngineUnavailable, match="maxclients"):
            await site.tasks.work.submit(1)
        await redis.config_set("maxclients", 50)
    async with working(site.app):
        job = await site.tasks.work.submit(1)
        await site.all_is_well([job.id])
