"""What goes wrong with one queue, one entry or one dead letter is its trouble alone (rules 16, 18; requirement L3)."""

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
from tests.ledger.projection_rig import QUEUE, Feed, Scribe, job, open_ledger, rows, story
from tests.upkeep.projector_rig import FAILURE, World, state_of, until

_S = State


@pytest.fixture
async def world(redis_url: str, ledger_url: str, namespace: str) -> AsyncIterator[World]:
    async with World(redis_url, ledger_url, namespace) as made:
        yield made


class Spy:
    """Stands before an engine or a projection: counts calls, and lets a test come in between."""

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


def spied(projecting: Projector) -> Spy:
    spy = Spy(projecting._projection)
    projecting._projection = spy
    return spy


def raw(world: World) -> redis.asyncio.Redis:
    return redis.asyncio.from_url(world.settings.url)


def feed_of(world: World, queue: str = QUEUE) -> bytes:
    key: bytes = world.engine._store.keys(queue).feed  # type: ignore[attr-defined]
    return key


# One queue -----------------------------------------------------------------------------------------


async def test_a_feed_that_cannot_be_read_stops_no_other(world: World) -> None:
    for queue in ("bad", "good"):
        await world.admit(queue)
    await world.start()
    await world.submit(1, "good")
    await world.settled_down("good")
    async with raw(world) as client:
        await client.set(feed_of(world, "bad"), "no stream")
        await asyncio.sleep(0.5)
        for _ in range(5):
            await world.submit(1, "good")
            await until(lambda: world.caught_up("good"), "the other queue goes on")
            await asyncio.sleep(0.1)
        await client.delete(feed_of(world, "bad"))
    await world.submit(2, "bad")
    await until(lambda: world.caught_up("bad"), "it is tried again", 20)


