"""Migrations: the same tables as a fresh ledger, atomic, and safe to run concurrently."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger import migrate, revisions
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.schema.columns import HEAD, TABLE, metadata
from holdfast.sqlite.connection import DatabaseFile
from holdfast.verification.chaos.servers import free_port

#: Queries for everything in which two PostgreSQL schemas can differ.
_CATALOGUE = {
    "columns": """
        SELECT table_name, ordinal_position, column_name, data_type, is_nullable, column_default, collation_name
        FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "indexes": """
        SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2""",
    "others": """
        SELECT relkind::text, relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
        AND relkind NOT IN ('r', 'i') ORDER BY 1, 2""",
}


#: All migrations, the oldest first.
VERSIONS = ["0001", "0002", "0003", "0004"]
#: Rows of the first version, with a value in every column that the second one renames.
_FIRST_ROWS = (
    """INSERT INTO jobs (job_id, queue, job_type, state, priority, last_seq, idempotency_key, payload, created_at,
                         updated_at, finished_at, told_at)
       VALUES ('j', 'q', 'print', 'succeeded', 1, 3, 'j', '{}', $at, $at, $at, $at)""",
    """INSERT INTO approvals (approval_id, job_id, queue, job_type, payload_hash, requested_by, requested_at, told)
       VALUES ('a', 'j', 'q', 'print', 'ab', 'ada', $at, 'requested')""",
    "INSERT INTO approval_votes (approval_id, person, approve, at) VALUES ('a', 'bob', 1, $at)",
    """INSERT INTO operator_events (id, type, actor, target, target_id, at, told_at)
       VALUES ('o', 'alert.backlog', 'holdfast', 'queue', 'q', $at, $at)""",
    "INSERT INTO outbox_lanes (lane, relay, until) VALUES (1, 'r', $at)",
    "INSERT INTO feed_positions (feed, position, nonce, until, updated_at) VALUES ('q', '1', 'n', $at, $at)",
)
_RENAMED = (
    ("jobs", "told_at", "notified_at"),
    ("approvals", "told", "notified_status"),
    ("approval_votes", "person", "voter"),
    ("operator_events", "told_at", "notified_at"),
    ("outbox_lanes", "until", "lease_expires_at"),
    ("feed_positions", "until", "lease_expires_at"),
)


@pytest.fixture
async def empty(empty_postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = migrate.migration_store(empty_postgres_url)
    yield store
    await store.close()


# The same tables -----------------------------------------------------------------------------------


@pytest.mark.postgres
async def test_migrations_create_the_schema_of_a_fresh_ledger_on_postgres(
    empty: PostgresStore, empty_postgres_url: str
) -> None:
    await migrate.up(empty)
    migrated = await _catalogue(empty_postgres_url)
    await migrate.down(empty)
    engine = create_async_engine(empty_postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    fresh = await _catalogue(empty_postgres_url)
    assert len(fresh["columns"]) > 100
    for part, rows in fresh.items():
        assert [row for row in migrated[part] if TABLE not in row[0]] == rows, part


async def test_migrations_create_the_schema_of_a_fresh_ledger_in_a_file(tmp_path: Path) -> None:
    await migrate.up(tmp_path / "migrated.db")
    store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "fresh.db")), prepare_ledger)
    await store.open()
    await store.close()
    migrated, fresh = _schema(tmp_path / "migrated.db"), _schema(tmp_path / "fresh.db")
    assert len(fresh) > 20
    assert migrated == fresh


async def test_a_migrated_file_can_be_opened(tmp_path: Path) -> None:
    await migrate.up(tmp_path / "ledger.db")
    store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger)
    await store.open()
    await store.close()


def test_head_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(revisions._SCRIPTS)).get_current_head() == HEAD


def test_the_migrations_are_in_the_package() -> None:
    assert {path.name for path in revisions._SCRIPTS.iterdir()} >= {"env.py", "script.py.mako", "versions"}


