"""The projector on a real Redis: exactly once, whoever dies and wherever; forks; dead letters (rules 14–18, L3, D1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from holdfast.core.job import JobKey
from holdfast.core.states import FORKED_EVENT, State
from holdfast.core.verdict import DeadLetter
from holdfast.ledger.fold import AFTER_THE_END
from holdfast.ledger.port.ledger import FeedPosition
from tests.conftest import MakeServer
from tests.ledger.projection_rig import QUEUE, job, open_ledger, rows, story
from tests.upkeep.projector_rig import FAILURE, Doom, Doomed, Killed, World, state_of, until

#: Every call between reading an entry and the end of its dead letter.
POINTS = [
    "acquire",
    "read_feed",
    "project",
    "trim_feed",
    "unacked_dead_letters",
    "move",
    "ack_dead_letters",
    "wait_feed",
]


@pytest.fixture
async def world(redis_url: str, ledger_url: str, namespace: str) -> AsyncIterator[World]:
    async with World(redis_url, ledger_url, namespace) as made:
        yield made


async def test_everything_reaches_the_ledger_in_order(world: World) -> None:
    await world.start()
    await world.admit()
    ids = []
    for count in (1, 7, 60, 200):
        ids += await world.lives(count)
    await world.settled_down()
    told = await world.check(ids)
    assert set(told.values()) == {State.SUCCEEDED, State.RETRYING, State.FAILED}


async def test_a_backlog_is_written_in_large_batches_and_trimmed(world: World) -> None:
    await world.admit()
    ids = []
    for _ in range(12):
        ids += await world.submit(500)
        await world.work()
    projector = await world.start()
    await world.settled_down()
    await world.check(ids)
    assert (projector.counts.projected, projector.counts.slow_batches) == (3 * len(ids), 0)

    async def trimmed() -> bool:
        return (await world.engine.stats(QUEUE)).feed_entries == 1

    await until(trimmed, "all but the last entry is gone from the feed")
    feed = await world.engine.read_feed(QUEUE, "", 10)
    assert [FeedPosition(entry.position, entry.nonce) for entry in feed] == [await world.end()]


async def test_queues_that_come_later_are_projected_too(world: World) -> None:
    await world.start()
    await world.admit()
    await world.submit(3)
    await world.admit("late")
    await world.submit(3, "late")
    await world.work(queue="late")
    await world.settled_down()
    await world.settled_down("late")
    found = await rows(
        world.ledger, "SELECT queue, state, count(*) AS n FROM jobs GROUP BY queue, state ORDER BY queue"
    )
    assert [(row["queue"], row["state"], row["n"]) for row in found] == [
        ("default", "queued", 3),
        ("late", "succeeded", 3),
    ]


async def test_a_durable_submission_does_not_linger(world: World) -> None:
    await world.start(world.projector(linger_s=60.0))
    await world.admit()
    assert world.ledger.projection is not None
    (slow,) = await world.submit(1)
    began = time.monotonic()
    (durable,) = await world.submit(1, durable=True)
    keys = [JobKey("default", QUEUE, job_id) for job_id in (slow, durable)]
    assert await world.ledger.projection.wait_recorded(keys, 30_000) == set(keys)
    assert time.monotonic() - began < 30


# Who dies, and where -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("method", POINTS)
async def test_a_projector_that_dies_anywhere_loses_and_repeats_nothing(world: World, method: str, side: str) -> None:
    await world.admit()
    ids = await world.lives(30)
    doom = Doom(method, side)
    victim = world.projector(Doomed(world.engine.clone(), doom), Doomed(open_ledger(world.ledger_url), doom))
    await victim._engine.open()
    task = asyncio.create_task(victim.run())
    await asyncio.wait([task, asyncio.create_task(doom.dead.wait())], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert doom.dead.is_set()
    ids += await world.lives(30)
    await asyncio.sleep(0)
    if not task.done():
        # It died in a task of its own: the main loop would go on.
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.start()
    await world.settled_down()
    told = await world.check(ids)
    assert sorted(set(told.values())) == ["failed", "retrying", "succeeded"]
    letters = await rows(world.ledger, "SELECT job_id FROM dlq_items WHERE acked_at IS NOT NULL")
    assert len(letters) == sum(state is State.FAILED for state in told.values()) == 20


async def test_two_projectors_share_without_harm(world: World) -> None:
    await world.admit()
    projectors = [await world.start(world.projector(lease_ms=1)) for _ in range(3)]
    ids = []
    for _ in range(10):
        ids += await world.lives(30)
    await world.settled_down()
    told = await world.check(ids)
    assert len(told) == 300
    assert sum(projector.counts.forks for projector in projectors) == 0


async def test_a_killed_projector_is_replaced_after_its_lease_and_a_stopped_one_at_once(world: World) -> None:
    assert world.ledger.projection is not None
    await world.admit()
    await world.start(world.projector(lease_ms=60_000))
    ids = await world.lives(3)
    await world.settled_down()
    standby = world.projector(lease_ms=60_000)
    await standby._engine.open()
    task = asyncio.create_task(standby.run())
    await asyncio.sleep(0.3)
    assert await world.ledger.projection.acquire(QUEUE, standby.name, 60_000) is None
    await world.stop()
    ids += await world.lives(3)
    await world.settled_down()
    await world.check(ids)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Forks ---------------------------------------------------------------------------------------------


async def test_a_wiped_redis_is_read_anew(make_redis: MakeServer, ledger_url: str, namespace: str) -> None:
    server = make_redis()
    async with World(server.url, ledger_url, namespace) as world:
        forks: list[str] = []
        await world.start(world.projector(on_fork=forks.append))
        await world.admit()
        before = await world.lives(30)
        await world.settled_down()
        await _wipe(server.url)
        await until(lambda: _is_true(forks == [QUEUE]), "the fork is seen")
        after = await world.lives(30)
        await world.settled_down()
        told = await world.check(after)
        assert told.keys() == {*before, *after}
        assert forks == [QUEUE]


async def test_a_wipe_while_no_projector_ran_is_seen_by_the_next_one(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with World(server.url, ledger_url, namespace) as world:
        await world.start()
        await world.admit()
        before = await world.lives(9)
        await world.settled_down()
        await world.stop()
        await _wipe(server.url)
        forks: list[str] = []
        await world.start(world.projector(on_fork=forks.append))
        await until(lambda: _is_true(forks == [QUEUE]), "the fork is seen although the engine has no queue")
        after = await world.lives(9)
        await world.settled_down()
        assert (await world.check(after)).keys() == {*before, *after}


async def test_another_feed_at_the_same_position_is_told_by_its_nonce(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with World(server.url, ledger_url, namespace) as world:
        await world.start()
        await world.admit()
        before = await world.lives(9)
        await world.settled_down()
        await world.stop()
        async with redis.asyncio.from_url(server.url) as client:
            (feed,) = [key async for key in client.scan_iter(match="*feed*")]
            found: Any = await client.xrevrange(feed, count=1)
            ((position, fields),) = found
            await client.delete(feed)
            await client.xadd(feed, fields | {b"nonce": b"another"}, id=position)
        projector = await world.start()
        await until(lambda: _is_true(projector.counts.forks == 1), "the fork is seen")
        await world.settled_down()
        assert (await world.check([], anomalies=None, states=False)).keys() == set(before)


async def test_a_stale_replica_takes_over(make_redis: MakeServer, ledger_url: str, namespace: str) -> None:
    master, replica = make_redis(), make_redis()
    await _command(replica.url, "REPLICAOF", "127.0.0.1", str(master.port))
    async with World(master.url, ledger_url, namespace) as old:
        await old.start()
        await old.admit()
        done = await old.lives(30)
        queued = await old.submit(20)
        await old.settled_down()
        await until(lambda: _in_step(master.url, replica.url), "the replica has everything")
        await _command(replica.url, "REPLICAOF", "NO", "ONE")
        # From here on the replica knows nothing.
        finished = await old.claim(10)
        await old.settle(finished)
        running = await old.claim(5)
        lost = await old.submit(5)
        await old.settled_down()
        await old.stop()
        master.kill()
    async with World(replica.url, ledger_url, namespace) as new:
        projector = await new.start()
        await until(lambda: _is_true(projector.counts.forks == 1), "the fork is seen")
        again = await new.claim(500)
        await new.settle(again)
        # As a submitter would: another memory takes no jobs before the ledger was asked.
        await new.admit()
        after = await new.lives(30)
        await new.settled_down()
        told = await new.check([*done, *after], anomalies=None)
        assert told.keys() == {*done, *queued, *lost, *after}
        ended = {claim.job_id for claim in finished}
        for job_id in ended:
            assert await story(new.ledger, job_id) == ["task.created", "task.claimed", "task.succeeded"]
        for claim in running:
            assert FORKED_EVENT in await story(new.ledger, claim.job_id)
        reasons = [row["reason"] for row in await rows(new.ledger, "SELECT reason FROM anomalies")]
        assert reasons.count(AFTER_THE_END) == 2 * len(ended & {claim.job_id for claim in again})
        assert projector.counts.forks == 1


# Dead letters --------------------------------------------------------------------------------------


async def test_a_job_waits_in_dlq_pending_until_its_letter_is_in_the_ledger(world: World) -> None:
    await world.admit()
    (dead,) = await world.submit(1)
    await world.work(DeadLetter(FAILURE))
    assert await state_of(world, dead) is State.DLQ_PENDING
    await world.start()
    await world.settled_down()
    assert await state_of(world, dead) is State.FAILED
    row = await job(world.ledger, dead)
    assert (row["state"], row["error_code"]) == ("failed", "TASK_ERROR")
    (letter,) = await rows(world.ledger, "SELECT * FROM dlq_items")
    assert letter["dlq_id"] == row["dlq_id"]
    assert letter["acked_at"] is not None
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await story(world.ledger, dead) == names


async def test_a_letter_of_a_job_that_is_gone_from_the_engine_is_acknowledged(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with World(server.url, ledger_url, namespace) as world:
        await world.start()
        await world.admit()
        await world.submit(1)
        await world.work(DeadLetter(FAILURE))
        await world.settled_down()
        await world.stop()
        # Its acknowledgement was lost, and since then the engine has forgotten the job.
        assert world.ledger.projection is not None
        await _unack(world)
        assert await world.ledger.projection.unacked_dead_letters(QUEUE, 10)
        await _wipe(server.url)
        await world.start()

        async def acknowledged() -> bool:
            assert world.ledger.projection is not None
            return not await world.ledger.projection.unacked_dead_letters(QUEUE, 10)

        await until(acknowledged, "nobody waits for it any more")


async def test_a_letter_of_a_lost_job_waits_for_the_reconciler(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with World(server.url, ledger_url, namespace) as world:
        await world.admit()
        doom = Doom("move", "before")
        victim = world.projector(Doomed(world.engine.clone(), doom), open_ledger(ledger_url))
        (dead,) = await world.submit(1)
        await world.work(DeadLetter(FAILURE))
        await victim._engine.open()
        task = asyncio.create_task(victim.run())
        await doom.dead.wait()
        task.cancel()
        with pytest.raises((Killed, asyncio.CancelledError)):
            await task
        await _wipe(server.url)
        await world.start()
        await world.admit()
        await world.submit(1)
        await until(world.caught_up, "the ledger reads the new feed")
        assert world.ledger.projection is not None
        assert [letter.key.job_id for letter in await world.ledger.projection.unacked_dead_letters(QUEUE, 10)] == [dead]
        assert (await job(world.ledger, dead))["state"] == "dlq_pending"


async def _unack(world: World) -> None:
    from sqlalchemy import text

    ledger = world.ledger
    if world.ledger_url.startswith("sqlite"):
        await ledger.store.write(  # type: ignore[attr-defined]
            lambda transaction: transaction.execute("UPDATE dlq_items SET acked_at = NULL").rowcount
        )
        return
    async with ledger.store.read_engine.begin() as connection:  # type: ignore[attr-defined]
        await connection.execute(text("UPDATE dlq_items SET acked_at = NULL"))


async def _is_true(value: bool) -> bool:
    return value


async def _wipe(url: str) -> None:
    await _command(url, "FLUSHALL")


async def _command(url: str, *words: str) -> object:
    async with redis.asyncio.from_url(url) as client:
        return await client.execute_command(*words)


async def _in_step(master: str, replica: str) -> bool:
    offsets = []
    for url in (master, replica):
        async with redis.asyncio.from_url(url) as client:
            found = await client.info("replication")
            offsets.append((found["master_repl_offset"], found.get("master_link_status", "up")))
    return offsets[0] == offsets[1]
