"""A Redis that is down, restarted, paused, read-only or wiped. Each test has a separate server."""

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

#: A refused connection is detected at once, much sooner than these timeouts.
LONG: Final[dict[str, Any]] = {"connect_timeout_s": 60.0, "reply_timeout_s": 60.0}
AT_ONCE_S: Final = 20.0


def critical_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.CRITICAL]


# Down ------------------------------------------------------------------------------------------------


async def test_a_first_submit_while_redis_is_down(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(f"redis://127.0.0.1:{free_port()}/0", **LONG)
    started_at = time.monotonic()
    with pytest.raises(EngineUnavailable, match="cannot reach"):
        await site.tasks.work.submit(1)
    with pytest.raises(EngineUnavailable):
        await site.tasks.work.submit_many([(1,), (2,)])
    assert time.monotonic() - started_at < AT_ONCE_S
    assert len(critical_messages(caplog)) == 2


async def test_a_later_submit_while_redis_is_down(
    make_redis: MakeServer, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """Accepted jobs are not lost; the same app continues after the restart."""
    server = make_redis(appendonly="yes", appendfsync="always")
    site = make_site(server.url, **LONG)
    before = await site.tasks.work.submit(1)
    server.kill()
    started_at = time.monotonic()
    refused = await asyncio.gather(*(site.tasks.work.submit(n) for n in range(20)), return_exceptions=True)
    assert time.monotonic() - started_at < AT_ONCE_S
    assert all(isinstance(error, EngineUnavailable) for error in refused)
    assert critical_messages(caplog)
    server.start()
    after = await site.tasks.work.submit(2)
    async with working(site.app):
        await site.assert_all_ended([before.id, after.id])
    assert len(site.runs()) == 2


async def test_a_blocking_submit_also_fails_at_once(make_site: MakeSite) -> None:
    site = make_site(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(EngineUnavailable):
        await asyncio.to_thread(site.tasks.work.submit_sync, 1)


async def test_a_worker_that_starts_before_its_redis(make_redis: MakeServer, make_site: MakeSite) -> None:
    """A worker in a program waits for the engine; `holdfast worker` ends with an exit code."""
    server = make_redis()
    site = make_site(server.url)
    job = await site.tasks.work.submit(1)
    await site.app.close()
    server.kill()
    process = site.start()
    assert await process.wait_ended() == 3
    assert process.has_logged("ENGINE_UNAVAILABLE")
    assert not process.has_logged("Traceback")

    worker = Worker(site.app)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker._engine is None and not worker.ready, "the first attempt of the worker")
    server.start()
    await eventually(lambda: worker.ready, "the worker to be ready")
    # This server has no persistence: the job is lost, and reading it raises UnknownJob.
    with pytest.raises(UnknownJob):
        await job.result(60)
    repeated = await site.tasks.work.submit(2)
    assert await repeated.result(60) == 2
    worker.drain()
    await running


# Restarted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kill", "stop"])
async def test_a_restart_while_jobs_run(make_redis: MakeServer, make_site: MakeSite, method: str) -> None:
    """With an append-only file no accepted job is lost; the worker process survives."""
    server = make_redis(appendonly="yes", appendfsync="always")
    site = make_site(server.url)
    worker = await site.start_worker("--concurrency", "20")
    gate = site.gate()
    blocked = [await site.tasks.hold.submit(str(gate)) for _ in range(3)]
    jobs = [job.id for job in await site.tasks.nap.submit_many((number, 0.02) for number in range(200))]
    jobs += [(await site.tasks.flaky.submit()).id for _ in range(10)]
    jobs += [(await site.tasks.work.options(delay=0.5).submit(number)).id for number in range(10)]
    await eventually(lambda: len(site.runs()) >= 60, "a part to have run")
    getattr(server, method)()
    await worker.wait_for_log("cannot reach the engine")
    server.start()
    gate.touch()

    await site.assert_all_ended([*jobs, *(job.id for job in blocked)])
    assert set((await site.final_events()).values()) == {1}
    assert worker.alive
    worker.terminate()
    assert await worker.wait_ended() == 0
    assert (await site.app.engine.stats("default")).workers == 0


# Paused ----------------------------------------------------------------------------------------------


async def test_a_pause_longer_than_the_reply_timeout(make_redis: MakeServer, make_site: MakeSite) -> None:
    """SIGSTOP: it accepts connections and does not reply. Leases that outlast the pause are kept."""
    server = make_redis()
    site = make_site(server.url, reply_timeout_s=0.5, visibility_timeout_s=20, heartbeat_interval_s=0.2)
    worker = await site.start_worker()
    gate = site.gate()
    blocked = await site.tasks.hold.submit(str(gate))
    await site.wait_running(blocked.id)
    server.pause()
    with pytest.raises(EngineUnavailable, match="no reply"):
        await site.tasks.work.options(idempotency_key="k").submit(1)
    gate.touch()
    await worker.wait_for_log("verdicts wait for the engine")
    server.resume()

    # It is not known whether the first submission arrived; the key makes it one job.
    repeated = await site.tasks.work.options(idempotency_key="k").submit(1)
    await site.assert_all_ended([blocked.id, repeated.id])
    assert await blocked.result() == "attempt 1"
    assert len(site.runs()) == 2
    assert worker.alive


# Read-only -------------------------------------------------------------------------------------------


async def test_a_read_only_server_that_becomes_writable_again(
    make_redis: MakeServer, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """It becomes a replica of an unreachable master, as after a fail-over; then a master again."""
    server = make_redis()
    site = make_site(server.url)
    worker = await site.start_worker()
    gate = site.gate()
    blocked = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    for job in blocked:
        await site.wait_running(job.id)
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        with pytest.raises(EngineUnavailable, match="read-only replica"):
            await site.tasks.work.submit(1)
        assert critical_messages(caplog)
        gate.touch()
        await worker.wait_for_log("verdicts wait for the engine")
        # Reads still work.
        assert [await job.state() for job in blocked] == [State.RUNNING] * 2
        await redis.execute_command("REPLICAOF", "NO", "ONE")
    after = await site.tasks.work.submit(2)
    await site.assert_all_ended([after.id, *(job.id for job in blocked)])
    assert worker.alive


# Wiped -----------------------------------------------------------------------------------------------


async def test_a_wipe_while_jobs_run(make_redis: MakeServer, make_site: MakeSite) -> None:
    """FLUSHALL loses every open job, including running ones: their verdicts are refused, and they are unknown.
    (A ledger would restore them.) The worker creates its groups again, from the beginning, and runs new jobs."""
    server = make_redis()
    site = make_site(server.url)
    worker = await site.start_worker("--concurrency", "2")
    gate = site.gate()
    running = [await site.tasks.hold.submit(str(gate)) for _ in range(2)]
    waiting = await site.tasks.work.submit(1)
    delayed = await site.tasks.work.options(delay=0.2).submit(2)
    for job in running:
        await site.wait_running(job.id)
    async with Redis.from_url(server.url) as redis:
        await redis.flushall()
    # Submitted before the worker has noticed the wipe: groups at `$` would skip these.
    fresh = [await site.tasks.work.submit(number) for number in range(5)]
    gate.touch()

    await site.assert_all_ended(job.id for job in fresh)
    later = await site.tasks.work.options(delay=0.1).submit(9)
    retried = await site.tasks.flaky.submit()
    await site.assert_all_ended([later.id, retried.id])
    for lost in (*(job.id for job in running), waiting.id, delayed.id):
        with pytest.raises(UnknownJob):
            await site.app.job(lost).state()
        assert lost not in await site.final_events()
    assert worker.alive
    assert await site.app.engine.queues() == ["default"]


async def test_idle_workers_survive_a_wipe(make_redis: MakeServer, make_site: MakeSite) -> None:
    """They block on streams that do not exist any more."""
    server = make_redis()
    site = make_site(server.url)
    async with working(site.app), Redis.from_url(server.url) as redis:
        for number in range(3):
            await redis.flushall()
            job = await site.tasks.work.submit(number)
            assert await job.result(60) == number
            await site.assert_all_ended([job.id])


async def test_flushed_scripts_are_loaded_again(redis_site: Site) -> None:
    async with working(redis_site.app), Redis.from_url(redis_site.url) as redis:
        jobs = []
        for number in range(5):
            await redis.script_flush()
            jobs.append(await redis_site.tasks.work.submit(number))
            await jobs[-1].result(60)
        await redis_site.assert_all_ended(job.id for job in jobs)
    assert len(redis_site.runs()) == 5


# Refused ---------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_reported_and_not_shown(make_redis: MakeServer) -> None:
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


async def test_too_many_connections(make_redis: MakeServer, make_site: MakeSite) -> None:
    server = make_redis(maxclients="1")
    site = make_site(server.url)
    async with Redis.from_url(server.url) as redis:
        await redis.ping()
        with pytest.raises(EngineUnavailable, match="maxclients"):
            await site.tasks.work.submit(1)
        await redis.config_set("maxclients", 50)
    async with working(site.app):
        job = await site.tasks.work.submit(1)
        await site.assert_all_ended([job.id])
