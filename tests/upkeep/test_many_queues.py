"""Upkeep of many queues on Redis: idle ones cost little, others are served in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from holdfast.core.job import Claim, Envelope, new_job_ids
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames
from holdfast.engine.redis.net.client import Purpose
from holdfast.upkeep.engine_tasks import Promoter
from holdfast.upkeep.loop import QueueSelection, next_part
from tests.conftest import MakeServer

QUEUES = [f"q{number:03}" for number in range(100)]
LEASE_MS = 1_500


@pytest.fixture
async def engine(make_redis: MakeServer) -> AsyncIterator[RedisEngine]:
    """Hundred queues with a job each that is ready."""
    engine = RedisEngine(make_redis().url, KeyNames(), EngineOptions(visibility_timeout_ms=LEASE_MS))
    await engine.open()
    await engine.submit([_job(queue) for queue in QUEUES])
    yield engine
    await engine.close()


def _job(queue: str, delay_ms: int = 0) -> Envelope:
    return Envelope(job_id=new_job_ids(1)[0], task="x", payload=b"{}", queue=queue, delay_ms=delay_ms)


async def _commands(engine: RedisEngine) -> int:
    info = await engine._store.client.call(Purpose.OTHER, b"INFO", b"stats")
    return int(info.decode().partition("total_commands_processed:")[2].split()[0])


@pytest.mark.redis
async def test_idle_queues_are_not_read_in_every_pass(engine: RedisEngine) -> None:
    async def one_pass() -> int:
        before = await _commands(engine)
        await engine.promote(QUEUES, 500)
        await engine.reclaim("w", QUEUES, 100)
        return await _commands(engine) - before

    assert await one_pass() >= 3 * len(QUEUES)
    assert await one_pass() < 10


@pytest.mark.redis
async def test_expired_leases_are_reclaimed_in_time(engine: RedisEngine) -> None:
    assert await engine.reclaim("upkeep", QUEUES, 100) == []
    claims = await engine.claim("lost", [QUEUES[7]], 1, 0)
    began = time.monotonic()
    found: list[Claim] = []
    while not found:
        assert time.monotonic() - began < 30
        await asyncio.sleep(0.1)
        found = await engine.reclaim("upkeep", QUEUES, 100)
    assert [claim.job_id for claim in found] == [claim.job_id for claim in claims]
    assert time.monotonic() - began < LEASE_MS / 1_000 + 2


@pytest.mark.redis
async def test_jobs_are_promoted_when_they_are_due(engine: RedisEngine) -> None:
    """After a notice at the time; a due time that was read before needs none."""
    promoter = Promoter(engine, QueueSelection(engine, QUEUES))
    await engine.promote(QUEUES, 500)
    running = asyncio.create_task(promoter.run())
    began = time.monotonic()
    await engine.submit([_job(QUEUES[9], delay_ms=1_000)])
    promoter.due(QUEUES[9], await engine.now_ms() + 1_000)
    while (await engine.stats(QUEUES[9])).delayed:
        assert time.monotonic() - began < 30
        await asyncio.sleep(0.05)
    assert time.monotonic() - began < 5
    running.cancel()


def test_the_parts_of_many_queues_cover_all() -> None:
    names = [f"q{number}" for number in range(7)]
    seen: list[str] = []
    last = ""
    for _ in range(4):
        part = next_part(names, last, 2)
        assert len(part) == 2
        seen += part
        last = part[-1]
    assert set(seen) == set(names)
    assert next_part(names, "q3", 9) == names
    assert next_part([], "", 3) == []
