"""After an interruption, a process does not reclaim before surviving workers could renew their leases."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from holdfast.core.job import Claim
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract.harness import Rig
from holdfast.verification.chaos.proxy import Proxy
from tests.conftest import MakeServer
from tests.faults.support import eventually

LEASE_MS: Final = 100
SETTLE_S: Final = 0.4
OPTIONS: Final = EngineOptions(visibility_timeout_ms=LEASE_MS, settle_ms=round(SETTLE_S * 1000))
#: Longer than the lease, and than a reply may be late.
OUTAGE_S: Final = 0.5


class Reclaimer:
    """A process that reclaims from a queue in which a worker has a lease."""

    def __init__(self, engine: RedisEngine | SqliteEngine) -> None:
        self.engine = engine
        self.rig = Rig(None, engine)  # type: ignore[arg-type]

    async def start(self) -> Claim:
        """Reclaim until the wait at the start has ended, then grant a lease."""
        earlier = await self.rig.start_one("w0")
        await self.wait_reclaimed(earlier)
        return await self.rig.start_one("w1")

    async def wait_reclaimed(self, claim: Claim) -> None:
        async def is_reclaimed() -> bool:
            return claim.job_id in {each.job_id for each in await self.rig.reclaim("w2")}

        await eventually(is_reclaimed, "the lease to be reclaimed")

    async def first_reclaim(self) -> list[Claim]:
        """The result of the first reclaim that the engine answers."""
        while True:
            try:
                return [claim for claim in await self.rig.reclaim("w3") if claim.attempt == 2]
            except EngineUnavailable:
                await asyncio.sleep(0.02)


async def check(reclaimer: Reclaimer, held: Claim) -> None:
    """The first pass reclaims nothing, and the worker can renew; what is not renewed is reclaimed after the wait."""
    began = asyncio.get_running_loop().time()
    assert await reclaimer.first_reclaim() == []
    assert await reclaimer.engine.renew([held.lease]) == []
    await reclaimer.wait_reclaimed(held)
    assert asyncio.get_running_loop().time() - began >= SETTLE_S


@pytest.mark.redis
@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
async def test_redis_was_interrupted(make_redis: MakeServer, namespace: str, fault: str) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    async with Proxy(server.port) as proxy:
        engine = RedisEngine(proxy.url, options=OPTIONS)
        await engine.open()
        try:
            reclaimer = Reclaimer(engine)
            held = await reclaimer.start()
            if fault == "kill":
                server.kill()
                await asyncio.to_thread(server.start)
            elif fault == "cut":
                await proxy.cut()
            else:
                server.pause()
                claiming = asyncio.create_task(engine.claim("w3", [reclaimer.rig.queue], 1, 0))
                await asyncio.sleep(OUTAGE_S)
                server.resume()
                await claiming
            await asyncio.sleep(2 * LEASE_MS / 1000)
            await check(reclaimer, held)
        finally:
            await engine.close()


async def test_a_file_was_locked(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.db"
    engine = SqliteEngine(path, OPTIONS)
    await engine.open()
    try:
        reclaimer = Reclaimer(engine)
        held = await reclaimer.start()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(2 * LEASE_MS / 1000)
            checking = asyncio.create_task(check(reclaimer, held))
            await asyncio.sleep(OUTAGE_S)
        await checking
    finally:
        await engine.close()
