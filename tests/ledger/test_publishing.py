"""`publish_events`: job events go through the outbox, each once, in the transaction that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast
from holdfast.clock import SystemClock
from holdfast.core.job import Event
from holdfast.core.publishing import TEXT_LIMIT, EventPublishing, lane_of
from holdfast.core.states import FINAL, HEARTBEAT_EVENT, State
from holdfast.errors import Fatal, InvalidOption, LedgerUnavailable
from holdfast.ledger.port.ledger import FeedPosition, Ledger, PositionMoved
from holdfast.ledger.port.messages import OutboxEvent
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.ledger.sqlite.ledger import SqliteLedger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.settings import Settings
from holdfast.sqlite.connection import DatabaseFile
from holdfast.worker.worker import Worker
from tests.ledger.projection_rig import LEASE_MS, QUEUE, Feed, FeedWriter, rows
from tests.worker.support import eventually

ALL = EventPublishing("kafka", "job-events")


def open_publishing(url: str, publishing: EventPublishing | None = ALL) -> Ledger:
    if url.startswith("sqlite:///"):
        store = SqliteLedgerStore(DatabaseFile(url.removeprefix("sqlite:///")), prepare_ledger)
        return SqliteLedger(store, SystemClock(), publishing)
    return PostgresLedger(PostgresStore(url), publishing)


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    ledger = open_publishing(ledger_url)
    await ledger.open()
    yield ledger
    await ledger.close()


async def published(ledger: Ledger) -> list[OutboxEvent]:
    return list(reversed(await ledger.outbox.find(None, limit=10_000)))


async def published_seqs(ledger: Ledger) -> dict[str, list[int]]:
    """The sequence numbers of each job's published events, in the order of publishing."""
    found: dict[str, list[int]] = {}
    for event in await published(ledger):
        found.setdefault(event.key, []).append(msgspec.json.decode(event.payload)["seq"])
    return found


async def check(ledger: Ledger) -> int:
    """Check that every event but heartbeats is published once and in order; the number of events."""
    written = await rows(
        ledger, "SELECT job_id, seq FROM job_events WHERE type <> 'task.heartbeat' ORDER BY job_id, seq"
    )
    expected: dict[str, list[int]] = {}
    for row in written:
        expected.setdefault(row["job_id"], []).append(row["seq"])
    assert await published_seqs(ledger) == expected
    return len(written)


async def test_a_history_is_published_as_it_is_recorded(ledger: Ledger) -> None:
    feed, writer = Feed(), FeedWriter(ledger)
    await writer.write(feed.entry(feed.created("j")), feed.entry(feed.claimed("j"), feed.succeeded("j")))
    events = await published(ledger)
    assert [event.key for event in events] == ["j"] * 3
    first = events[0]
    assert (first.destination, first.topic, first.tenant_id) == ("kafka", "job-events", "default")
    assert first.headers == {"x-event-name": "task.created"}
    payloads = [msgspec.json.decode(event.payload) for event in events]
    assert [(payload["type"], payload["seq"]) for payload in payloads] == [
        ("task.created", 1),
        ("task.claimed", 2),
        ("task.succeeded", 3),
    ]
    assert payloads[0]["data"]["task"] == "add"
    assert payloads[0]["at"] == "2023-11-14T22:13:20Z"
    assert payloads[1] == {
        "type": "task.claimed",
        "job_id": "j",
        "queue": QUEUE,
        "tenant_id": "default",
        "at": "2023-11-14T22:13:20.001000Z",
        "seq": 2,
        "from_state": "queued",
        "to_state": "running",
        "attempt": 1,
        "retry_count": 0,
        "worker": "w1",
        "message": "",
        "data": None,
        "omitted": [],
    }
    assert payloads[2]["data"] == {"result": "3"}
    assert [event.created_at_ms for event in events] == [1_700_000_000_000 + number for number in range(3)]
    lanes = await rows(ledger, "SELECT DISTINCT lane FROM outbox_events")
    assert lanes == [{"lane": lane_of("kafka", "job-events", "j", "")}]