async def test_what_the_ledger_does_not_take_of_one_queue_stops_no_other_and_is_seen(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for queue in ("bad", "good"):
        await world.admit(queue)
    one = world.projector()
    ill = True

    def refuse(queue: str, *_: Any) -> None:
        if queue == "bad" and ill:
            raise RuntimeError("no")

    spied(one).before["project"] = refuse
    with caplog.at_level(logging.INFO, "holdfast.projector"):
        await world.start(one)
        await world.submit(1, "bad")
        for _ in range(6):
            await world.submit(1, "good")
            await until(lambda: world.caught_up("good"), "the other queue goes on")
            await asyncio.sleep(0.2)
        assert one.lag_ms >= 1_000
        ill = False
        await until(lambda: world.caught_up("bad"), "it is tried again", 20)
        await until(lambda: _is_true(one.lag_ms < 1_000), "nothing is behind any more")
    said = [record.message for record in caplog.records if "queue bad" in record.message]
    assert sum("cannot project queue" in message for message in said) == 1
    assert "projection of queue bad recovered" in said


async def test_a_row_that_is_locked_is_left_to_who_locks_it(postgres_url: str, redis_url: str, namespace: str) -> None:
    async with World(redis_url, postgres_url, namespace, reply_timeout_s=60.0) as world:
        assert world.ledger.projection is not None
        for queue in ("slow", "fast"):
            await world.admit(queue)
        await world.start()
        for queue in ("slow", "fast"):
            await world.submit(1, queue)
            await world.settled_down(queue)
        other = await asyncpg.connect(postgres_url)
        holding = other.transaction()
        await holding.start()
        await other.execute("UPDATE feed_positions SET lease_expires_at = now() - interval '1s' WHERE feed = 'slow'")
        began = time.monotonic()
        assert await world.ledger.projection.acquire("slow", "me", 1_000) is None
        await world.submit(1, "slow")
        for _ in range(5):
            await world.submit(1, "fast")
            await until(lambda: world.caught_up("fast"), "the other queue goes on")
            await asyncio.sleep(0.1)
        assert time.monotonic() - began < 50
        await holding.rollback()
        await other.close()
        await world.settled_down("slow")


async def test_many_queues_linger_together(world: World) -> None:
    queues = [f"q{number}" for number in range(20)]
    for queue in queues:
        await world.admit(queue)
    await world.start(world.projector(linger_s=1.0))
    began = time.monotonic()
    for _ in range(2):
        for queue in queues:
            await world.submit(1, queue)
        for queue in queues:
            await world.settled_down(queue)
    assert time.monotonic() - began < len(queues), "they would take a second each, twice, one after the other"


async def test_who_stands_by_asks_once_for_all_queues(world: World) -> None:
    for number in range(20):
        await world.admit(f"q{number}")
    await world.start(world.projector(lease_ms=60_000))
    await until(lambda: _all_taken(world, 20), "all feeds are taken")
    standby = world.projector(lease_ms=60_000)
    spy = spied(standby)
    await world.start(standby)

    async def has_asked() -> bool:
        return "held_by_others" in spy.calls

    await until(has_asked, "it has asked")
    # Several rounds of a tenth of a second.
    await asyncio.sleep(1)
    assert "acquire" not in spy.calls
    assert spy.calls.count("held_by_others") < 20


async def _all_taken(world: World, count: int) -> bool:
    return len(await rows(world.ledger, "SELECT feed FROM feed_positions WHERE projector IS NOT NULL")) == count


async def test_a_projector_that_was_stopped_sees_no_fork_where_another_has_trimmed(world: World) -> None:
    await world.admit()
    forks: list[str] = []
    stopped = world.projector(on_fork=forks.append)
    await world.start(stopped)
    await world.submit(1)
    await world.settled_down()
    going, wait = asyncio.Event(), stopped._wait

    async def go_round() -> None:
        """It has not come to look at its lease yet."""
        stopped._round_at = time.monotonic() + 0.1

    async def look(wait_ms: int) -> Any:
        await going.wait()
        return await wait(wait_ms)

    stopped._run_round, stopped._wait = go_round, look  # type: ignore[method-assign]
    await asyncio.sleep(0.5)
    await world.start()
    await world.submit(1)
    await world.settled_down()

    async def trimmed() -> bool:
        return (await world.engine.stats(QUEUE)).feed_entries == 1

    await until(trimmed, "the other one has trimmed")
    track = stopped._cursors[QUEUE]
    going.set()
    await until(lambda: _is_true(stopped._cursors.get(QUEUE) is not track), "it has seen that it is not its feed")
    assert (forks, stopped.counts.forks) == ([], 0)


# One entry -----------------------------------------------------------------------------------------


async def test_entries_that_cannot_be_read_are_passed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.admit()
    ids = await world.lives(3)
    async with raw(world) as client:
        entry: dict[Any, Any] = {"kind": "of tomorrow", "at": "1", "worker": "w", "nonce": "n1", "moves": b"\x90"}
        await client.xadd(feed_of(world), entry)
        await client.xadd(feed_of(world), entry | {"kind": "settled", "moves": b"\xc1\xff", "nonce": "n2"})
        await client.xadd(feed_of(world), entry | {"at": "noon", "nonce": b"\xff\xfe"})
        await client.xadd(feed_of(world), {"another": "program"})
    one = await world.start()
    ids += await world.lives(3)
    await world.settled_down()
    await world.check(ids)
    assert one.counts.anomalies == 4
    assert sum("skipped feed entry" in record.message for record in caplog.records) == 4


async def _large(world: World, count: int, size: int) -> list[str]:
    ids = new_job_ids(count)
    for job_id in ids:
        await world.engine.submit([Envelope(job_id=job_id, task="add", payload=b'"' + b"x" * size + b'"')])
    return ids


def _bytes(entries: list[FeedEntry]) -> int:
    return sum(len((event.data or {}).get("payload", "")) for entry in entries for event in entry.events)


async def test_a_batch_is_bounded_by_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "MOST_BYTES", 1_000_000)
    await world.admit()
    ids = await _large(world, 60, 100_000)
    one = world.projector()
    sizes: list[int] = []
    pages: list[int] = []
    spied(one).before["project"] = lambda *arguments: sizes.append(_bytes(arguments[4]))
    read = feed_cursor.FeedCursor.read

    async def reading(*arguments: Any) -> list[FeedEntry]:
        entries = await read(*arguments)
        pages.append(_bytes(entries))
        return entries

    monkeypatch.setattr(feed_cursor.FeedCursor, "read", reading)
    await world.start(one)
    await world.settled_down()
    await world.check(ids)
    assert max(sizes) <= 1_000_000
    # The first page of all is read without knowing how large entries are.
    assert max(pages) <= 3_000_000
    assert max(pages[1:]) <= 1_500_000