@pytest.mark.postgres
async def test_every_business_index_leads_with_the_tenant(postgres_url: str) -> None:
    without_tenant = {"feed_positions", "feed_entries", "ledger_owner", "tokens", "announced_tasks", TABLE}
    without_tenant |= {"outbox_lanes", "trigger_presences", "trigger_pauses"}
    # A relay serves all tenants.
    relays = {f"outbox_events_{name}" for name in ("pk", "waiting", "by_key", "retrying", "in_the_way", "by_sent")}
    catalogue = await _catalogue(postgres_url)
    for table, name, definition in catalogue["indexes"]:
        if table not in without_tenant and name not in relays:
            assert "btree (tenant_id, " in definition, name


# Up, down, status ----------------------------------------------------------------------------------


@pytest.mark.postgres
async def test_down_leaves_nothing_on_postgres(empty: PostgresStore, empty_postgres_url: str) -> None:
    await migrate.up(empty)
    change = await migrate.down(empty)
    assert (change.before, change.after) == (HEAD, None)
    assert not any((await _catalogue(empty_postgres_url)).values())


async def test_down_leaves_nothing_in_a_file(tmp_path: Path) -> None:
    await migrate.up(tmp_path / "ledger.db")
    await migrate.down(tmp_path / "ledger.db")
    assert _schema(tmp_path / "ledger.db") == []
    assert (await migrate.up(tmp_path / "ledger.db")).after == HEAD


async def test_up_twice_changes_nothing(ledger_store: migrate.Target) -> None:
    assert (await migrate.up(ledger_store)).before is None
    again = await migrate.up(ledger_store)
    assert (again.before, again.after) == (HEAD, HEAD)


async def test_concurrent_migrations_are_safe(ledger_store: migrate.Target) -> None:
    others = [ledger_store.clone() if isinstance(ledger_store, PostgresStore) else ledger_store for _ in range(4)]
    changes = await asyncio.gather(*(migrate.up(other) for other in others))
    assert sorted(change.before or "" for change in changes) == ["", HEAD, HEAD, HEAD]
    for other in others:
        if isinstance(other, PostgresStore):
            await other.close()


async def test_status_changes_nothing(ledger_store: migrate.Target) -> None:
    before = await migrate.status(ledger_store)
    assert (before.version, [migration.version for migration in before.pending]) == (None, VERSIONS)
    if isinstance(ledger_store, Path):
        assert ledger_store.name not in os.listdir(ledger_store.parent)
    await migrate.up(ledger_store)
    after = await migrate.status(ledger_store)
    assert (after.version, after.pending, after.newer) == (HEAD, [], False)


async def test_renamed_columns_keep_their_values_up_and_down(ledger_store: migrate.Target) -> None:
    await migrate.up(ledger_store, "0001")
    for statement in _FIRST_ROWS:
        await _rows(ledger_store, statement)
    before = [await _rows(ledger_store, f"SELECT {old} FROM {table}") for table, old, _ in _RENAMED]
    assert all(rows and rows[0][0] for rows in before)
    await migrate.up(ledger_store, "0002")
    assert [await _rows(ledger_store, f"SELECT {new} FROM {table}") for table, _, new in _RENAMED] == before
    await migrate.down(ledger_store, "0001")
    assert [await _rows(ledger_store, f"SELECT {old} FROM {table}") for table, old, _ in _RENAMED] == before


async def test_a_newer_ledger_is_not_migrated(ledger_store: migrate.Target) -> None:
    await migrate.up(ledger_store)
    await _set_version(ledger_store, "0999")
    assert (await migrate.status(ledger_store)).newer
    for change in (migrate.up, migrate.down):
        with pytest.raises(SchemaMismatch, match="upgrade holdfast"):
            await change(ledger_store)
    assert (await migrate.status(ledger_store)).version == "0999"