async def test_sequence_numbers_continue_across_batches(ledger: Ledger) -> None:
    feed, writer = Feed(), FeedWriter(ledger)
    await writer.write(feed.entry(*(feed.created(f"j{number}") for number in range(30))))
    await writer.write(feed.entry(*(feed.claimed(f"j{number}") for number in range(30))))
    heartbeat = feed.event("j0", None, None, 1, type=HEARTBEAT_EVENT)
    await writer.write(feed.entry(heartbeat), feed.entry(*(feed.succeeded(f"j{number}") for number in range(30))))
    assert await check(ledger) == 90
    assert (await published_seqs(ledger))["j0"] == [1, 2, 4], "heartbeats are not published"


async def test_anomalies_and_forks_are_published_as_recorded(ledger: Ledger) -> None:
    """The slow path: a fork, an event after the final one, unstorable text."""
    feed, writer = Feed(), FeedWriter(ledger)
    await writer.write(feed.entry(*feed.life("done"), feed.created("open"), feed.created("od\0d")))
    await writer.write(
        feed.entry(feed.succeeded("done"), feed.event("open", State.RETRYING, State.CANCELLED), feed.claimed("new"))
    )
    assert await rows(ledger, "SELECT type FROM job_events WHERE type = 'ledger.forked'")
    assert await check(ledger) > 6


async def test_only_the_configured_types_are_published(ledger_url: str) -> None:
    ledger = open_publishing(
        ledger_url, EventPublishing("kafka", "ends", frozenset({"task.succeeded", HEARTBEAT_EVENT}))
    )
    feed, writer = Feed(), FeedWriter(ledger)
    try:
        await writer.write(feed.entry(feed.created("j"), feed.claimed("j")))
        assert await published(ledger) == []
        await writer.write(feed.entry(feed.event("j", None, None, 1, type=HEARTBEAT_EVENT), feed.succeeded("j")))
        assert [event.headers["x-event-name"] for event in await published(ledger)] == [
            HEARTBEAT_EVENT,
            "task.succeeded",
        ]
    finally:
        await ledger.close()


async def test_nothing_is_published_by_default(ledger_url: str) -> None:
    ledger = open_publishing(ledger_url, None)
    feed, writer = Feed(), FeedWriter(ledger)
    try:
        await writer.write(feed.entry(*feed.life("j")))
        assert await published(ledger) == []
    finally:
        await ledger.close()


async def test_long_texts_are_omitted(ledger: Ledger) -> None:
    feed, writer = Feed(), FeedWriter(ledger)
    await writer.write(feed.entry(feed.created("j", payload='"' + "x" * TEXT_LIMIT + '"')))
    (event,) = await published(ledger)
    payload = msgspec.json.decode(event.payload)
    assert payload["omitted"] == ["payload"]
    assert "payload" not in payload["data"]
    assert payload["data"]["task"] == "add"


async def test_two_projectors_publish_nothing_twice(ledger: Ledger, ledger_url: str) -> None:
    """Both write the same entries; the second transaction is refused with all its outbox rows."""
    feed, other = Feed(), open_publishing(ledger_url)
    try:
        entries = [feed.entry(*feed.life(f"j{number}")) for number in range(20)]
        for each in (ledger, other):
            assert each.projection is not None
        outcomes = await asyncio.gather(
            *(each.projection.project(QUEUE, "p", LEASE_MS, FeedPosition(), entries) for each in (ledger, other)),  # type: ignore[union-attr]
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, PositionMoved) for outcome in outcomes) == 1
    finally:
        await other.close()
    assert await check(ledger) == 60