async def test_a_batch_that_takes_too_long_is_halved(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.admit()
    ids = await _large(world, 40, 100_000)
    one = world.projector()
    sizes: list[int] = []

    def time_out(*arguments: Any) -> None:
        sizes.append(_bytes(arguments[4]))
        if sizes[-1] > 800_000:
            raise LedgerUnavailable("it took too long")

    spied(one).before["project"] = time_out
    monkey = pytest.MonkeyPatch()
    monkey.setattr(feed_cursor, "MOST_BYTES", 4_000_000)
    await world.start(one)
    await world.settled_down()
    monkey.undo()
    await world.check(ids)
    assert max(sizes) > 800_000


# Dead letters --------------------------------------------------------------------------------------


async def test_letters_that_cannot_be_told_hide_no_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_PAGE", 3)
    await world.admit()
    (dead,) = await world.submit(1)
    await world.work(DeadLetter(FAILURE))
    feed, scribe = Feed(), Scribe(world.ledger)
    for number in range(7):
        # The engine has lost them; they wait for the reconciler.
        name = f"lost-{number}"
        dies = feed.failed(name, _S.DLQ_PENDING, dlq_id=f"!{number}")
        await scribe.write(feed.entry(feed.created(name), feed.claimed(name), dies))
    await scribe.write(*await world.engine.read_feed(QUEUE, "", 100))
    letters = DeadLetterConfirmer(world.engine, world.ledger)
    assert await letters.confirm_all(QUEUE) == 7
    assert await state_of(world, dead) is State.FAILED
    assert len(await scribe.projection.unacked_dead_letters(QUEUE, 100)) == 7


async def test_an_error_with_one_letter_hinders_no_other(world: World) -> None:
    await world.admit()
    ids = await world.submit(5)
    await world.work(DeadLetter(FAILURE))
    await Scribe(world.ledger).write(*await world.engine.read_feed(QUEUE, "", 100))
    engine = Spy(world.engine)

    def break_down(queue: str, job_id: str, *_: Any, **__: Any) -> None:
        if job_id == ids[2]:
            raise RuntimeError("what is this?")

    engine.before["move"] = break_down
    assert await DeadLetterConfirmer(engine, world.ledger).confirm_all(QUEUE) == 1
    assert world.ledger.projection is not None
    assert [letter.key.job_id for letter in await world.ledger.projection.unacked_dead_letters(QUEUE, 10)] == [ids[2]]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "ORPHAN_RECHECK_S", 0.2)


async def _trim(world: World) -> None:
    """As if a ledger had read all of it."""
    await world.submit(1)
    await world.engine.trim_feed(QUEUE, (await world.end()).position)


async def _projected(world: World) -> Projection:
    assert world.ledger.projection is not None
    projection = world.ledger.projection
    at = await projection.acquire(QUEUE, "another", 1)
    assert at is not None
    await projection.project(QUEUE, "another", 1, at, await world.engine.read_feed(QUEUE, "", 100))
    return projection


@pytest.mark.usefixtures("soon")
async def test_a_job_that_a_new_ledger_never_heard_of_gets_its_letter(world: World) -> None:
    await world.admit()
    (dead,) = await world.submit(1)
    await world.work(DeadLetter(FAILURE))
    await _trim(world)
    await world.start()
    await until(lambda: _is_in(world, dead, State.FAILED), "it is told", 10)
    await world.settled_down()
    row = await job(world.ledger, dead)
    assert (row["state"], row["job_type"], row["payload"]) == ("failed", "add", "{}")
    (letter,) = await rows(world.ledger, "SELECT * FROM dlq_items")
    assert (letter["job_id"], letter["dlq_id"], letter["error_code"]) == (dead, row["dlq_id"], "TASK_ERROR")
    assert letter["acked_at"] is not None


