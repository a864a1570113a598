"""Outages of the engine that the workers survive: jobs keep their leases, and losses do not count (requirement Q7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from redis.asyncio import Redis

from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakeServer
from tests.faults.conftest import MakeSite
from tests.faults.support import QUEUE, Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults]

JOBS: Final = 20
LEASE_S: Final = 0.6


async def kill_server(server: RedisServer, outage_s: float) -> None:
    server.kill()
    await asyncio.sleep(outage_s)
    await asyncio.to_thread(server.start)


async def stop_server(server: RedisServer, outage_s: float) -> None:
    server.pause()
    await asyncio.sleep(outage_s)
    server.resume()


async def cut_network(proxy: Proxy, outage_s: float) -> None:
    proxy.refuse = True
    await proxy.cut()
    await asyncio.sleep(outage_s)
    proxy.refuse = False


async def list_idle_ms(server: RedisServer, site: Site) -> list[int]:
    """How long ago each lease was granted or renewed."""
    names = KeyNames(namespace=site.settings["namespace"])
    stream = QueueKeys(QUEUE, names).streams[1]
    async with Redis.from_url(server.url) as redis:
        rows = await redis.xpending_range(stream, names.group, "-", "+", 100)
    return [int(row["time_since_delivered"]) for row in rows]


async def wait_renewed(server: RedisServer, site: Site) -> None:
    async def are_fresh() -> bool:
        idle_ms = await list_idle_ms(server, site)
        return len(idle_ms) == JOBS and max(idle_ms) < LEASE_S * 1000 / 2

    await eventually(are_fresh, "all leases to be renewed")


@asynccontextmanager
async def two_workers(site: Site, url: str) -> AsyncIterator[None]:
    """Two workers, each with room for the jobs of the other."""
    apps = [site.make_app(url)[0] for _ in range(2)]
    async with working(apps[0], concurrency=JOBS), working(apps[1], concurrency=JOBS):
        yield


@pytest.mark.redis
@pytest.mark.parametrize(
    ("fault", "outages", "leases"), [("kill", 7, 1.5), ("kill", 1, 0.5), ("stop", 3, 1.5), ("cut", 3, 1.5)]
)
async def test_an_outage_that_the_workers_survive_loses_no_job(
    make_redis: MakeServer, make_site: MakeSite, fault: str, outages: int, leases: float
) -> None:
    """Each job runs once, however often the engine is unreachable for all workers; seven losses make a poison pill."""
    server = make_redis(appendonly="yes", appendfsync="always")
    site = make_site(server.url, visibility_timeout_s=LEASE_S, heartbeat_interval_s=LEASE_S / 3)
    async with Proxy(server.port) as proxy, two_workers(site, proxy.url):
        jobs = [await site.tasks.hold.submit(str(site.gate())) for _ in range(JOBS)]
        await site.wait_runs([job.id for job in jobs], 1)
        for _ in range(outages):
            if fault == "kill":
                await kill_server(server, leases * LEASE_S)
            elif fault == "stop":
                await stop_server(server, leases * LEASE_S)
            else:
                await cut_network(proxy, leases * LEASE_S)
            await wait_renewed(server, site)
        site.gate().touch()
        await site.assert_all_ended([job.id for job in jobs])
        assert {await job.result() for job in jobs} == {"attempt 1"}
    assert len(site.runs()) == JOBS


@pytest.mark.redis
async def test_a_partition_of_one_worker_is_not_an_outage(redis_url: str, make_site: MakeSite) -> None:
    """Its job is reclaimed by a worker that reaches the engine, and counts as lost."""
    site = make_site(redis_url, visibility_timeout_s=LEASE_S, heartbeat_interval_s=LEASE_S / 3)
    port = int(redis_url.rsplit(":", 1)[1].partition("/")[0])
    async with Proxy(port) as proxy:
        cut_off, healthy = site.make_app(proxy.url)[0], site.make_app()[0]
        async with working(cut_off):
            job = await site.tasks.hold.submit(str(site.gate()))
            await site.wait_running(job.id)
            async with working(healthy) as worker:
                proxy.refuse = True
                await proxy.cut()
                await site.wait_runs([job.id], 2)
                proxy.refuse = False
                await eventually(lambda: cut_off.engine.counters.leases_lost == 1, "the loss to be noticed")
                names = KeyNames(namespace=site.settings["namespace"])
                async with Redis.from_url(redis_url) as redis:
                    assert await redis.hget(QueueKeys(QUEUE, names).control, "outage") is None
                site.gate().touch()
                await site.assert_all_ended([job.id])
                assert await job.result() == "attempt 2"
                assert worker.ready
