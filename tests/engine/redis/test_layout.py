"""What any Redis client sees: names, backlog, results, dead letters; and that nothing accumulates (Q1, Q2, Q9, Q13)."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from holdfast.core.job import Priority
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, RetryLater, SettleResult, Suspend, Verdict
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames
from holdfast.testing.contract.harness import FAILURE, QUEUE, SOON_S, Rig, ids
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis


@pytest.fixture
async def rig(redis_harness: RedisHarness) -> Rig:
    return await Rig.on(redis_harness)


async def test_every_name_can_be_set(redis_harness: RedisHarness, namespace: str) -> None:
    names = KeyNames(
        namespace=namespace,
        stream_task="queue:tasks",
        stream_result="out",
        stream_dlq="dead",
        group="ingest-workers",
        queue_retry="later",
        queue_suspended="parked",
        cluster=redis_harness.names.cluster,
    )
    engine = RedisEngine(redis_harness.url, names, EngineOptions())
    await engine.open()
    redis, rig = redis_harness.redis, Rig(redis_harness, engine, "default")
    key = partial(names.configured, "default")
    try:
        claims = [await rig.start_one() for _ in range(4)]
        (group,) = [g for g in await redis.xinfo_groups(key("queue:tasks")) if g["name"] == b"ingest-workers"]
        assert group["pending"] == 4
        verdicts: list[Verdict] = [DeadLetter(FAILURE), RetryLater(60_000, FAILURE), Suspend(FAILURE)]
        for claim, verdict in zip(claims, verdicts, strict=False):
            await rig.settle(claim, verdict)
        assert await redis.xlen(key("queue:tasks")) == 1
        assert await redis.xlen(key("out")) == await redis.xlen(key("dead")) == 1
        assert await redis.zcard(key("later")) == await redis.zcard(key("parked")) == 1
    finally:
        await engine.close()


async def test_an_empty_dlq_name_disables_the_stream_and_keeps_the_state(
    redis_harness: RedisHarness, namespace: str
) -> None:
    engine = RedisEngine(redis_harness.url, KeyNames(namespace=namespace, stream_dlq=""), EngineOptions())
    await engine.open()
    rig = Rig(redis_harness, engine)
    try:
        claim = await rig.start_one()
        await rig.settle(claim, DeadLetter(FAILURE))
        assert await rig.state(claim.job_id) is State.FAILED
        assert (await rig.event_types(claim.job_id))[-3:] == ["task.dlq_pending", "task.dlq", "task.failed"]
        assert await redis_harness.redis.exists(redis_harness.keys(QUEUE).dlq) == 0
    finally:
        await engine.close()


async def test_all_keys_of_a_queue_share_a_hash_tag(redis_harness: RedisHarness, rig: Rig, namespace: str) -> None:
    await rig.start_one()
    await rig.submit(idempotency_key="k")
    await rig.submit(delay_ms=1_000)
    found = [key.decode() async for key in redis_harness.redis.scan_iter(match=f"*{namespace}*")]
    assert found
    untagged = [key for key in found if not key.startswith(f"{{{namespace}:{QUEUE}}}:")]
    assert sorted(untagged) == [f"{namespace}:queues", f"{{{namespace}:queues}}:owners"]


async def test_the_length_of_a_stream_is_its_backlog(redis_harness: RedisHarness, rig: Rig) -> None:
    redis, stream = redis_harness.redis, redis_harness.keys(QUEUE).streams[Priority.NORMAL]
    await rig.submit(10)
    assert await redis.xlen(stream) == 10
    claims = await rig.claim(limit=6)
    # Acknowledged only once the outcome is recorded.
    assert await redis.xlen(stream) == 10
    assert (await redis.xpending(stream, redis_harness.names.group))["pending"] == 6
    await rig.succeed(*claims)
    assert await redis.xlen(stream) == 4
    assert (await redis.xpending(stream, redis_harness.names.group))["pending"] == 0


async def test_a_message_is_readable_by_other_programs(redis_harness: RedisHarness, rig: Rig) -> None:
    envelope = rig.envelope(tenant_id="acme", trace_id="t-1", idempotency_key="k", payload=b'{"n":1}')
    await rig.engine.submit([envelope])
    ((_, fields),) = await redis_harness.redis.xrange(redis_harness.keys(QUEUE).lane(1)[Priority.NORMAL])
    marker = await redis_harness.redis.hget(redis_harness.keys(QUEUE).control, "marker")
    assert list(fields) == [
        marker, b"task_id", b"type", b"payload", b"tenant_id", b"idempotency_key", b"trace_id", b"meta",
    ]  # fmt: skip
    assert fields[marker].startswith(b"1 queued 0 0 ")
    assert fields[b"task_id"] == envelope.job_id.encode()
    assert (fields[b"type"], fields[b"payload"], fields[b"tenant_id"]) == (b"print", b'{"n":1}', b"acme")
    assert (fields[b"idempotency_key"], fields[b"trace_id"]) == (b"k", b"t-1")


async def test_one_plain_result_per_finished_job(redis_harness: RedisHarness, rig: Rig) -> None:
    good, bad, cancelled, retrying = [await rig.start_one() for _ in range(4)]
    await rig.succeed(good)
    await rig.settle(bad, DeadLetter(FAILURE))
    await rig.move(cancelled.job_id, State.CANCELLED, reason="typo")
    await rig.settle(retrying, RetryLater(60_000, FAILURE))
    await rig.succeed(good)
    entries = await redis_harness.redis.xrange(redis_harness.keys(QUEUE).result)
    results = {fields[b"task_id"].decode(): fields for _, fields in entries}
    assert len(entries) == len(results) == 3
    assert (results[good.job_id][b"status"], results[good.job_id][b"result"]) == (b"succeeded", b"7")
    assert (results[bad.job_id][b"status"], results[cancelled.job_id][b"status"]) == (b"failed", b"cancelled")
    assert json.loads(results[bad.job_id][b"error"])["message"] == FAILURE.message
    assert all(int(fields[b"finished_at"]) > 0 and int(fields[b"retry_count"]) == 0 for fields in results.values())


async def test_results_are_kept_by_count(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, result_limit=50)
    await rig.submit(500)
    await rig.succeed(*await rig.claim(limit=500))
    # Redis drops entries a node at a time.
    assert 50 <= await redis_harness.redis.xlen(redis_harness.keys(QUEUE).result) <= 200


async def test_results_are_kept_by_age(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, result_ttl_ms=60_000)
    result = redis_harness.keys(QUEUE).result
    await redis_harness.redis.xadd(result, {"task_id": "old"}, id="1000-0")
    claim = await rig.start_one()
    await rig.succeed(claim)
    assert await rig.engine.prune([QUEUE]) >= 1
    assert [fields[b"task_id"] for _, fields in await redis_harness.redis.xrange(result)] == [claim.job_id.encode()]


@pytest.mark.parametrize("ledger", [True, False])
async def test_dlq_entries_are_pruned_by_age_only_with_a_ledger(redis_harness: RedisHarness, ledger: bool) -> None:
    rig = await Rig.on(redis_harness, dlq_ttl_ms=60_000, ledger=ledger)
    dlq = redis_harness.keys(QUEUE).dlq
    await redis_harness.redis.xadd(dlq, {"task_id": "old"}, id="1000-0")
    await redis_harness.redis.xadd(dlq, {"task_id": "new"})
    await rig.engine.prune([QUEUE])
    kept = [fields[b"task_id"] for _, fields in await redis_harness.redis.xrange(dlq)]
    assert kept == ([b"new"] if ledger else [b"old", b"new"])


async def test_the_feed_is_pruned_by_age_only_without_a_reader(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness, finished_ttl_ms=60_000)
    feed = redis_harness.keys(QUEUE).feed
    old = {"kind": "created_plain", "at": "1000", "worker": "", "nonce": "n", "moves": b"\x90", "skipped": ""}
    await redis_harness.redis.xadd(feed, old, id="1000-0")
    job_id = await rig.submit_one()
    assert await rig.engine.prune([QUEUE]) >= 1
    assert [event.job_id for event in await rig.events()] == [job_id]

    await redis_harness.redis.delete(feed)
    await redis_harness.redis.xadd(feed, old, id="1000-0")
    await rig.engine.attach_reader(QUEUE)
    await rig.engine.prune([QUEUE])
    assert await redis_harness.redis.xlen(feed) == 1


async def test_a_dead_letter_has_all_fields(redis_harness: RedisHarness, rig: Rig) -> None:
    claim = await rig.start_one("w1", payload=b'{"n":4}', tenant_id="acme", trace_id="t-1")
    await rig.settle(claim, RetryLater(0, FAILURE))
    await redis_harness.advance(1)
    (claim,) = await rig.claim_due("w2")
    await rig.settle(claim, DeadLetter(FAILURE))
    ((_, fields),) = await redis_harness.redis.xrange(redis_harness.keys(QUEUE).dlq)
    dead_letter = {name.decode(): value.decode() for name, value in fields.items()}
    assert (dead_letter["task_id"], dead_letter["type"], dead_letter["payload"]) == (claim.job_id, "print", '{"n":4}')
    assert (dead_letter["tenant_id"], dead_letter["trace_id"], dead_letter["retry_count"]) == ("acme", "t-1", "1")
    assert dead_letter["error_code"] == FAILURE.code
    assert FAILURE.message in dead_letter["error"]
    assert dead_letter["stack"] == FAILURE.stack
    assert [attempt["worker"] for attempt in json.loads(dead_letter["history"])] == ["w1", "w2"]
    assert int(dead_letter["failed_at"]) > 0
    assert dead_letter["dlq_id"]


# Housekeeping ----------------------------------------------------------------------------------------


async def test_an_entry_deleted_from_the_stream_is_removed_from_the_pending_list(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    redis, stream = redis_harness.redis, redis_harness.keys(QUEUE).streams[Priority.NORMAL]
    deleted, kept = await rig.start_one("w1"), await rig.start_one("w1")
    await rig.lose_leases()
    await redis.xdel(stream, deleted.lease.position.partition(":")[2])
    claims = await rig.reclaim("w2") + await rig.reclaim("w2")
    assert ids(claims) == [kept.job_id]
    assert (await redis.xpending(stream, redis_harness.names.group))["pending"] == 1
    assert await rig.engine.recover_claims("w1", [QUEUE], ()) == []


async def test_dead_consumers_are_removed_once_they_have_no_leases(redis_harness: RedisHarness) -> None:
    # A consumer's idle time cannot be set, so every consumer counts as dead after a few milliseconds.
    rig = await Rig.on(redis_harness, visibility_timeout_ms=1)
    stream, group = redis_harness.keys(QUEUE).streams[Priority.NORMAL], redis_harness.names.group
    done = await rig.start_one("done")
    await rig.start_one("busy")
    await rig.succeed(done)
    consumers: set[bytes] = {b"done"}
    async with asyncio.timeout(SOON_S):
        while b"done" in consumers:
            await rig.engine.prune([QUEUE])
            consumers = {consumer["name"] for consumer in await redis_harness.redis.xinfo_consumers(stream, group)}
    assert b"busy" in consumers
    assert len(await rig.reclaim("w3")) == 1


@pytest.mark.parametrize("mode", list(RetryVia))
async def test_memory_returns_to_its_baseline(redis_harness: RedisHarness, mode: RetryVia) -> None:
    rig = await Rig.on(
        redis_harness,
        retry_via={QUEUE: mode},
        finished_ttl_ms=60_000,
        idempotency_window_ms=60_000,
        result_limit=1,
        feed_limit=1,
    )
    redis, keys = redis_harness.redis, redis_harness.keys(QUEUE)
    await run_and_expire(rig, 1)
    prefix = {key async for key in redis.scan_iter(match=f"{{{redis_harness.names.namespace}:*")}
    await run_and_expire(rig, 300)
    after = {key async for key in redis.scan_iter(match=f"{{{redis_harness.names.namespace}:*")}
    assert after <= prefix, "keys of finished jobs stayed behind"
    for stream in keys.streams:
        assert await redis.xlen(stream) == 0
    for stream in (keys.feed, keys.result, keys.wake, keys.notices):
        assert await redis.xlen(stream) <= 200


async def run_and_expire(rig: Rig, count: int) -> None:
    """Run jobs that succeed and retry; then expire their records."""
    for number in range(count):
        await rig.submit(idempotency_key=f"k{number}")
    await rig.submit(count, delay_ms=500)
    claims = await rig.claim("w1", 500)
    for claim in claims[::2]:
        assert await rig.settle(claim, RetryLater(500, FAILURE)) is SettleResult.APPLIED
    await rig.succeed(*claims[1::2])
    await rig.harness.advance(501)
    while claims := await rig.claim_due("w1"):
        await rig.succeed(*claims)
    assert await rig.open_jobs() == 0
    await rig.engine.deregister_worker("w1", [QUEUE])
    await rig.harness.advance(60_001)
    await rig.engine.prune([QUEUE])


async def test_only_declared_keys_are_touched_and_no_scan_is_used(redis_harness: RedisHarness, rig: Rig) -> None:
    redis = redis_harness.redis
    await redis.config_resetstat()
    await rig.submit(20)
    await rig.succeed(*await rig.claim())
    await rig.claim_due()
    await rig.engine.stats(QUEUE)
    await rig.engine.find(QUEUE, list(State), 10)
    await rig.engine.prune([QUEUE])
    used = {name.removeprefix("cmdstat_").upper() for name in await redis.info("commandstats")}
    assert used.isdisjoint({"KEYS", "SCAN", "FLUSHDB", "FLUSHALL"})
