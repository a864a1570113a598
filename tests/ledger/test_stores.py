"""The stores of the ledgers: connections, translated errors, notifications, and ownership by namespace."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import select, text

from holdfast.clock import SystemClock
from holdfast.core.job import JobKey
from holdfast.core.text import clean, decode_text
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger.checks import engine_name
from holdfast.ledger.postgres.ledger import PostgresLedger, owner_check
from holdfast.ledger.postgres.notifications import NOTIFY, payload
from holdfast.ledger.postgres.store import Connection, PostgresAddress, PostgresStore, StoreOptions
from holdfast.ledger.sqlite import ledger as sqlite_ledger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.schema import ledger_owner
from holdfast.sqlite.connection import DatabaseFile
from holdfast.verification.chaos.servers import free_port
from tests.conftest import MakePostgres

QUICK = StoreOptions(pool_size=2, connect_timeout_s=2, reply_timeout_s=1)

pytestmark = pytest.mark.postgres


# Addresses -----------------------------------------------------------------------------------------


def test_an_address_is_printed_without_its_password() -> None:
    address = PostgresAddress.parse("postgres://holdfast:p%40ss:w%2Frd@db.example:5433/led%20ger?sslmode=require")
    assert address.name == "postgresql://holdfast@db.example:5433/led ger"
    assert "p%40ss" in address.dsn
    assert "sslmode=require" in address.dsn


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://user:secret@host", "names no database"),
        ("postgresql://user:secret@host/db?sslmood=require", "unknown option sslmood"),
        ("postgresql://user:secret@host:port/db", "host or port cannot be read"),
        ("postgresql://user:sec/ret@host:5432/db", "host or port cannot be read"),
        ("mysql://user:secret@host/db", "must begin with postgresql"),
    ],
)
def test_a_bad_address_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as refused:
        PostgresStore(url)
    assert "sec" not in str(refused.value)


async def test_a_path_may_contain_special_characters(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "a #?% b.db")
    await store.open()
    async with store.read_engine.connect() as connection:
        assert (await connection.execute(select(ledger_owner.c.namespace))).scalar_one() == "ours"
    await store.close()


# Text ----------------------------------------------------------------------------------------------


async def test_cleaned_text_can_be_stored(postgres_url: str) -> None:
    unstorable = "a\0b\ud800c 😀 é"
    store = PostgresStore(postgres_url)
    ((stored,),) = await store.fetch("SELECT $1::text", clean(unstorable))
    assert stored == "a\ufffdb\ufffdc 😀 é"
    ((stored,),) = await store.fetch("SELECT $1::text", decode_text(b"\xff\0x"))
    assert stored == "\ufffd\ufffdx"
    await store.close()


def test_clean_text_is_not_changed() -> None:
    assert clean(None) is None
    assert clean("plain") == "plain"
    assert clean("😀 é") == "😀 é"


# Errors --------------------------------------------------------------------------------------------


async def test_a_refused_connection_raises_unavailable() -> None:
    store = PostgresStore(f"postgresql://u:secret@127.0.0.1:{free_port()}/db", QUICK)
    for attempt in (store.execute("SELECT 1"), store.transact(_one), _read(store)):
        with pytest.raises(LedgerUnavailable, match="nothing listens there") as refused:
            await attempt
        assert "secret" not in str(refused.value)
    await store.close()


async def test_wrong_database_and_wrong_user(postgres_url: str) -> None:
    base = postgres_url.rpartition("/")[0]
    store = PostgresStore(f"{base}/not_there", QUICK)
    with pytest.raises(LedgerUnavailable, match="the database does not exist; create it"):
        await store.execute("SELECT 1")
    await store.close()
    store = PostgresStore(postgres_url.replace("postgres@", "unknown:secret@"), QUICK)
    with pytest.raises(LedgerUnavailable, match="it rejects this user") as refused:
        await store.execute("SELECT 1")
    assert "secret" not in str(refused.value)
    await store.close()


async def test_programming_errors_are_not_outages(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, QUICK)
    with pytest.raises(asyncpg.CheckViolationError):
        await store.execute("INSERT INTO ledger_owner (id, namespace, since) VALUES (2, '', now())")
    with pytest.raises(asyncpg.PostgresSyntaxError):
        await store.transact(lambda connection: connection.execute("SELEKT"))
    # The connection is usable and the transaction was rolled back.
    assert await store.transact(_one) == 1
    await store.close()


async def test_a_read_only_ledger_raises_unavailable(postgres_url: str) -> None:
    store = PostgresStore(f"{postgres_url}?options=-cdefault_transaction_read_only%3Don", QUICK)
    with pytest.raises(LedgerUnavailable, match=r"read-only .* point HOLDFAST_LEDGER at the primary"):
        await store.execute("INSERT INTO ledger_owner (id, namespace, since) VALUES (1, '', now())")
    await store.close()


@pytest.mark.faults
async def test_out_of_connections(make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False, max_connections="4", superuser_reserved_connections="0", max_wal_senders="0")
    connections = [await asyncpg.connect(server.url) for _ in range(4)]
    store = PostgresStore(server.url, QUICK)
    with pytest.raises(LedgerUnavailable, match="out of connections; raise its max_connections"):
        await store.execute("SELECT 1")
    with pytest.raises(LedgerUnavailable, match="out of connections"):
        await _read(store)
    for connection in connections:
        await connection.close()
    assert await store.transact(_one) == 1
    await store.close()


async def test_an_exhausted_pool_raises_unavailable(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, StoreOptions(pool_size=1, connect_timeout_s=0.2, reply_timeout_s=0.3))
    release = asyncio.Event()

    async def block(_: Connection) -> None:
        await release.wait()

    blocking = asyncio.create_task(store.transact(block))
    await asyncio.sleep(0)
    with pytest.raises(LedgerUnavailable, match="all 1 connections have been busy"):
        await store.transact(_one)
    release.set()
    await blocking
    assert await store.transact(_one) == 1
    await store.close()


@pytest.mark.faults
async def test_a_paused_server_raises_unavailable_and_recovers(make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    store = PostgresStore(server.url, QUICK)
    assert await store.transact(_one) == 1
    await _read(store)
    server.pause()
    for attempt in (store.transact(_one), store.execute("SELECT 1"), _read(store)):
        with pytest.raises(LedgerUnavailable, match="does not answer in time"):
            async with asyncio.timeout(8):
                await attempt
    server.resume()
    assert await store.transact(_one) == 1
    await _read(store)
    await store.close()


@pytest.mark.faults
async def test_after_a_restart_the_first_transaction_works(make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    store = PostgresStore(server.url, QUICK)
    await asyncio.gather(*(store.transact(_slow) for _ in range(2)))
    await _read(store)
    for _ in range(3):
        # Blocks the loop, so that the pool does not see its connections close.
        server.kill()
        server.start()
        assert await store.transact(_one) == 1
        await _read(store)
    await store.close()


@pytest.mark.faults
async def test_a_transaction_that_loses_its_server_is_not_repeated(make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    store = PostgresStore(server.url, QUICK)
    runs = 0

    async def work(connection: Connection) -> None:
        nonlocal runs
        runs += 1
        await connection.execute("SELECT 1")
        server.kill()
        await connection.execute("SELECT 1")

    with pytest.raises(LedgerUnavailable):
        await store.transact(work)
    assert runs == 1
    server.start()
    assert await store.transact(_one) == 1
    await store.close()


async def test_a_cancelled_transaction_leaves_nothing(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, StoreOptions(pool_size=1, connect_timeout_s=2, reply_timeout_s=2))
    began = asyncio.Event()

    async def work(connection: Connection) -> None:
        await connection.execute("INSERT INTO ledger_owner (id, namespace, since) VALUES (1, 'x', now())")
        began.set()
        await connection.execute("SELECT pg_sleep(60)")

    task = asyncio.create_task(store.transact(work))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.fetch("SELECT * FROM ledger_owner") == []
    await store.close()


async def test_a_closed_store_can_be_opened_again(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, QUICK)
    await store.close()
    await store.open()
    assert await store.transact(_one) == 1
    await store.close()
    await store.close()
    await store.open()
    await _read(store)
    await store.close()


async def test_a_closed_database_makes_no_new_connections(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, QUICK)
    await store.open()
    await store.close()
    with pytest.raises(LedgerUnavailable, match="has been closed"):
        await store.transact(_one)
    with pytest.raises(LedgerUnavailable, match="has been closed"):
        await _read(store)


async def test_a_write_does_not_reopen_a_closed_file(tmp_path: Path) -> None:
    store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger)
    await store.open()
    await store.close()
    with pytest.raises(LedgerUnavailable, match="has been closed"):
        await store.write(lambda transaction: transaction.execute("SELECT 1").fetchone())
    await store.open()
    assert await store.write(lambda transaction: transaction.execute("SELECT 1").fetchone()) == (1,)
    await store.close()


@pytest.mark.faults
async def test_closing_does_not_wait_for_a_paused_server(
    make_postgres: MakePostgres, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_postgres(fsync=False)
    ledger = PostgresLedger(PostgresStore(server.url))
    await ledger.open()
    await ledger.queries.jobs()
    waiting = asyncio.create_task(ledger.projection.wait_recorded([JobKey("default", "default", "x")], 60_000))
    await asyncio.sleep(0.2)
    server.pause()
    try:
        began = time.monotonic()
        await ledger.close()
        duration_s = time.monotonic() - began
    finally:
        server.resume()
    assert duration_s < 20
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


# Notifications -------------------------------------------------------------------------------------


async def test_waiters_are_notified_of_a_commit_on_postgres(postgres_url: str) -> None:
    store, other = PostgresStore(postgres_url, QUICK), PostgresStore(postgres_url, QUICK)
    with store.commits.listen("mail") as mail, store.commits.listen("images") as images:
        # Waiters are woken once when listening starts.
        assert await mail.wait(5)
        assert await images.wait(5)
        await other.fetch(NOTIFY, payload("mail", "1-0"))
        assert await mail.wait(5)
        assert not await images.wait(0.05)
        for notification in (payload("x" * 9_000, "1-0"), "5", "null", "no JSON"):
            await other.fetch(NOTIFY, notification)
            assert await mail.wait(5), notification
            assert await images.wait(5), notification
        await other.fetch(NOTIFY, payload("x" * 9_000, "1-0"))
        assert await mail.wait(5)
        assert await images.wait(5)
    await store.close()
    await other.close()


@pytest.mark.faults
async def test_notifications_resume_after_a_restart(make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    store = PostgresStore(server.url, QUICK)
    with store.commits.listen("mail") as mail:
        assert await mail.wait(5)
        await asyncio.to_thread(server.restart)
        # Woken once because a notification may have been missed …
        assert await mail.wait(10)
        await store.fetch(NOTIFY, payload("mail", "2-0"))
        # … and once by the notification.
        assert await mail.wait(5)
    await store.close()


async def test_waiters_are_notified_of_a_commit_in_a_file(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "ledger.db")
    other = store.sibling()
    await store.open()
    with store.commits.listen("mail") as mail, store.commits.listen("images") as images:
        await other.write(lambda transaction: transaction.effects.recorded.add("mail"))
        assert await mail.wait(5)
        assert not await images.wait(0.05)
    await store.close()
    await other.close()


async def test_a_waiter_registered_before_the_file_is_open_is_notified(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "ledger.db")
    with store.commits.listen("mail") as mail:
        await store.write(lambda transaction: transaction.effects.recorded.add("mail"))
        assert await mail.wait(5)
    await store.close()


# Ownership -----------------------------------------------------------------------------------------


async def test_a_database_belongs_to_one_namespace(postgres_url: str) -> None:
    ours = PostgresStore(postgres_url, QUICK, owner_check("ours"))
    assert await ours.transact(_one) == 1
    theirs = PostgresStore(postgres_url, QUICK, owner_check(""))
    for attempt in (theirs.transact(_one), _read(theirs)):
        with pytest.raises(InvalidOption, match=r"belongs to namespace ours, this is .the default one."):
            await attempt
    again = ours.clone()
    assert await again.transact(_one) == 1
    for store in (ours, theirs, again):
        await store.close()


async def test_a_file_belongs_to_one_namespace(tmp_path: Path) -> None:
    ours = _file_store(tmp_path / "ledger.db")
    await ours.open()
    theirs = _file_store(tmp_path / "ledger.db", "theirs")
    with pytest.raises(InvalidOption, match="belongs to namespace ours, this is theirs"):
        await theirs.open()
    await ours.close()
    await theirs.close()


async def test_another_engine_of_the_same_namespace_is_logged(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def open_with(engine: str) -> str:
        caplog.clear()
        if ledger_url.startswith("sqlite"):
            path = DatabaseFile(ledger_url.removeprefix("sqlite:///"))
            owner = sqlite_ledger.owner_check("mine", SystemClock(), engine)
            store: SqliteLedgerStore | PostgresStore = SqliteLedgerStore(path, prepare_ledger, owner)
        else:
            store = PostgresStore(ledger_url, QUICK, owner_check("mine", engine))
        await store.open()
        await store.close()
        return caplog.text

    caplog.set_level(logging.WARNING, "holdfast.ledger")
    one, two = engine_name("redis://u:secret@one"), engine_name("redis://two:7000/3")
    assert (one, two) == ("redis://one:6379/0", "redis://two:7000/3")
    assert await open_with(one) == ""
    assert await open_with(one) == ""
    assert f"was last used with the engine {one}, this is {two}" in await open_with(two)
    # The engine may have moved: the warning is logged once.
    assert await open_with(two) == ""


def test_the_order_of_an_engines_hosts_does_not_matter() -> None:
    sentinel = "redis+sentinel://u:secret@B:26379,a:26379/jobs/0"
    assert engine_name(sentinel) == "redis+sentinel://a:26379,b:26379/jobs/0"
    assert engine_name("redis+cluster://b:1,a:2") == engine_name("redis+cluster://:secret@a:2,b:1")


async def test_a_database_without_tables_is_a_schema_mismatch(empty_postgres_url: str) -> None:
    store = PostgresStore(empty_postgres_url, QUICK, owner_check(""))
    for attempt in (store.transact(_one), store.execute("SELECT 1"), _read(store)):
        with pytest.raises(SchemaMismatch, match=r"has no tables of holdfast yet.*run `holdfast migrate up`"):
            await attempt
    await store.close()


async def test_a_newer_database_is_a_schema_mismatch(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, QUICK)
    await store.execute("UPDATE holdfast_version SET version_num = '0999'")
    await store.close()
    store = PostgresStore(postgres_url, QUICK, owner_check(""))
    with pytest.raises(SchemaMismatch, match=r"is at version 0999.*upgrade holdfast here"):
        await store.execute("SELECT 1")
    await store.close()


async def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("this is not a database, it is only text " * 100)
    with pytest.raises(LedgerUnavailable, match=r"no database|not a database|damaged"):
        await _file_store(path).open()


async def test_a_query_does_not_create_a_file(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "ledger.db")
    with pytest.raises(LedgerUnavailable):
        async with store.read_engine.connect() as connection:
            await connection.execute(text("SELECT 1 FROM jobs"))
    assert not store.path.exists()
    await store.close()


async def test_a_query_cannot_write(tmp_path: Path) -> None:
    store = _file_store(tmp_path / "ledger.db")
    await store.open()
    with pytest.raises(LedgerUnavailable, match="readonly"):
        async with store.read_engine.begin() as connection:
            await connection.execute(text("DELETE FROM jobs"))
    await store.close()


def test_payloads_are_json() -> None:
    assert json.loads(payload('q"', "1-0")) == ['q"', "1-0"]


async def _one(connection: Connection) -> int:
    value: int = await connection.fetchval("SELECT 1")
    return value


async def _slow(connection: Connection) -> None:
    await connection.execute("SELECT pg_sleep(0.1)")


async def _read(store: PostgresStore) -> None:
    async with store.read_engine.connect() as connection:
        await connection.execute(text("SELECT 1"))


def _file_store(path: Path, namespace: str = "ours") -> SqliteLedgerStore:
    return SqliteLedgerStore(
        DatabaseFile(str(path)), prepare_ledger, sqlite_ledger.owner_check(namespace, SystemClock())
    )
