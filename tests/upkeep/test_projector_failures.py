"""A failure with one queue, entry or dead letter does not affect the others (rules 16, 18; requirement L3)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
import redis.asyncio

from holdfast.clock import SystemClock
from holdfast.core.job import Envelope, new_job_ids
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter
from holdfast.engine.port.feed import FeedEntry
from holdfast.errors import LedgerUnavailable
from holdfast.factory import build_engine
from holdfast.ledger.port.ledger import Projection
from holdfast.settings import Settings
from holdfast.upkeep import dead_letters, feed_cursor
from holdfast.upkeep.dead_letters import DeadLetterConfirmer, OrphanedDeadLetters
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.upkeep.projector import Projector
from tests.conftest import MakePostgres
from tests.ledger.projection_rig import QUEUE, Feed, FeedWriter, event_types, job, open_ledger, rows
from tests.upkeep.projector_rig import FAILURE, ProjectorRig, state_of, until

_S = State


@pytest.fixture
async def rig(redis_url: str, ledger_url: str, namespace: str) -> AsyncIterator[ProjectorRig]:
    async with ProjectorRig(redis_url, ledger_url, namespace) as rig:
        yield rig


class Spy:
    """A proxy for an engine or projection that records calls and runs hooks before them."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[str] = []
        self.before: dict[str, Callable[..., None]] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not asyncio.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if (hook := self.before.get(name)) is not None:
                hook(*arguments, **options)
            return await value(*arguments, **options)

        return call


def spy_on(projector: Projector) -> Spy:
    spy = Spy(projector._projection)
    projector._projection = spy
    return spy


def raw(rig: ProjectorRig) -> redis.asyncio.Redis:
    return redis.asyncio.from_url(rig.settings.url)


def feed_of(rig: ProjectorRig, queue: str = QUEUE) -> bytes:
    key: bytes = rig.engine._store.keys(queue).feed  # type: ignore[attr-defined]
    return key


# One queue -----------------------------------------------------------------------------------------


async def test_an_unreadable_feed_does_not_stop_the_others(rig: ProjectorRig) -> None:
    for queue in ("bad", "good"):
        await rig.reopen_intake(queue)
    await rig.start()
    await rig.submit(1, "good")
    await rig.wait_settled("good")
    async with raw(rig) as client:
        await client.set(feed_of(rig, "bad"), "no stream")
        await asyncio.sleep(0.5)
        for _ in range(5):
            await rig.submit(1, "good")
            await until(lambda: rig.is_caught_up("good"), "the other queue continues")
            await asyncio.sleep(0.1)
        await client.delete(feed_of(rig, "bad"))
    await rig.submit(2, "bad")
    await until(lambda: rig.is_caught_up("bad"), "it is retried", 20)


async def test_a_queue_that_cannot_be_projected_does_not_stop_the_others_and_is_logged(
    rig: ProjectorRig, caplog: pytest.LogCaptureFixture
) -> None:
    for queue in ("bad", "good"):
        await rig.reopen_intake(queue)
    projector = rig.projector()
    failing = True

    def refuse(queue: str, *_: Any, **__: Any) -> None:
        if queue == "bad" and failing:
            raise RuntimeError("no")

    spy_on(projector).before["project"] = refuse
    with caplog.at_level(logging.INFO, "holdfast.projector"):
        await rig.start(projector)
        await rig.submit(1, "bad")
        for _ in range(6):
            await rig.submit(1, "good")
            await until(lambda: rig.is_caught_up("good"), "the other queue continues")
            await asyncio.sleep(0.2)
        assert projector.lag_ms >= 1_000
        failing = False
        await until(lambda: rig.is_caught_up("bad"), "it is retried", 20)
        await until(lambda: _is_true(projector.lag_ms < 1_000), "no queue lags")
    messages = [record.message for record in caplog.records if "queue bad" in record.message]
    assert sum("cannot project queue" in message for message in messages) == 1
    assert "projection of queue bad recovered" in messages


async def test_a_locked_feed_position_does_not_block_the_projector(
    postgres_url: str, redis_url: str, namespace: str
) -> None:
    async with ProjectorRig(redis_url, postgres_url, namespace, reply_timeout_s=60.0) as rig:
        assert rig.ledger.projection is not None
        for queue in ("slow", "fast"):
            await rig.reopen_intake(queue)
        await rig.start()
        for queue in ("slow", "fast"):
            await rig.submit(1, queue)
            await rig.wait_settled(queue)
        other = await asyncpg.connect(postgres_url)
        transaction = other.transaction()
        await transaction.start()
        await other.execute("UPDATE feed_positions SET lease_expires_at = now() - interval '1s' WHERE feed = 'slow'")
        began = time.monotonic()
        assert await rig.ledger.projection.acquire("slow", "me", 1_000) is None
        await rig.submit(1, "slow")
        for _ in range(5):
            await rig.submit(1, "fast")
            await until(lambda: rig.is_caught_up("fast"), "the other queue continues")
            await asyncio.sleep(0.1)
        assert time.monotonic() - began < 50
        await transaction.rollback()
        await other.close()
        await rig.wait_settled("slow")


