"""Stable identities of workers in a Redis that other programs write to."""

from __future__ import annotations

import pytest

from holdfast.engine.port.worker_ids import WorkerIdStatus, WorkerStart
from holdfast.testing.contract.harness import OTHER_QUEUE, QUEUE, Rig
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

UNREADABLE = [
    b"",
    b"5",
    b"5 6",
    b"x y z",
    b"-5 1 w9",
    b"1e9 1 w9",
    b"9" * 16 + b" 1 w9",
    b"9" * 400 + b" 1 w9",
    b"\xff\x00",
]


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


async def test_an_owner_that_cannot_be_read_is_overwritten(redis_harness: RedisHarness, rig: Rig) -> None:
    key = redis_harness.keys(QUEUE).worker_ids
    for worker, value in enumerate(UNREADABLE):
        await redis_harness.redis.hset(key, mapping={b"web-0": value, b"\xffother": value})
        start = WorkerStart("web-0", f"w{worker}", await rig.engine.next_generation("web-0", [QUEUE]))
        assert await rig.engine.keep_worker_id(start, [QUEUE]) == WorkerIdStatus()
        # What is old or cannot be read is deleted at the next start.
        assert await redis_harness.redis.hkeys(key) == [b"web-0"]
    assert await redis_harness.redis.pttl(key) > 0


async def test_names_of_other_programs_are_only_text(redis_harness: RedisHarness, rig: Rig) -> None:
    keys = redis_harness.keys(QUEUE)
    await redis_harness.redis.hset(keys.worker_ids, "web-0", b"5 6 \xff\n w9")
    start = WorkerStart("web-0", "w1", await rig.engine.next_generation("web-0", [QUEUE]))
    assert await rig.engine.keep_worker_id(start, [QUEUE]) == WorkerIdStatus(("\ufffd\n w9",))
    now_ms = await rig.engine.now_ms()
    strange = [b"", b"web-0", b"web-0 ", b"\xff w1", b"9" * 400 + b" w1", b"web-0 " + b"x" * 2_000, b"web-0 \xff\n"]
    await redis_harness.redis.zadd(keys.replaced_workers, dict.fromkeys(strange, now_ms) | {b"web-0 w2": float("inf")})
    assert not any(each.check.startswith("worker id") for each in await rig.engine.diagnose([QUEUE]))


async def test_a_key_of_another_type_is_left_alone(redis_harness: RedisHarness, rig: Rig) -> None:
    """The worker keeps its id in its other queues; without any readable one it runs as if it were alone."""
    keys = redis_harness.keys(QUEUE)
    for key in (keys.worker_ids, keys.replaced_workers):
        await redis_harness.redis.rpush(key, "theirs")
    first = WorkerStart("web-0", "w1", await rig.engine.next_generation("web-0", [QUEUE]))
    assert await rig.engine.keep_worker_id(first, [QUEUE, OTHER_QUEUE]) == WorkerIdStatus()
    second = WorkerStart("web-0", "w2", await rig.engine.next_generation("web-0", [QUEUE, OTHER_QUEUE]))
    assert await rig.engine.keep_worker_id(second, [QUEUE, OTHER_QUEUE]) == WorkerIdStatus(("w1",))
    assert await rig.engine.keep_worker_id(first, [QUEUE, OTHER_QUEUE]) == WorkerIdStatus(successor="w2")
    assert rig.engine.counters.unreadable_values > 0
    assert await rig.engine.diagnose([QUEUE])
    assert await redis_harness.redis.lrange(keys.worker_ids, 0, -1) == [b"theirs"]
