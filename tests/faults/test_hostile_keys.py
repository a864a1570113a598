"""Hostile JSON in messages, and hostile members and notices: a worker finishes its jobs.

`test_wire.py` has messages with garbage in single fields. Here each message is a dead letter at its first delivery.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

import pytest
from redis.asyncio import Redis

from holdfast.core.verdict import MESSAGE_MALFORMED
from tests.faults.conftest import MakeSite
from tests.faults.support import eventually
from tests.faults.test_wire import FOREIGN, LONG, Wire, with_marker
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]


def _nested(levels: int, member: bytes = b"0") -> bytes:
    return b'{"a":' + b"[" * levels + member + b"]" * levels + b"}"


#: JSON that no message may contain.
JSON: Final[dict[str, bytes]] = {
    "1,200 levels": _nested(1_200),
    "300 levels": _nested(300),
    "100,000 levels": _nested(100_000),
    "unbalanced": b'{"a":' + b"[" * 100_000,
    "5,000 digits": b'{"a":' + b"9" * 5_000 + b"}",
    "1e999": b'{"a":1e999}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "a lone surrogate": b'{"a":"\\ud800"}',
    "encoded surrogates": b'{"a":"\xed\xa0\x80"}',
    "a zero byte": b'{"a":\x00}',
    "not UTF-8": b'{"a":"\xff"}',
}
#: Members of sets and names in hashes.
NAMES: Final = [b"\xff\xfe", b"", b"a\x00b", b"x" * 100_000, b"\xed\xa0\x80", b"{a} b", b"9" * 5_000]
SCORES: Final = ["-inf", "0", "1e300", "inf"]
NUMBERS: Final = [b"\xff", b"", b"-1", b"nan", b"inf", b"1e308", b"0x10", b"9" * 5_000, b"1.5", b"x"]


@pytest.fixture
async def wire(redis_url: str, make_site: MakeSite) -> AsyncIterator[Wire]:
    redis = Redis.from_url(redis_url)
    # The lease outlasts every pause of a busy machine: no lease may be lost here.
    yield Wire(make_site(redis_url, unknown_task_grace_s=0, visibility_timeout_s=30), redis)
    await redis.aclose()


async def _write_messages(wire: Wire) -> int:
    """One message for each kind of JSON in each field that is JSON; returns how many."""
    count = 0
    native = with_marker(LONG, await wire.read_marker())
    for text in JSON.values():
        for template, field in ((FOREIGN, "context"), (FOREIGN, "payload"), (native, "meta")):
            value = b'{"context":' + text + b"}" if field == "meta" else text
            own = {"task_id": b"hostile-%d" % count, "idempotency_key": b"key-%d" % count}
            await wire.write(template | own | {field: value})
            count += 1
    return count


async def _write_sets(wire: Wire) -> None:
    for key in (wire.keys.delayed, wire.keys.retry, wire.keys.pending_retries):
        for score in SCORES:
            await wire.redis.zadd(key, {name + score.encode(): score for name in NAMES})
    await wire.redis.sadd(wire.site.app.settings.namespace + ":queues", *NAMES)


async def test_a_worker_finishes_its_jobs_between_hostile_messages(wire: Wire) -> None:
    """Each hostile message is a dead letter at its first delivery; no lease is lost."""
    before = await wire.site.tasks.work.submit(1)
    count = await _write_messages(wire)
    after = await wire.site.tasks.work.submit(2)
    async with working(wire.site.app):
        assert [await before.result(60), await after.result(60)] == [1, 2]
        await eventually(wire.is_empty, "the hostile messages to end")
        counters = wire.site.app.engine.counters
        assert (counters.malformed, counters.reclaimed) == (count, 0)
    dead_letters = await wire.dead_letters()
    assert len(dead_letters) == count
    assert {dead_letter["error_code"] for dead_letter in dead_letters} == {MESSAGE_MALFORMED}
    assert all(json.loads(dead_letter["payload"])["task_id"] for dead_letter in dead_letters)


async def test_hostile_members_and_notices_do_not_stop_a_worker(wire: Wire) -> None:
    """Due jobs are promoted and retries run; due members without a job are removed, unreadable notices counted."""
    site, engine = wire.site, wire.site.app.engine
    await _write_sets(wire)
    async with working(site.app):
        jobs = [await site.tasks.work.submit(1), await site.tasks.work.options(delay=0.01).submit(2)]
        flaky = await site.tasks.flaky.submit()
        for value in (*NUMBERS, *NAMES):
            await wire.redis.xadd(wire.keys.notices, {"due": value})
            await wire.redis.xadd(wire.keys.notices, {"cancelled": value})
        assert [await job.result(60) for job in jobs] == [1, 2]
        assert await flaky.result(60) == "now"

        async def is_clean() -> bool:
            sets = (wire.keys.delayed, wire.keys.retry, wire.keys.pending_retries)
            left: list[int] = [await wire.redis.zcount(key, "-inf", 10**14) for key in sets]
            return not any(left)

        await eventually(is_clean, "due members without a job to be removed")
        await eventually(lambda: engine.counters.unreadable, "unreadable notices to be counted")
        assert engine.counters.reclaimed == 0
    assert await engine.queues() == ["default"]
