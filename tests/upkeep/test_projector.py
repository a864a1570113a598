"""The projector on a real Redis: exactly once despite kills, forks, dead letters (rules 14–18, L3, D1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from holdfast.core.job import JobKey
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter
from holdfast.ledger.port.ledger import FeedPosition
from tests.conftest import MakeServer
from tests.ledger.projection_rig import QUEUE, event_types, job, open_ledger, rows
from tests.upkeep.projector_rig import FAILURE, Killable, Killed, KillPoint, ProjectorRig, state_of, until

#: Every call between reading an entry and confirming its dead letter.
METHODS = [
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
async def rig(redis_url: str, ledger_url: str, namespace: str) -> AsyncIterator[ProjectorRig]:
    async with ProjectorRig(redis_url, ledger_url, namespace) as rig:
        yield rig


async def test_every_event_reaches_the_ledger_in_order(rig: ProjectorRig) -> None:
    await rig.start()
    await rig.reopen_intake()
    ids = []
    for count in (1, 7, 60, 200):
        ids += await rig.run_mixed_jobs(count)
    await rig.wait_settled()
    states = await rig.check(ids)
    assert set(states.values()) == {State.SUCCEEDED, State.RETRYING, State.FAILED}


async def test_a_backlog_is_written_in_large_batches_and_trimmed(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    ids = []
    for _ in range(12):
        ids += await rig.submit(500)
        await rig.work()
    projector = await rig.start()
    await rig.wait_settled()
    await rig.check(ids)
    assert (projector.counts.projected, projector.counts.slow_batches) == (3 * len(ids), 0)

    async def trimmed() -> bool:
        return (await rig.engine.stats(QUEUE)).feed_entries == 1

    await until(trimmed, "all but the last entry is gone from the feed")
    feed = await rig.engine.read_feed(QUEUE, "", 10)
    assert [FeedPosition(entry.position, entry.nonce) for entry in feed] == [await rig.feed_end()]


async def test_queues_created_later_are_projected_too(rig: ProjectorRig) -> None:
    await rig.start()
    await rig.reopen_intake()
    await rig.submit(3)
    await rig.reopen_intake("late")
    await rig.submit(3, "late")
    await rig.work(queue="late")
    await rig.wait_settled()
    await rig.wait_settled("late")
    found = await rows(rig.ledger, "SELECT queue, state, count(*) AS n FROM jobs GROUP BY queue, state ORDER BY queue")
    assert [(row["queue"], row["state"], row["n"]) for row in found] == [
        ("default", "queued", 3),
        ("late", "succeeded", 3),
    ]


async def test_a_durable_submission_does_not_linger(rig: ProjectorRig) -> None:
    await rig.start(rig.projector(linger_s=60.0))
    await rig.reopen_intake()
    assert rig.ledger.projection is not None
    (slow,) = await rig.submit(1)
    began = time.monotonic()
    (durable,) = await rig.submit(1, durable=True)
    keys = [JobKey("default", QUEUE, job_id) for job_id in (slow, durable)]
    assert await rig.ledger.projection.wait_recorded(keys, 30_000) == set(keys)
    assert time.monotonic() - began < 30


# Kills ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("method", METHODS)
async def test_a_projector_killed_at_any_call_loses_and_repeats_nothing(
    rig: ProjectorRig, method: str, side: str
) -> None:
    await rig.reopen_intake()
    ids = await rig.run_mixed_jobs(30)
    kill_point = KillPoint(method, side)
    victim = rig.projector(Killable(rig.engine.clone(), kill_point), Killable(open_ledger(rig.ledger_url), kill_point))
    await victim._engine.open()
    task = asyncio.create_task(victim.run())
    await asyncio.wait(
        [task, asyncio.create_task(kill_point.reached.wait())], return_when=asyncio.FIRST_COMPLETED, timeout=20
    )
    assert kill_point.reached.is_set()
    ids += await rig.run_mixed_jobs(30)
    await asyncio.sleep(0)
    if not task.done():
        # A separate task was killed: the main loop would continue.
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.start()
    await rig.wait_settled()
    states = await rig.check(ids)
    assert sorted(set(states.values())) == ["failed", "retrying", "succeeded"]
    dead_letters = await rows(rig.ledger, "SELECT job_id FROM dlq_items WHERE acked_at IS NOT NULL")
    assert len(dead_letters) == sum(state is State.FAILED for state in states.values()) == 20


async def test_concurrent_projectors_lose_and_repeat_nothing(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    projectors = [await rig.start(rig.projector(lease_ms=1)) for _ in range(3)]
    ids = []
    for _ in range(10):
        ids += await rig.run_mixed_jobs(30)
    await rig.wait_settled()
    states = await rig.check(ids)
    assert len(states) == 300
    assert sum(projector.counts.forks for projector in projectors) == 0


async def test_a_stopped_projector_is_replaced_before_its_lease_expires(rig: ProjectorRig) -> None:
    assert rig.ledger.projection is not None
    await rig.reopen_intake()
    await rig.start(rig.projector(lease_ms=60_000))
    ids = await rig.run_mixed_jobs(3)
    await rig.wait_settled()
    standby = rig.projector(lease_ms=60_000)
    await standby._engine.open()
    task = asyncio.create_task(standby.run())
    await asyncio.sleep(0.3)
    assert await rig.ledger.projection.acquire(QUEUE, standby.name, 60_000) is None
    await rig.stop()
    ids += await rig.run_mixed_jobs(3)
    await rig.wait_settled()
    await rig.check(ids)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Forks ---------------------------------------------------------------------------------------------


async def test_a_wiped_redis_is_read_from_the_start(make_redis: MakeServer, ledger_url: str, namespace: str) -> None:
    server = make_redis()
    async with ProjectorRig(server.url, ledger_url, namespace) as rig:
        forks: list[str] = []
        await rig.start(rig.projector(on_fork=forks.append))
        await rig.reopen_intake()
        before = await rig.run_mixed_jobs(30)
        await rig.wait_settled()
        await _wipe(server.url)
        await until(lambda: _is_true(forks == [QUEUE]), "the fork is detected")
        after = await rig.run_mixed_jobs(30)
        await rig.wait_settled()
        states = await rig.check(after)
        assert states.keys() == {*before, *after}
        assert forks == [QUEUE]


async def test_a_wipe_without_a_projector_is_detected_by_the_next_one(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with ProjectorRig(server.url, ledger_url, namespace) as rig:
        await rig.start()
        await rig.reopen_intake()
        before = await rig.run_mixed_jobs(9)
        await rig.wait_settled()
        await rig.stop()
        await _wipe(server.url)
        forks: list[str] = []
        await rig.start(rig.projector(on_fork=forks.append))
        await until(lambda: _is_true(forks == [QUEUE]), "the fork is detected although the engine has no queue")
        after = await rig.run_mixed_jobs(9)
        await rig.wait_settled()
        assert (await rig.check(after)).keys() == {*before, *after}


async def test_another_feed_at_the_same_position_is_detected_by_its_nonce(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with ProjectorRig(server.url, ledger_url, namespace) as rig:
        await rig.start()
        await rig.reopen_intake()
        before = await rig.run_mixed_jobs(9)
        await rig.wait_settled()
        await rig.stop()
        async with redis.asyncio.from_url(server.url) as client:
            (feed,) = [key async for key in client.scan_iter(match="*:feed")]
            found: Any = await client.xrevrange(feed, count=1)
            ((position, fields),) = found
            await client.delete(feed)
            await client.xadd(feed, fields | {b"nonce": b"another"}, id=position)
        projector = await rig.start()
        await until(lambda: _is_true(projector.counts.forks == 1), "the fork is detected")
        await rig.wait_settled()
        assert (await rig.check([], anomalies=None, states=False)).keys() == set(before)


async def test_a_stale_replica_takes_over(make_redis: MakeServer, ledger_url: str, namespace: str) -> None:
    master, replica = make_redis(), make_redis()
    await _command(replica.url, "REPLICAOF", "127.0.0.1", str(master.port))
    async with ProjectorRig(master.url, ledger_url, namespace) as old:
        await old.start()
        await old.reopen_intake()
        done = await old.run_mixed_jobs(30)
        queued = await old.submit(20)
        await old.wait_settled()
        await until(lambda: _is_in_sync(master.url, replica.url), "the replica has everything")
        await _command(replica.url, "REPLICAOF", "NO", "ONE")
        # From here on the replica gets no writes.
        finished = await old.claim(10)
        await old.settle(finished)
        running = await old.claim(5)
        lost = await old.submit(5)
        await old.wait_settled()
        await old.stop()
        master.kill()
    async with ProjectorRig(replica.url, ledger_url, namespace) as new:
        projector = await new.start()
        await until(lambda: _is_true(projector.counts.forks == 1), "the fork is detected")
        again = await new.claim(500)
        await new.settle(again)
        # As a submitter would: in a new epoch, intake is closed until keys are restored from the ledger.
        await new.reopen_intake()
        after = await new.run_mixed_jobs(30)
        await new.wait_settled()
        states = await new.check([*done, *after], anomalies=None)
        assert states.keys() == {*done, *queued, *lost, *after}
        ended = {claim.job_id for claim in finished}
        for job_id in ended:
            assert await event_types(new.ledger, job_id) == ["task.created", "task.claimed", "task.succeeded"]
        # They were compared with the ledger before any was claimed: none runs again that had ended there.
        assert ended.isdisjoint(claim.job_id for claim in again)
        for claim in running:
            assert await event_types(new.ledger, claim.job_id) == [
                *("task.created", "task.claimed", "task.restored", "task.claimed", "task.succeeded")
            ]
        assert await rows(new.ledger, "SELECT reason FROM anomalies") == []
        assert projector.counts.forks == 1


# Dead letters --------------------------------------------------------------------------------------


async def test_a_job_waits_in_dlq_pending_until_its_dead_letter_is_recorded(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    (job_id,) = await rig.submit(1)
    await rig.work(DeadLetter(FAILURE))
    assert await state_of(rig, job_id) is State.DLQ_PENDING
    await rig.start()
    await rig.wait_settled()
    assert await state_of(rig, job_id) is State.FAILED
    row = await job(rig.ledger, job_id)
    assert (row["state"], row["error_code"]) == ("failed", "TASK_ERROR")
    (dead_letter,) = await rows(rig.ledger, "SELECT * FROM dlq_items")
    assert dead_letter["dlq_id"] == row["dlq_id"]
    assert dead_letter["acked_at"] is not None
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await event_types(rig.ledger, job_id) == names


async def test_a_dead_letter_of_a_pruned_job_is_acknowledged(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with ProjectorRig(server.url, ledger_url, namespace) as rig:
        await rig.start()
        await rig.reopen_intake()
        await rig.submit(1)
        await rig.work(DeadLetter(FAILURE))
        await rig.wait_settled()
        await rig.stop()
        # The acknowledgement was lost, and since then the engine has pruned the job.
        assert rig.ledger.projection is not None
        await _unack(rig)
        assert await rig.ledger.projection.unacked_dead_letters(QUEUE, 10)
        await _wipe(server.url)
        await rig.start()

        async def acknowledged() -> bool:
            assert rig.ledger.projection is not None
            return not await rig.ledger.projection.unacked_dead_letters(QUEUE, 10)

        await until(acknowledged, "the dead letter is acknowledged")


async def test_a_dead_letter_of_a_lost_job_waits_for_the_reconciler(
    make_redis: MakeServer, ledger_url: str, namespace: str
) -> None:
    server = make_redis()
    async with ProjectorRig(server.url, ledger_url, namespace) as rig:
        await rig.reopen_intake()
        kill_point = KillPoint("move", "before")
        victim = rig.projector(Killable(rig.engine.clone(), kill_point), open_ledger(ledger_url))
        (job_id,) = await rig.submit(1)
        await rig.work(DeadLetter(FAILURE))
        await victim._engine.open()
        task = asyncio.create_task(victim.run())
        await kill_point.reached.wait()
        task.cancel()
        with pytest.raises((Killed, asyncio.CancelledError)):
            await task
        await _wipe(server.url)
        await rig.start()
        await rig.reopen_intake()
        await rig.submit(1)
        await until(rig.is_caught_up, "the ledger reads the new feed")
        assert rig.ledger.projection is not None
        assert [
            dead_letter.key.job_id for dead_letter in await rig.ledger.projection.unacked_dead_letters(QUEUE, 10)
        ] == [job_id]
        assert (await job(rig.ledger, job_id))["state"] == "dlq_pending"


async def _unack(rig: ProjectorRig) -> None:
    from sqlalchemy import text

    ledger = rig.ledger
    if rig.ledger_url.startswith("sqlite"):
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


async def _command(url: str, *arguments: str) -> object:
    async with redis.asyncio.from_url(url) as client:
        return await client.execute_command(*arguments)


async def _is_in_sync(master: str, replica: str) -> bool:
    offsets = []
    for url in (master, replica):
        async with redis.asyncio.from_url(url) as client:
            found = await client.info("replication")
            offsets.append((found["master_repl_offset"], found.get("master_link_status", "up")))
    return offsets[0] == offsets[1]
