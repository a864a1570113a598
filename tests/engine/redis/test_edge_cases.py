"""Edge cases of the Redis engine in which a step could lose, strand or leak something."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.history import check_history
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, RetryLater, Settlement, SettleResult, Succeed
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.errors import EngineRefused, EngineUnavailable, InvalidOption
from holdfast.testing.contract.harness import FAILURE, QUEUE, Rig, ids
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

PENDING = {"retry_via": {QUEUE: RetryVia.PENDING}}


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


async def test_a_key_of_another_type_loses_no_job(redis_harness: RedisHarness, rig: Rig) -> None:
    """A foreign list under the name of the DLQ stream is refused before the first write."""
    dlq = redis_harness.keys(QUEUE).dlq
    await redis_harness.redis.rpush(dlq, "theirs")
    await rig.submit(2)
    bad, good = await rig.claim()
    verdicts = [Settlement(bad, DeadLetter(FAILURE), 1), Settlement(good, Succeed(b"1"), 1)]
    with pytest.raises(EngineRefused, match="WRONGTYPE"):
        await rig.engine.settle(verdicts)
    assert [await rig.state(claim.job_id) for claim in (bad, good)] == [State.RUNNING] * 2
    assert await rig.engine.settle(verdicts[1:]) == [SettleResult.APPLIED]
    with pytest.raises(EngineRefused, match="WRONGTYPE"):
        await rig.move(bad.job_id, State.DLQ_PENDING)
    await redis_harness.redis.delete(dlq)
    assert await rig.engine.settle(verdicts[:1]) == [SettleResult.APPLIED]
    check_history(await rig.events(), ended=True)


async def test_a_foreign_entry_does_not_stop_the_feed(redis_harness: RedisHarness, rig: Rig) -> None:
    first = await rig.submit_one()
    await redis_harness.redis.xadd(redis_harness.keys(rig.queue).feed, {"hello": "world"})
    second = await rig.submit_one()
    assert [event.job_id for event in await rig.events()] == [first, second]
    assert (await rig.engine.snapshot(rig.queue, [])).position == (await rig.entries())[-1].position


def test_times_to_live_are_at_least_a_millisecond() -> None:
    with pytest.raises(InvalidOption, match="finished_ttl_ms"):
        EngineOptions(finished_ttl_ms=0)


async def test_retries_parked_before_a_change_of_settings_run(redis_harness: RedisHarness) -> None:
    before = await Rig.on(redis_harness, **PENDING)
    claim = await before.start_one()
    await before.settle(claim, RetryLater(1_000, FAILURE))
    after = await Rig.on(redis_harness)
    await redis_harness.advance(1_001)
    (retried,) = await after.engine.reclaim("w2", [QUEUE], 10)
    assert (retried.job_id, retried.attempt, retried.meta.retry_count) == (claim.job_id, 2, 1)
    assert await after.succeed(retried) == [SettleResult.APPLIED]
    check_history(await after.events(), ended=True)


async def test_a_parked_retry_whose_message_was_deleted_runs_from_its_record(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, **PENDING)
    claim = await rig.start_one()
    await rig.settle(claim, RetryLater(1_000, FAILURE))
    for stream in redis_harness.keys(QUEUE).streams:
        await redis_harness.redis.xtrim(stream, maxlen=0, approximate=False)
    assert await rig.state(claim.job_id) is State.RETRYING
    await redis_harness.advance(1_001)
    assert await rig.engine.reclaim("w2", [QUEUE], 10) == []
    (retried,) = await rig.claim("w2")
    assert (retried.job_id, retried.payload, retried.attempt) == (claim.job_id, claim.payload, 2)
    assert await rig.succeed(retried) == [SettleResult.APPLIED]
    assert await rig.open_jobs() == 0


async def test_waiting_retries_do_not_hide_a_lost_lease(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, **PENDING)
    await rig.submit(100)
    for claim in await rig.claim("w1", 100):
        await rig.settle(claim, RetryLater(3_600_000, FAILURE))
    lost = await rig.start_one("w1")
    await rig.lose_leases()
    assert ids(await rig.engine.reclaim("w2", [QUEUE], 1)) == [lost.job_id]


async def test_explicit_entry_ids_settle_besides_generated_ones(redis_harness: RedisHarness, rig: Rig) -> None:
    fields = {"task_id": "theirs", "type": "print", "payload": "{}"}
    await redis_harness.redis.xadd(redis_harness.keys(QUEUE).streams[1], fields, id="5-1")
    await rig.submit_one()
    claims = await rig.claim()
    assert len(claims) == 2
    assert await rig.succeed(*claims) == [SettleResult.APPLIED] * 2


async def test_waiters_are_removed_when_their_job_ends(redis_harness: RedisHarness, rig: Rig) -> None:
    for _ in range(50):
        claim = await rig.start_one()
        info, _ = await asyncio.gather(rig.engine.wait_final(QUEUE, claim.job_id, 10_000), rig.succeed(claim))
        assert info is not None
        assert info.state is State.SUCCEEDED
    assert await redis_harness.redis.hlen(redis_harness.keys(QUEUE).waiters) == 0


async def test_a_damaged_queue_is_reported_and_does_not_affect_the_others(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    await rig.submit_one()
    await redis_harness.redis.set(redis_harness.keys("damaged").control, "a string")
    reachable, unreachable = await rig.engine.for_each_queue(["damaged", QUEUE], rig.engine.stats)
    assert (list(reachable), list(unreachable)) == ([QUEUE], ["damaged"])
    with pytest.raises(EngineRefused, match="WRONGTYPE"):
        await rig.engine.for_each_queue(["damaged"], rig.engine.stats)


async def test_a_stream_without_ids_left_refuses_submissions_until_it_is_deleted(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    """XADD accepts any id from a program that may append; jobs that were accepted before still run."""
    stream = redis_harness.keys(QUEUE).streams[1]
    await rig.submit_one(job_id="j1")
    await redis_harness.redis.xadd(stream, {"a": "b"}, f"{2**64 - 1}-{2**64 - 1}")
    with pytest.raises(EngineUnavailable, match="delete the stream when it is empty"):
        await rig.submit_one(job_id="j2")
    assert await rig.succeed(await rig.claim_one()) == [SettleResult.APPLIED]
    assert await rig.claim() == []
    assert await redis_harness.redis.xlen(stream) == 0
    await redis_harness.redis.delete(stream)
    await rig.submit_one(job_id="j2")
    assert ids(await rig.claim()) == ["j2"]
    check_history(await rig.events("j1"), ended=True)
