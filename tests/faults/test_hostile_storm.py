"""Mutated messages, feed entries, controls and records next to live workers and upkeep: honest jobs all finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from holdfast import State
from holdfast.client.job import Job
from holdfast.core.job import JobKey
from holdfast.execution.backend import backend_of
from holdfast.upkeep.upkeep import Upkeep
from tests.faults.conftest import MakeSite
from tests.faults.support import eventually
from tests.faults.test_wire import Wire
from tests.fuzz import corpus
from tests.fuzz.mutation import Fields, mutate
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

#: Fixed, so that a failure can be repeated; `tests/fuzz` uses new seeds.
SEED: Final = 20
ROUNDS: Final = 100
#: Not `paused`, `intake_paused` or `intake_limit`: valid values of these are obeyed. Nor `turns` of the claim script.
CONTROLS: Final = (b"limits", b"feed_read", b"tenants", b"backlog_alert", b"unknown")
OTHERS: Final = (*corpus.LONG, *corpus.FOREIGN, *corpus.CONTROL)


@pytest.fixture
async def wire(redis_url: str, make_site: MakeSite, tmp_path: Path) -> AsyncIterator[Wire]:
    redis = Redis.from_url(redis_url)
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    yield Wire(make_site(redis_url, unknown_task_grace_s=0, ledger=ledger), redis)
    await redis.aclose()


def _pairs(fields: Fields) -> dict[Any, Any]:
    flat = fields[: len(fields) // 2 * 2] or (b"", b"")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _mutant(value: bytes, random: Random) -> bytes:
    fields = mutate((value,), OTHERS, random)
    return fields[0] if fields else b""


async def _write_garbage(wire: Wire, random: Random, marker: bytes, number: int) -> None:
    """A mutant of each kind of message, entry, notice, control, lane, record, due time and worker."""
    redis, keys = wire.redis, wire.keys
    own = {b"j1": b"m%d" % number, b"k1": b"k%d" % number, corpus.MARKER: marker}
    for message in (corpus.SHORT, corpus.LONG, corpus.FOREIGN, corpus.UNVERIFIED):
        fields = tuple(own.get(part, part) for part in mutate(message, OTHERS, random))
        await redis.xadd(random.choice(keys.streams[:3]), _pairs(fields))
    await redis.xadd(keys.feed, _pairs(mutate(random.choice(corpus.FEED), OTHERS, random)))
    await redis.xadd(keys.notices, _pairs(mutate((b"due", b"1700000000000"), OTHERS, random)))
    await redis.hset(keys.control, random.choice(CONTROLS), _mutant(corpus.CONTROL[11], random))
    await redis.hset(keys.lanes, b"tenant-%d" % number, _mutant(b"3 1700000000000", random))
    await redis.set(keys.job(f"bad{number}"), _mutant(random.choice(corpus.RECORDS)[0], random))
    for key in (keys.delayed, keys.retry, keys.pending_retries):
        await redis.zadd(key, {f"bad{number}": random.choice((0, 1, 1e300)), random.randbytes(6): 0})
    await redis.zadd(keys.workers, {random.randbytes(4): random.choice(("inf", "-inf", "1"))})


async def test_honest_jobs_finish_between_mutants(wire: Wire) -> None:
    site, random = wire.site, Random(SEED)
    backend = backend_of(site.app)
    await site.app.open()
    upkeep = Upkeep(site.app.engine, [], site.app.settings, backend.ledger)
    marker, jobs = (await wire.read_marker()).encode(), list[Job[Any]]()
    async with working(site.app):
        running = asyncio.create_task(upkeep.run())
        for number in range(ROUNDS):
            await _write_garbage(wire, random, marker, number)
            if number % 5 == 0:
                jobs.append(await site.tasks.work.submit(number))
                jobs.append(await site.tasks.work.options(delay=0.01, tenant_id="acme").submit(number))
                jobs.append(await site.tasks.flaky.submit())
        for job in jobs:
            await job.result(60)
        assert backend.ledger is not None
        assert backend.ledger.projection is not None
        keys = [JobKey("default", "default", job.id) for job in jobs[::3]]
        recorded = await backend.ledger.projection.wait_recorded(keys, 30_000)
        assert recorded == set(keys), "the projector stopped"

        async def is_drained() -> bool:
            lengths: list[int] = [await wire.redis.xlen(stream) for stream in wire.keys.streams]
            return not any(lengths)

        await eventually(is_drained, "the mutated messages to end")
        upkeep.stop()
        await running
    assert [await job.state() for job in jobs] == [State.SUCCEEDED] * len(jobs)