@pytest.mark.postgres
async def test_an_interrupted_batch_publishes_nothing(postgres_url: str) -> None:
    """Its session is terminated between the rows and the commit; the next attempt writes them."""
    ledger = open_publishing(postgres_url)
    assert isinstance(ledger, PostgresLedger)
    feed, writer = Feed(), FeedWriter(ledger)
    entry = feed.entry(*feed.life("j"), feed.created("k"))
    blocker = await ledger.store.connect()
    try:
        # The lock stops the projector after jobs and events, before the outbox.
        await blocker.execute("BEGIN")
        await blocker.execute("LOCK TABLE outbox_events IN EXCLUSIVE MODE")
        writing = asyncio.create_task(writer.write(entry))
        blocked = """
            FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
             AND query LIKE '%INSERT INTO outbox_events%'"""
        await eventually(lambda: ledger.store.fetch(f"SELECT pid {blocked}"))
        await ledger.store.execute(f"SELECT pg_terminate_backend(pid) {blocked}")
        with pytest.raises(LedgerUnavailable):
            await writing
        await blocker.execute("ROLLBACK")
        assert await published(ledger) == []
        assert await rows(ledger, "SELECT 1 FROM job_events") == []
        await writer.write(entry)
        assert await check(ledger) == 4
    finally:
        blocker.terminate()
        await ledger.close()


def test_event_ids_are_deterministic() -> None:
    event = Event(type="task.created", job_id="j", at_ms=1, to_state=State.QUEUED)
    later = msgspec.structs.replace(event, at_ms=2, worker="w")
    row, again = (ALL.row("q", 1, each, int) for each in (event, later))
    assert row[1] == again[1]
    others = (ALL.row("q", 2, event, int), ALL.row("other", 1, event, int))
    assert len({row[1], *(other[1] for other in others)}) == 3


# Embedded ------------------------------------------------------------------------------------------


async def test_the_embedded_engine_publishes_its_events(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    app = Holdfast(f"sqlite:///{path}", publish_events="kafka", heartbeat_interval_s=0.05)

    @app.task
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0.2 if b == 1 else 0)
        if b == 0:
            raise Fatal("nothing to add")
        return a + b

    async with app:
        worker = Worker(app)
        running = asyncio.create_task(worker.run())
        handles = [await add.submit(1, number) for number in range(5)]
        assert [await handle.result(timeout=60) for handle in handles[1:]] == [2, 3, 4, 5]
        await eventually(lambda: _ended(handles[0]))
        worker.drain()
        await running
    ledger = EmbeddedLedger(DatabaseFile(str(path)), SystemClock())
    try:
        assert await check(ledger) >= 15
        assert await rows(ledger, "SELECT 1 FROM job_events WHERE type = 'task.heartbeat'")
        ends = [event for event in await published(ledger) if event.key == handles[4].id]
    finally:
        await ledger.close()
    payloads = [msgspec.json.decode(event.payload) for event in ends]
    assert [payload["type"] for payload in payloads] == ["task.created", "task.claimed", "task.succeeded"]
    assert payloads[0]["data"]["task"].endswith("add")
    assert payloads[2]["data"] == {"result": "5"}
    assert {event.topic for event in ends} == {"holdfast.job-events"}


async def _ended(handle: Any) -> bool:
    return (await handle.state()) in FINAL


# Settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "redis://localhost"}, "needs a ledger"),
        ({"outbox_url": "sqlite:///other.db"}, "outbox_url"),
        ({"publish_events": "holdfast"}, "name a broker"),
        ({"publish_event_types": ("task.exploded",)}, "unknown event types: task.exploded; known: .*task.succeeded"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidOption, ValueError), match=message):
        Settings(**{"url": "sqlite:///jobs.db", "publish_events": "kafka"} | options)


def test_publishing_is_off_unless_configured() -> None:
    assert Settings(url="sqlite:///jobs.db").engine_options().publishing is None
    on = Settings(url="sqlite:///jobs.db", publish_events="kafka", publish_event_types=("task.failed",))
    assert on.engine_options().publishing == EventPublishing("kafka", "holdfast.job-events", frozenset({"task.failed"}))
    # With a separate ledger, the projector publishes.
    assert (
        Settings(url="sqlite:///a.db", ledger="sqlite:///b.db", publish_events="kafka").engine_options().publishing
        is None
    )