@pytest.mark.usefixtures("soon")
async def test_a_job_whose_end_a_ledger_has_forgotten_gets_its_letter(world: World) -> None:
    await world.admit()
    (dead,) = await world.submit(1)
    claims = await world.claim()
    await _projected(world)
    await world.settle(claims, DeadLetter(FAILURE))
    await _trim(world)
    await world.start()
    await until(lambda: _is_in(world, dead, State.FAILED), "it is told", 10)
    await world.settled_down()
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await story(world.ledger, dead) == names
    (letter,) = await rows(world.ledger, "SELECT * FROM dlq_items")
    assert (letter["error"], letter["acked_at"] is None) == ("boom", False)


@pytest.mark.usefixtures("soon")
async def test_a_job_whose_letter_is_acknowledged_is_moved_on(world: World) -> None:
    await world.admit()
    (dead,) = await world.submit(1)
    await world.work(DeadLetter(FAILURE))
    projection = await _projected(world)
    await projection.ack_dead_letters(await projection.unacked_dead_letters(QUEUE, 10))
    await world.start()
    await until(lambda: _is_in(world, dead, State.FAILED), "it is moved on", 10)
    await world.settled_down()
    await world.check([dead])


async def test_without_a_ledger_what_waits_for_one_ends(world: World) -> None:
    await world.admit()
    ids = await world.submit(2)
    await world.work(DeadLetter(FAILURE))
    settings = Settings.load(url=world.settings.url, namespace=world.settings.namespace)
    plain = build_engine(settings, SystemClock())
    await plain.open()
    unrecorded = OrphanedDeadLetters(plain)
    # Another process may have a ledger, and tell it in a moment.
    assert await unrecorded.finish(QUEUE) == 0
    assert await state_of(world, ids[0]) is State.DLQ_PENDING
    assert await OrphanedDeadLetters(world.engine).finish(QUEUE) == 0
    assert await unrecorded.finish(QUEUE) == 2
    assert [await state_of(world, job_id) for job_id in ids] == [State.FAILED] * 2
    assert (await plain.stats(QUEUE)).dead_letters == 2
    assert await unrecorded.finish(QUEUE) == 0
    await plain.close()


# A ledger that is down -----------------------------------------------------------------------------


async def test_a_ledger_that_is_down_is_told_of_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.admit()
    one = world.projector()
    spy = spied(one)
    await world.start(one)
    await world.submit(1)
    await world.settled_down()

    def down(*_: Any) -> None:
        raise LedgerUnavailable("it is away")

    with caplog.at_level(logging.INFO, "holdfast.projector"):
        spy.before.update(dict.fromkeys(("held_by_others", "acquire", "project", "position"), down))
        await world.submit(1)
        tries = len(spy.calls)
        await until(lambda: _is_true(len(spy.calls) >= tries + 6), "it is tried again and again")
        assert one.lag_ms > 0
        spy.before.clear()
        await world.settled_down()
        await until(lambda: _is_true("projector recovered" in caplog.text), "it says so")
    said = [record for record in caplog.records if "projector waiting" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]


async def test_the_end_does_not_wait_for_a_ledger_that_stands_still(
    redis_url: str, namespace: str, make_postgres: MakePostgres
) -> None:
    server = make_postgres(fsync=False)
    async with World(redis_url, server.url, namespace) as world:
        for number in range(5):
            await world.admit(f"q{number}")
        ledger = open_ledger(server.url)
        keeping = LedgerTasks(world.engine, ledger, world.settings)
        keeping.start()
        await until(lambda: _all_taken(world, 5), "all feeds are taken")
        server.pause()
        try:
            began = time.monotonic()
            await keeping.stop()
            assert time.monotonic() - began < 20, "as long as the ledger may take to answer"
        finally:
            server.resume()
            await ledger.close()


async def _is_true(value: bool) -> bool:
    return value


async def _is_in(world: World, job_id: str, state: State) -> bool:
    return await state_of(world, job_id) is state