async def test_many_queues_linger_concurrently(rig: ProjectorRig) -> None:
    queues = [f"q{number}" for number in range(20)]
    for queue in queues:
        await rig.reopen_intake(queue)
    await rig.start(rig.projector(linger_s=1.0))
    began = time.monotonic()
    for _ in range(2):
        for queue in queues:
            await rig.submit(1, queue)
        for queue in queues:
            await rig.wait_settled(queue)
    assert time.monotonic() - began < len(queues), "one after the other they would take one second each, twice"


async def test_a_standby_checks_the_leases_of_all_queues_in_one_call(rig: ProjectorRig) -> None:
    for number in range(20):
        await rig.reopen_intake(f"q{number}")
    await rig.start(rig.projector(lease_ms=60_000))
    await until(lambda: _all_acquired(rig, 20), "all feeds are acquired")
    standby = rig.projector(lease_ms=60_000)
    spy = spy_on(standby)
    await rig.start(standby)

    async def has_checked() -> bool:
        return "held_by_others" in spy.calls

    await until(has_checked, "it has checked the leases")
    # Several rounds of 0.1 s.
    await asyncio.sleep(1)
    assert "acquire" not in spy.calls
    assert spy.calls.count("held_by_others") < 20


async def _all_acquired(rig: ProjectorRig, count: int) -> bool:
    return len(await rows(rig.ledger, "SELECT feed FROM feed_positions WHERE projector IS NOT NULL")) == count


