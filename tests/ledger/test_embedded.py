"""The embedded ledger: its tables in the engine's file, and the writer shared with other SQL."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.job import Meta
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.core.verdict import DeadLetter, RetryLater, SettleResult, Succeed
from holdfast.engine.sqlite.schema import prepare_schema
from holdfast.errors import EngineUnavailable, InvalidOption, LedgerUnavailable
from holdfast.schema.columns import metadata
from holdfast.sqlite import writer as writers
from holdfast.sqlite.connection import exclusive_lock, open_writer
from holdfast.sqlite.transaction import INDEXED_STATES, Transaction
from holdfast.testing.inline import ManualClock
from tests.engine.sqlite.rig import FAILURE, QUEUE, envelope, open_engine, query_file, settle, start_one

DAY_S = 86_400.0
#: The engine's feed has the same name as the projector's table, which the embedded ledger does not need.
TABLES = [table for table in metadata.sorted_tables if table.name != "feed_entries"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_writer(path, prepare_schema)) as connection:
        yield connection


# Tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_column_of_the_ledger_exists(database: sqlite3.Connection, table: Any) -> None:
    found = {row[1] for row in database.execute(f"PRAGMA table_xinfo({table.name})")}
    assert {column.name for column in table.columns} <= found
    database.execute(str(table.select())).fetchall()


@pytest.mark.parametrize("state", sorted(State))
def test_rare_states_are_found_by_their_index(database: sqlite3.Connection, state: State) -> None:
    query = "SELECT * FROM jobs WHERE tenant_id = ? AND state = ? AND state != ?"
    query += " ORDER BY created_at DESC, job_id DESC LIMIT 9"
    plan = str(database.execute(f"EXPLAIN QUERY PLAN {query}", ("default", state.value, "succeeded")).fetchall())
    assert ("jobs_by_state" in plan) == (state in INDEXED_STATES)
    assert "jobs_by_time" in plan or state in INDEXED_STATES
    # Only jobs with the same time are sorted, never all jobs.
    assert "TEMP B-TREE FOR ORDER BY" not in plan


def test_a_jobs_events_are_found_by_an_index(database: sqlite3.Connection) -> None:
    query = "SELECT * FROM job_events WHERE tenant_id = ? AND job_id = ? AND queue = ? ORDER BY seq"
    plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}", ("default", "j", "q"))]
    assert not [step for step in plan if step.startswith("SCAN")], plan


async def test_events_in_the_file_equal_events_in_the_feed(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        meta = Meta(context={"user": None, "n": 12345678901234567890}, max_retries=2)
        claim = await start_one(engine, tenant_id="acme", idempotency_key="k", meta=meta, payload=b'{"a":1.10}')
        await engine.renew([claim.lease], [claim.lease])
        await settle(engine, claim, RetryLater(1_000, FAILURE))
        clock.advance(2.0)
        (claim,) = await engine.claim("w1", [QUEUE], 1, 0)
        await settle(engine, claim, DeadLetter(FAILURE))
        await settle(engine, await start_one(engine, run_at_ms=clock.now_ms() - 1), Succeed(b'{"b":2.0}'))
        feed_events = [event for entry in await engine.read_feed(QUEUE, "", 100) for event in entry.events]
    columns = "type, job_id, tenant_id, from_state, to_state, attempt, retry_count, worker, message, at"
    rows = query_file(path, f"SELECT {columns}, queue, data FROM job_events ORDER BY id")
    assert [(*row[:10], msgspec.json.decode(row[11]) if row[11] else None) for row in rows] == [
        (
            *(event.type, event.job_id, event.tenant_id, event.from_state, event.to_state, event.attempt),
            *(event.retry_count, event.worker, event.message, event.at_ms, event.data),
        )
        for event in feed_events
    ]
    assert {row[10] for row in rows} == {QUEUE}
    assert feed_events[0].data is not None
    stored = msgspec.json.decode(feed_events[0].data["meta"], type=Meta)
    assert stored.key_fingerprint
    assert msgspec.structs.replace(stored, key_fingerprint="") == meta
    assert feed_events[0].data["payload"] == '{"a":1.10}'
    seqs = query_file(
        path,
        "SELECT job_row, group_concat(seq) FROM (SELECT * FROM events ORDER BY job_row, seq) GROUP BY job_row",
    )
    assert seqs == [(1, "1,2,3,4,5,6,7,8"), (2, "1,2,3")]


async def test_the_creation_event_keeps_the_submitted_envelope(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        job = envelope(delay_ms=1_000, meta=Meta(max_retries=5))
        await engine.submit([job])
        before = (await engine.read_feed(QUEUE, "", 1))[0].events[0].data
        assert before is not None
        assert before["run_at_ms"] == clock.now_ms() + 1_000
        clock.advance(2.0)
        (claim,) = await engine.claim("w1", [QUEUE], 1, 0)
        await settle(engine, claim, RetryLater(1_000, FAILURE))
        assert (await engine.read_feed(QUEUE, "", 1))[0].events[0].data == before


async def test_heartbeats_leave_one_entry_for_valid_leases_only(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.submit([envelope() for _ in range(3)])
        one, two, three = await engine.claim("w1", [QUEUE], 3, 0)
        await settle(engine, three, Succeed(b"1"))
        before = len(await engine.read_feed(QUEUE, "", 100))
        leases = [one.lease, two.lease, three.lease]
        assert await engine.renew(leases, [one.lease, two.lease, three.lease]) == [three.lease]
        assert await engine.renew(leases[:2]) == []
        (entry,) = (await engine.read_feed(QUEUE, "", 100))[before:]
        heartbeats = [
            (
                heartbeat.type,
                heartbeat.job_id,
                heartbeat.from_state,
                heartbeat.to_state,
                heartbeat.attempt,
                heartbeat.worker,
            )
            for heartbeat in entry.events
        ]
        assert heartbeats == [(HEARTBEAT_EVENT, claim.job_id, None, None, 1, "w1") for claim in (one, two)]
        assert await settle(engine, one, Succeed(b"1")) is SettleResult.APPLIED


# Retention ------------------------------------------------------------------------------------------


def effect(key: str, job_id: str, state: str, expires_at: int | None) -> tuple[object, ...]:
    value = "1" if state == "done" else None
    return "default", key, state, value, 1, expires_at, "f", "x", "t", QUEUE, job_id, 1, "w1", 1


async def test_finished_jobs_are_pruned_with_their_events_and_steps(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, finished_ttl_ms=int(DAY_S * 1000)) as engine:
        jobs = [envelope() for _ in range(450)]
        await engine.submit(jobs)
        claims = await engine.claim("w1", [QUEUE], 500, 0)
        for claim in claims:
            await settle(engine, claim, Succeed(b"1"))
        still_open = await start_one(engine)

        def add_steps(transaction: Transaction) -> None:
            for claim in (*claims, still_open):
                row = ("default", claim.job_id, QUEUE, 1, "first", "1", 1, 1)
                transaction.execute("INSERT INTO job_steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

        await engine.write(add_steps)
        assert await engine.prune([QUEUE]) == 0
        clock.advance(DAY_S + 1)
        assert await engine.prune([QUEUE]) >= 450
    assert (
        query_file(path, "SELECT job_id FROM jobs")
        == query_file(path, "SELECT job_id FROM job_steps")
        == [(still_open.job_id,)]
    )
    assert query_file(path, "SELECT count(*) FROM events WHERE job_row NOT IN (SELECT id FROM jobs)") == [(0,)]


async def test_open_dead_letters_and_effects_in_doubt_are_not_pruned(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, finished_ttl_ms=1_000) as engine:
        dead_lettered = await start_one(engine)
        await settle(engine, dead_lettered, DeadLetter(FAILURE))
        in_doubt, plain = await start_one(engine), await start_one(engine)
        for claim in (in_doubt, plain):
            await settle(engine, claim, Succeed(b"1"))
        past, future = clock.now_ms(), clock.now_ms() + 10**9
        effects = [
            effect("doubt", in_doubt.job_id, "in_doubt", past),
            effect("reserved", "another", "reserved", past),
            effect("old", plain.job_id, "done", past),
            effect("young", plain.job_id, "done", future),
            effect("for ever", plain.job_id, "done", None),
        ]
        names = "tenant_id, key, state, value, created_at, expires_at, function, fingerprint, token, queue, job_id"
        names += ", attempt, worker, updated_at"
        marks = ", ".join("?" * 14)

        def add(transaction: Transaction) -> None:
            for row in effects:
                transaction.execute(f"INSERT INTO idempotency_keys ({names}) VALUES ({marks})", row)

        await engine.write(add)
        clock.advance(2.0)
        await engine.prune([QUEUE])
        assert {row[0] for row in query_file(path, "SELECT job_id FROM jobs")} == {
            dead_lettered.job_id,
            in_doubt.job_id,
        }
        kept = {row[0] for row in query_file(path, "SELECT key FROM idempotency_keys")}
        assert kept == {"doubt", "reserved", "young", "for ever"}
        await engine.write(
            lambda transaction: transaction.execute("UPDATE dlq_items SET status = 'discarded'").rowcount
        )
        await engine.prune([QUEUE])
        assert query_file(path, "SELECT job_id FROM jobs") == [(in_doubt.job_id,)]
        assert query_file(path, "SELECT count(*) FROM dlq_items") == [(0,)]


async def test_sent_events_and_executions_are_pruned_by_age(path: Path) -> None:
    clock = ManualClock()
    event = (
        "INSERT INTO outbox_events (tenant_id, id, destination, topic, lane, payload, status, next_retry_at, sent_at, "
    )
    event += "created_at) VALUES (?, ?, 'd', 't', 0, '{}', ?, ?, ?, 1)"
    execution = "INSERT INTO queue_executions (tenant_id, id, message_id, queue_name, status, started_at) VALUES "
    execution += "(?, ?, 'm', 'q', 'success', ?)"
    async with open_engine(path, clock, finished_ttl_ms=1_000) as engine:
        old, young = clock.now_ms(), clock.now_ms() + 1_500

        def add(transaction: Transaction) -> None:
            for tenant in ("acme", "default"):
                for name, at in (("old", old), ("young", young)):
                    transaction.execute(event, (tenant, name, "SENT", None, at))
                    transaction.execute(execution, (tenant, name, at))
                for status in ("NEW", "DEAD", "RETRYING"):
                    transaction.execute(event, (tenant, status, status, old if status == "RETRYING" else None, None))

        await engine.write(add)
        clock.advance(2.0)
        assert await engine.prune([QUEUE]) == 4
    assert query_file(path, "SELECT DISTINCT id FROM queue_executions") == [("young",)]
    kept = query_file(path, "SELECT DISTINCT id FROM outbox_events ORDER BY id")
    assert kept == [("DEAD",), ("NEW",), ("RETRYING",), ("young",)]


# Other SQL on the same writer -----------------------------------------------------------------------


async def test_other_sql_shares_the_transaction_and_rolls_back_alone(path: Path) -> None:
    async with open_engine(path) as engine:

        def insert(transaction: Transaction, queue: str, error: Exception | None = None) -> int:
            count = transaction.execute("INSERT INTO queues (queue, has_jobs) VALUES (?, 1)", (queue,)).rowcount
            if error is not None:
                raise error
            return count

        writes = [
            lambda transaction: insert(transaction, "one"),
            lambda transaction: insert(transaction, "two", ValueError("mine")),
            lambda transaction: insert(transaction, "three"),
        ]
        first, second, third = await asyncio.gather(*map(engine.write, writes), return_exceptions=True)
        assert (first, third) == (1, 1)
        assert isinstance(second, ValueError)
        assert await engine.queues() == ["one", "three"]


def prepare_notes(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT NOT NULL UNIQUE)")


def note(transaction: Transaction, text: str | None) -> int:
    transaction.effects.recorded.add("a queue")
    return transaction.execute("INSERT INTO notes VALUES (?)", (text,)).rowcount


async def test_a_file_of_another_kind_has_its_own_schema_and_errors(tmp_path: Path, path: Path) -> None:
    other_path = tmp_path / "ledger.db"
    writer = await asyncio.to_thread(
        writers.acquire_writer, other_path, prepare=prepare_notes, unavailable=LedgerUnavailable
    )
    try:
        assert await writer.perform(note, "one", unavailable=LedgerUnavailable) == 1
        with pytest.raises(LedgerUnavailable, match="invariant"):
            await writer.perform(note, "one", unavailable=LedgerUnavailable)
        with pytest.raises(EngineUnavailable):
            await writer.perform(note, None)
        assert query_file(other_path, "SELECT * FROM notes") == [("one",)]
        with pytest.raises(InvalidOption, match="another kind"):
            writers.acquire_writer(other_path, prepare=prepare_schema)
        other_path.rename(tmp_path / "aside.db")
        with pytest.raises(LedgerUnavailable, match=r"ledger\.db"):
            await writer.perform(note, "two", unavailable=LedgerUnavailable)
    finally:
        await asyncio.to_thread(writers.release_writer, writer)
    with pytest.raises(LedgerUnavailable, match="closed"):
        await writer.perform(note, "three", unavailable=LedgerUnavailable)
    with pytest.raises(LedgerUnavailable, match="cannot be opened"):
        writers.acquire_writer(tmp_path / "missing" / "x.db", prepare=prepare_notes, unavailable=LedgerUnavailable)


async def test_a_migration_waits_for_the_writer(path: Path) -> None:
    async with open_engine(path) as engine:
        order: list[str] = []

        def migrate() -> None:
            with exclusive_lock(path):
                order.append("migrated")

        def slow(transaction: Transaction) -> None:
            # Within the transaction: an exclusive lock has to wait until it ends.
            thread = loop.run_in_executor(None, migrate)
            threads.append(thread)
            order.append("written")

        loop, threads = asyncio.get_running_loop(), list[asyncio.Future[None]]()
        await engine.write(slow)
        await threads[0]
        assert order == ["written", "migrated"]


# Waiting for the feed -------------------------------------------------------------------------------


async def test_a_waiter_for_the_feed_is_woken_by_an_entry(path: Path) -> None:
    async with open_engine(path) as engine, open_engine(path) as other:
        assert await engine.wait_feed({QUEUE: "", "mails": ""}, 0) == []
        waiting = asyncio.create_task(engine.wait_feed({QUEUE: "", "mails": ""}, 10_000))
        await asyncio.sleep(0)
        await other.submit([envelope()])
        assert await asyncio.wait_for(waiting, 5) == [QUEUE]
        (entry,) = await engine.read_feed(QUEUE, "", 10)
        assert await engine.wait_feed({QUEUE: entry.position}, 20) == []
        await other.submit([envelope()])
        assert await engine.wait_feed({QUEUE: entry.position}, 0) == [QUEUE]
        assert [each.position for each in await engine.read_feed(QUEUE, entry.position, 1)] == [entry.position]


async def test_an_entry_with_a_durable_job_is_urgent(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.submit([envelope()])
        await engine.submit([envelope(), envelope(durable=True)])
        assert [entry.urgent for entry in await engine.read_feed(QUEUE, "", 10)] == [False, True]