async def test_a_failed_migration_leaves_nothing(ledger_store: migrate.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle")

    # An index of the last table: everything else exists by then.
    real = op.create_index
    monkeypatch.setattr(
        op, "create_index", lambda name, *a, **k: fail() if "anomalies" in name else real(name, *a, **k)
    )
    with pytest.raises(RuntimeError, match="in the middle"):
        await migrate.up(ledger_store)
    monkeypatch.undo()
    assert (await migrate.status(ledger_store)).version is None
    assert (await migrate.up(ledger_store)).before is None


@pytest.mark.postgres
async def test_a_ledger_shares_a_database_with_an_application(empty: PostgresStore) -> None:
    await empty.execute("CREATE TABLE alembic_version (version_num text); ")
    await empty.execute("INSERT INTO alembic_version VALUES ('theirs')")
    await migrate.up(empty)
    await migrate.down(empty)
    assert [tuple(row) for row in await empty.fetch("SELECT version_num FROM alembic_version")] == [("theirs",)]


@pytest.mark.postgres
async def test_a_ledger_in_its_own_schema(empty: PostgresStore, empty_postgres_url: str) -> None:
    await empty.execute("CREATE SCHEMA apart")
    store = migrate.migration_store(f"{empty_postgres_url}?options=-csearch_path%3Dapart")
    assert (await migrate.up(store)).after == HEAD
    assert (await migrate.up(store)).before == HEAD
    assert (await migrate.status(empty)).version is None
    await store.close()


# Foreign files -------------------------------------------------------------------------------------


async def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    for change in (migrate.up, migrate.down, migrate.status):
        with pytest.raises(InvalidOption, match="another program"):
            await change(path)


async def test_an_unreachable_database_raises_unavailable() -> None:
    store = migrate.migration_store(f"postgresql://u:secret@127.0.0.1:{free_port()}/db")
    for change in (migrate.up, migrate.down, migrate.status):
        with pytest.raises(LedgerUnavailable, match="nothing listens"):
            await change(store)
    await store.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An address without a ledger."""
    return tmp_path / "ledger.db" if request.param == "sqlite" else request.getfixturevalue("empty")


async def _rows(store: migrate.Target, statement: str) -> list[tuple[Any, ...]]:
    if isinstance(store, PostgresStore):
        return [tuple(row) for row in await store.fetch(statement.replace("$at", "timestamptz '2026-01-02 03:04:05Z'"))]
    assert isinstance(store, Path)
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute(statement.replace("$at", "1767323045000")).fetchall()
        connection.commit()
        return rows


async def _set_version(store: migrate.Target, version: str) -> None:
    if isinstance(store, PostgresStore):
        await store.execute(f"UPDATE {TABLE} SET version_num = $1", version)
        return
    assert isinstance(store, Path)
    connection = sqlite3.connect(store)
    connection.execute(f"UPDATE {TABLE} SET version_num = ?", (version,))
    connection.commit()
    connection.close()


async def _catalogue(url: str) -> dict[str, list[tuple[Any, ...]]]:
    connection = await asyncpg.connect(url)
    try:
        return {part: [tuple(row) for row in await connection.fetch(query)] for part, query in _CATALOGUE.items()}
    finally:
        await connection.close()


def _schema(path: Path) -> list[tuple[str, ...]]:
    """Definitions and columns of all tables, with normalised whitespace."""
    connection = sqlite3.connect(path)
    try:
        # SQLite does not drop its internal table.
        made = "SELECT type, name, sql FROM sqlite_schema WHERE name <> 'sqlite_sequence' ORDER BY type, name"
        rows = connection.execute(made).fetchall()
        found: list[tuple[str, ...]] = [(kind, name, _normalise(sql)) for kind, name, sql in rows]
        for kind, name, _ in rows:
            if kind == "table":
                found += [("column", name, str(row)) for row in connection.execute(f"PRAGMA table_xinfo({name})")]
        return found
    finally:
        connection.close()


def _normalise(sql: str | None) -> str:
    """Normalise whitespace and the order of a table's constraints."""
    words = " ".join((sql or "").split())
    if not words.startswith("CREATE TABLE"):
        return words
    head, _, rest = words.partition("(")
    parts = re.split(r", (?=CONSTRAINT )", rest.rpartition(")")[0].strip())
    return f"{head}({parts[0]}, {', '.join(sorted(parts[1:]))})"