async def test_a_paused_projector_does_not_take_a_trimmed_feed_for_a_fork(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    forks: list[str] = []
    stopped = rig.projector(on_fork=forks.append)
    await rig.start(stopped)
    await rig.submit(1)
    await rig.wait_settled()
    proceed, wait = asyncio.Event(), stopped._wait

    async def skip_round() -> None:
        """Skip the check of the lease."""
        stopped._round_at = time.monotonic() + 0.1

    async def wait_blocked(wait_ms: int) -> Any:
        await proceed.wait()
        return await wait(wait_ms)

    stopped._run_round, stopped._wait = skip_round, wait_blocked  # type: ignore[method-assign]
    await asyncio.sleep(0.5)
    await rig.start()
    await rig.submit(1)
    await rig.wait_settled()

    async def trimmed() -> bool:
        return (await rig.engine.stats(QUEUE)).feed_entries == 1

    await until(trimmed, "the other projector has trimmed")
    cursor = stopped._cursors[QUEUE]
    proceed.set()
    await until(lambda: _is_true(stopped._cursors.get(QUEUE) is not cursor), "the projector has lost its lease")
    assert (forks, stopped.counts.forks) == ([], 0)


# One entry -----------------------------------------------------------------------------------------


async def test_unreadable_entries_are_skipped(rig: ProjectorRig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.reopen_intake()
    ids = await rig.run_mixed_jobs(3)
    async with raw(rig) as client:
        entry: dict[Any, Any] = {"kind": "of tomorrow", "at": "1", "worker": "w", "nonce": "n1", "moves": b"\x90"}
        await client.xadd(feed_of(rig), entry)
        await client.xadd(feed_of(rig), entry | {"kind": "settled", "moves": b"\xc1\xff", "nonce": "n2"})
        await client.xadd(feed_of(rig), entry | {"at": "noon", "nonce": b"\xff\xfe"})
        await client.xadd(feed_of(rig), {"another": "program"})
    projector = await rig.start()
    ids += await rig.run_mixed_jobs(3)
    await rig.wait_settled()
    await rig.check(ids)
    assert projector.counts.anomalies == 4
    assert sum("skipped feed entry" in record.message for record in caplog.records) == 4


async def _submit_large(rig: ProjectorRig, count: int, size: int) -> list[str]:
    ids = new_job_ids(count)
    for job_id in ids:
        await rig.engine.submit([Envelope(job_id=job_id, task="add", payload=b'"' + b"x" * size + b'"')])
    return ids


def _payload_bytes(entries: list[FeedEntry]) -> int:
    return sum(len((event.data or {}).get("payload", "")) for entry in entries for event in entry.events)


async def test_a_batch_is_bounded_by_bytes(rig: ProjectorRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "MOST_BYTES", 1_000_000)
    await rig.reopen_intake()
    ids = await _submit_large(rig, 60, 100_000)
    projector = rig.projector()
    sizes: list[int] = []
    pages: list[int] = []
    spy_on(projector).before["project"] = lambda *arguments, **_: sizes.append(_payload_bytes(arguments[4]))
    read = feed_cursor.FeedCursor.read

    async def read_recorded(*arguments: Any) -> list[FeedEntry]:
        entries = await read(*arguments)
        pages.append(_payload_bytes(entries))
        return entries

    monkeypatch.setattr(feed_cursor.FeedCursor, "read", read_recorded)
    await rig.start(projector)
    await rig.wait_settled()
    await rig.check(ids)
    assert max(sizes) <= 1_000_000
    # The first page is read without knowing the size of entries.
    assert max(pages) <= 3_000_000
    assert max(pages[1:]) <= 1_500_000


async def test_a_batch_that_takes_too_long_is_halved(rig: ProjectorRig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.reopen_intake()
    ids = await _submit_large(rig, 40, 100_000)
    projector = rig.projector()
    sizes: list[int] = []

    def time_out(*arguments: Any, **_: Any) -> None:
        sizes.append(_payload_bytes(arguments[4]))
        if sizes[-1] > 800_000:
            raise LedgerUnavailable("it took too long")

    spy_on(projector).before["project"] = time_out
    patch = pytest.MonkeyPatch()
    patch.setattr(feed_cursor, "MOST_BYTES", 4_000_000)
    await rig.start(projector)
    await rig.wait_settled()
    patch.undo()
    await rig.check(ids)
    assert max(sizes) > 800_000


# Dead letters --------------------------------------------------------------------------------------


async def test_dead_letters_that_cannot_be_confirmed_do_not_hide_others(
    rig: ProjectorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "_PAGE", 3)
    await rig.reopen_intake()
    (waiting_id,) = await rig.submit(1)
    await rig.work(DeadLetter(FAILURE))
    feed, writer = Feed(), FeedWriter(rig.ledger)
    for number in range(7):
        # The engine has lost these jobs; they wait for the reconciler.
        name = f"lost-{number}"
        failed_event = feed.failed(name, _S.DLQ_PENDING, dlq_id=f"!{number}")
        await writer.write(feed.entry(feed.created(name), feed.claimed(name), failed_event))
    await writer.write(*await rig.engine.read_feed(QUEUE, "", 100))
    confirmer = DeadLetterConfirmer(rig.engine, rig.ledger)
    assert await confirmer.confirm_all(QUEUE) == 7
    assert await state_of(rig, waiting_id) is State.FAILED
    assert len(await writer.projection.unacked_dead_letters(QUEUE, 100)) == 7


async def test_an_error_with_one_dead_letter_does_not_stop_the_others(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    ids = await rig.submit(5)
    await rig.work(DeadLetter(FAILURE))
    await FeedWriter(rig.ledger).write(*await rig.engine.read_feed(QUEUE, "", 100))
    engine = Spy(rig.engine)

    def fail_one(queue: str, job_id: str, *_: Any, **__: Any) -> None:
        if job_id == ids[2]:
            raise RuntimeError("unexpected")

    engine.before["move"] = fail_one
    assert await DeadLetterConfirmer(engine, rig.ledger).confirm_all(QUEUE) == 1
    assert rig.ledger.projection is not None
    assert [dead_letter.key.job_id for dead_letter in await rig.ledger.projection.unacked_dead_letters(QUEUE, 10)] == [
        ids[2]
    ]


@pytest.fixture
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "ORPHAN_RECHECK_S", 0.2)


async def _trim(rig: ProjectorRig) -> None:
    """Trim the feed as if a ledger had read all of it."""
    await rig.submit(1)
    await rig.engine.trim_feed(QUEUE, (await rig.feed_end()).position)


async def _project_once(rig: ProjectorRig) -> Projection:
    assert rig.ledger.projection is not None
    projection = rig.ledger.projection
    at = await projection.acquire(QUEUE, "another", 1)
    assert at is not None
    entries, epoch = await rig.engine.read_feed(QUEUE, "", 100), await projection.engine_epoch(QUEUE)
    await projection.project(QUEUE, "another", 1, at, entries, epoch=epoch)
    return projection


@pytest.mark.usefixtures("recheck_often")
async def test_a_job_unknown_to_a_new_ledger_gets_its_dead_letter(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    (job_id,) = await rig.submit(1)
    await rig.work(DeadLetter(FAILURE))
    await _trim(rig)
    await rig.start()
    await until(lambda: _has_state(rig, job_id, State.FAILED), "it is confirmed", 10)
    await rig.wait_settled()
    row = await job(rig.ledger, job_id)
    assert (row["state"], row["job_type"], row["payload"]) == ("failed", "add", "{}")
    (dead_letter,) = await rows(rig.ledger, "SELECT * FROM dlq_items")
    assert (dead_letter["job_id"], dead_letter["dlq_id"], dead_letter["error_code"]) == (
        job_id,
        row["dlq_id"],
        "TASK_ERROR",
    )
    assert dead_letter["acked_at"] is not None


@pytest.mark.usefixtures("recheck_often")
async def test_a_job_whose_end_the_ledger_missed_gets_its_dead_letter(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    (job_id,) = await rig.submit(1)
    claims = await rig.claim()
    await _project_once(rig)
    await rig.settle(claims, DeadLetter(FAILURE))
    await _trim(rig)
    await rig.start()
    await until(lambda: _has_state(rig, job_id, State.FAILED), "it is confirmed", 10)
    await rig.wait_settled()
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await event_types(rig.ledger, job_id) == names
    (dead_letter,) = await rows(rig.ledger, "SELECT * FROM dlq_items")
    assert (dead_letter["error"], dead_letter["acked_at"] is None) == ("boom", False)


@pytest.mark.usefixtures("recheck_often")
async def test_a_job_whose_dead_letter_is_acknowledged_is_failed(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    (job_id,) = await rig.submit(1)
    await rig.work(DeadLetter(FAILURE))
    projection = await _project_once(rig)
    await projection.ack_dead_letters(await projection.unacked_dead_letters(QUEUE, 10))
    await rig.start()
    await until(lambda: _has_state(rig, job_id, State.FAILED), "the job has failed", 10)
    await rig.wait_settled()
    await rig.check([job_id])


async def test_without_a_ledger_waiting_dead_letters_are_finished(rig: ProjectorRig) -> None:
    await rig.reopen_intake()
    ids = await rig.submit(2)
    await rig.work(DeadLetter(FAILURE))
    settings = Settings.load(url=rig.settings.url, namespace=rig.settings.namespace)
    engine_without_ledger = build_engine(settings, SystemClock())
    await engine_without_ledger.open()
    orphans = OrphanedDeadLetters(engine_without_ledger)
    # Another process may have a ledger and confirm the dead letter shortly.
    assert await orphans.finish(QUEUE) == 0
    assert await state_of(rig, ids[0]) is State.DLQ_PENDING
    assert await OrphanedDeadLetters(rig.engine).finish(QUEUE) == 0
    assert await orphans.finish(QUEUE) == 2
    assert [await state_of(rig, job_id) for job_id in ids] == [State.FAILED] * 2
    assert (await engine_without_ledger.stats(QUEUE)).dead_letters == 2
    assert await orphans.finish(QUEUE) == 0
    await engine_without_ledger.close()


# Outages of the ledger -----------------------------------------------------------------------------


async def test_an_outage_of_the_ledger_is_logged_once(rig: ProjectorRig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.reopen_intake()
    projector = rig.projector()
    spy = spy_on(projector)
    await rig.start(projector)
    await rig.submit(1)
    await rig.wait_settled()

    def down(*_: Any) -> None:
        raise LedgerUnavailable("it is unreachable")

    with caplog.at_level(logging.INFO, "holdfast.projector"):
        spy.before.update(dict.fromkeys(("held_by_others", "acquire", "project", "position"), down))
        await rig.submit(1)
        calls = len(spy.calls)
        await until(lambda: _is_true(len(spy.calls) >= calls + 6), "it is retried")
        assert projector.lag_ms > 0
        spy.before.clear()
        await rig.wait_settled()
        await until(lambda: _is_true("projector recovered" in caplog.text), "the recovery is logged")
    warnings = [record for record in caplog.records if "projector waiting" in record.message]
    assert [record.levelname for record in warnings] == ["WARNING"]


async def test_shutdown_does_not_wait_for_a_paused_ledger(
    redis_url: str, namespace: str, make_postgres: MakePostgres
) -> None:
    server = make_postgres(fsync=False)
    async with ProjectorRig(redis_url, server.url, namespace) as rig:
        for number in range(5):
            await rig.reopen_intake(f"q{number}")
        ledger = open_ledger(server.url)
        ledger_tasks = LedgerTasks(rig.engine, ledger, rig.settings)
        ledger_tasks.start()
        await until(lambda: _all_acquired(rig, 5), "all feeds are acquired")
        server.pause()
        try:
            began = time.monotonic()
            await ledger_tasks.stop()
            assert time.monotonic() - began < 20, "as long as the ledger may take to answer"
        finally:
            server.resume()
            await ledger.close()


async def _is_true(value: bool) -> bool:
    return value


async def _has_state(rig: ProjectorRig, job_id: str, state: State) -> bool:
    return await state_of(rig, job_id) is state
