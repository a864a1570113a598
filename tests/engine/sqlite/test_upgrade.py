"""Files of earlier releases: refused until they are migrated, then equivalent to new ones."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.core.job import Failure
from holdfast.core.states import State
from holdfast.core.text import error_fingerprint
from holdfast.core.verdict import SettleResult, Succeed
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.sqlite import ledger_schema as upgrading
from holdfast.engine.sqlite.ledger_schema import upgrade
from holdfast.engine.sqlite.schema import SCHEMA_VERSION, prepare_schema
from holdfast.errors import EngineUnavailable, InvalidOption, SchemaMismatch
from holdfast.sqlite.connection import open_writer
from holdfast.testing.inline import ManualClock
from tests.engine.sqlite.rig import QUEUE, envelope, open_engine, query_file, settle

RELEASES = Path(__file__).parent / "data"
#: Table, column, and its name up to the third release.
RENAMED = [(table, new, old) for (table, new), old in upgrading._RENAMED_COLUMNS.items()]
#: A time after the file was written.
NOW_MS = ManualClock().now_ms() + 10_000


@pytest.fixture(params=[1, 2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path, version: int) -> Path:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((RELEASES / f"sqlite_v{version}.sql").read_text("utf-8"))
    return path


def schema(path: Path) -> list[tuple[str, str, str]]:
    return query_file(
        path, "SELECT type, name, sql FROM sqlite_schema WHERE name <> 'sqlite_sequence' ORDER BY type, name"
    )


async def test_an_old_file_is_refused_and_left_alone(path: Path, version: int) -> None:
    before = schema(path)
    with pytest.raises(
        SchemaMismatch, match=f"version {version}, .* needs {SCHEMA_VERSION}; run `holdfast migrate up`"
    ):
        async with open_engine(path):
            pass
    assert schema(path) == before


def test_a_migrated_file_has_the_schema_of_a_fresh_one(path: Path, tmp_path: Path) -> None:
    open_writer(tmp_path / "new.db", prepare_schema).close()
    assert upgrade(path)
    assert schema(path) == schema(tmp_path / "new.db")
    for pragma in ("user_version", "application_id"):
        assert query_file(path, f"PRAGMA {pragma}") == query_file(tmp_path / "new.db", f"PRAGMA {pragma}")
    assert query_file(path, "PRAGMA integrity_check") == [("ok",)]
    assert not upgrade(path)


def test_migration_loses_no_data(path: Path, version: int) -> None:
    columns = "id, tenant_id, job_id, state, came_from, attempt, retry_count, run_at, line, due_at, lease_until"
    columns += (
        ", worker, place, deliveries, token, last_seq, meta, result, payload, error_code, last_error, finished_at"
    )
    columns += ", idempotency_key"
    jobs = query_file(path, f"SELECT {columns} FROM jobs ORDER BY id")
    events = "SELECT id, tenant_id, job_id, job, seq, type, from_state, to_state, attempt, worker, at FROM job_events"
    events += " ORDER BY id"
    histories, keys = query_file(path, events), query_file(path, "SELECT * FROM submission_keys")
    renamed = [query_file(path, f"SELECT {old} FROM {table}") for table, _, old in RENAMED] if version == 3 else []
    dlq_ids = query_file(path, "SELECT job_id, dlq_id FROM jobs WHERE dlq_id IS NOT NULL")
    dead_letters = query_file(
        path, "SELECT tenant_id, dlq_id, job_id, payload, error, stack, history, failed_at FROM dlq_items"
    )
    entries = query_file(path, "SELECT queue, position, first_event, nonce, bytes, total_bytes FROM feed_entries")
    assert {row[3] for row in jobs} == set(State)
    upgrade(path)
    if version == 3:
        assert all(any(value for (value,) in rows) for rows in renamed), "a renamed column is empty in the file"
        assert [query_file(path, f"SELECT {new} FROM {table}") for table, new, _ in RENAMED] == renamed
    for old, new in (("came_from", "previous_state"), ("line", "ready_seq"), ("lease_until", "lease_expires_at")):
        columns = columns.replace(f" {old},", f" {new},")
    columns = columns.replace(" lease_until,", " lease_expires_at,").replace(" place,", " claim_seq,")
    events = events.replace(" job,", " job_row,")
    migrated = query_file(path, f"SELECT {columns} FROM jobs ORDER BY id")
    meta_index = columns.split(", ").index("meta")
    assert [row[:meta_index] + row[meta_index + 1 :] for row in migrated] == [
        row[:meta_index] + row[meta_index + 1 :] for row in jobs
    ]
    for old, new in zip(jobs, migrated, strict=True):
        before, after = (msgspec.json.decode(row[meta_index] or "{}") for row in (old, new))
        # Jobs that wait for a ledger did not have the id of their dead letter.
        assert after == before | {key: after[key] for key in after.keys() - before.keys() if key == "dlq_id"}
    assert query_file(path, events) == histories
    # Keys of earlier releases have no fingerprint.
    assert query_file(path, "SELECT * FROM submission_keys") == [(*key, "") for key in keys]
    assert set(query_file(path, "SELECT job_id, dlq_id FROM jobs")) >= set(dlq_ids)
    assert (
        query_file(path, "SELECT tenant_id, dlq_id, job_id, payload, error, stack, history, acked_at FROM dlq_items")
        == dead_letters
    )
    assert (
        query_file(path, "SELECT queue, position, first_event, nonce, bytes, total_bytes FROM feed_entries") == entries
    )
    # Ids of deleted rows are not reused.
    jobs_made, events_written, notices = {1: (14, 37, 3), 2: (16, 39, 3), 3: (22, 53, 4)}[version]
    assert dict(query_file(path, "SELECT name, seq FROM sqlite_sequence WHERE seq > 0")) == {
        "jobs": jobs_made,
        "events": events_written,
        "notices": notices,
    }


@pytest.mark.parametrize("version", [3])
async def test_a_key_of_the_fourth_release_belongs_to_every_request(path: Path, tmp_path: Path) -> None:
    upgrade(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE submission_keys DROP COLUMN fingerprint")
        connection.execute("PRAGMA user_version = 4")
    open_writer(tmp_path / "new.db", prepare_schema).close()
    assert upgrade(path)
    assert schema(path) == schema(tmp_path / "new.db")
    async with open_engine(path, ManualClock(NOW_MS)) as engine:
        (receipt,) = await engine.submit([envelope(idempotency_key="k1", payload=b'{"other":1}')])
        assert (receipt.job_id, receipt.duplicate) == ("queued", True)


async def test_a_migrated_file_works(path: Path) -> None:
    upgrade(path)
    clock = ManualClock(NOW_MS)
    async with open_engine(path, clock) as engine:
        (running,) = await engine.recover_claims("w1", [QUEUE], ())
        assert running.job_id == "running"
        assert await settle(engine, running, Succeed(b"1")) is SettleResult.APPLIED
        claims = await engine.claim("w2", [QUEUE], 10, 0)
        assert [claim.job_id for claim in claims] == ["queued"]
        assert await settle(engine, claims[0], Succeed(b"1")) is SettleResult.APPLIED
        # The job's key is known.
        (receipt,) = await engine.submit([envelope(idempotency_key="k1")])
        assert (receipt.job_id, receipt.duplicate) == ("queued", True)
        clock.advance(120.0)
        due = await engine.claim("w2", [QUEUE], 10, 0)
        assert sorted(claim.job_id for claim in due) == ["delayed", "retrying"]
        for to in (State.DLQ_RECORDED, State.FAILED):
            await engine.move(QUEUE, "dlq_pending", to, actor="ann", reason="seen")
        await engine.move(QUEUE, "dlq_recorded", State.FAILED, actor="ann", reason="seen")
        infos = await engine.get(QUEUE, ["dlq_pending", "dlq_recorded"])
        assert all(info and info.state is State.FAILED and info.meta.dlq_id for info in infos)
        assert await engine.get_control("mails") == QueueControl(paused=True, worker_concurrency=3)
        # Dead letters of the same kind have the same fingerprint, including earlier ones.
        fingerprints = query_file(path, "SELECT error_code, fingerprint FROM dlq_items WHERE job_id = 'failed'")
        failure = Failure("TASK_ERROR", "no luck", "LuckError")
        assert fingerprints == [("TASK_ERROR", error_fingerprint("print", failure))]
        entries = await engine.read_feed(QUEUE, "", 1_000)
        created = {
            event.job_id: event.data or {} for entry in entries for event in entry.events if not event.from_state
        }
        assert created["succeeded"]["context"] == {"user": "u1"}
        assert created["succeeded"]["meta"] == '{"max_retries":3,"context":{"user":"u1"}}'
        assert created["retrying"]["meta"] == '{"max_retries":9}'
        assert "meta" not in created["failed"]
        assert (created["queued"]["run_at_ms"], created["queued"]["idempotency_key"]) == (0, "k1")
        assert created["delayed"]["run_at_ms"] > NOW_MS


@pytest.mark.parametrize("version", [2])
async def test_what_the_second_release_added_is_kept(path: Path) -> None:
    upgrade(path)
    query = "SELECT job_type, status, policies, reason, quorum, requested_by FROM approvals"
    assert query_file(path, query) == [("print", "requested", '["large-sums"]', "", 1, "ada")]
    async with open_engine(path, ManualClock(NOW_MS)) as engine:
        entries = await engine.read_feed(QUEUE, "", 1_000)
        created = {
            event.job_id: event.data or {} for entry in entries for event in entry.events if not event.from_state
        }
        assert created["second"]["meta"] == '{"max_retries":9,"context":{"user":"u2"}}'
        assert created["second"]["run_at_ms"] == NOW_MS + 3_600_000
        assert created["held"]["meta"] == '{"max_retries":4}'
        # The request of a cancelled job is withdrawn.
        await engine.move(QUEUE, "held", State.CANCELLED, actor="ann", reason="old")
    assert query_file(path, "SELECT status, decided_by FROM approvals") == [("withdrawn", "ann")]


@pytest.mark.parametrize("version", [1])
def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, jobs = schema(path), query_file(path, "SELECT * FROM jobs")
    monkeypatch.setitem(upgrading._RENAMED, "notices", "no_such_table")
    with pytest.raises(EngineUnavailable):
        upgrade(path)
    assert (schema(path), query_file(path, "SELECT * FROM jobs")) == (before, jobs)
    monkeypatch.undo()
    assert upgrade(path)


def test_only_holdfast_files_are_migrated(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE jobs (id)")
    with pytest.raises(InvalidOption, match="another program"):
        upgrade(theirs)
    with pytest.raises(EngineUnavailable):
        upgrade(tmp_path / "missing" / "jobs.db")
    fresh = tmp_path / "fresh.db"
    assert upgrade(fresh)
    assert query_file(fresh, "SELECT count(*) FROM jobs") == [(0,)]


@pytest.mark.parametrize("version", [4])
async def test_the_concurrency_that_was_set_stays_a_number_for_each_worker(tmp_path: Path, version: int) -> None:
    """The column was renamed, and its name now means the limit over all workers."""
    path = tmp_path / "old.db"
    async with open_engine(path) as engine:
        await engine.set_control("mails", QueueControl(paused=True))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE queues DROP COLUMN worker_concurrency")
        connection.execute("UPDATE queues SET concurrency = 3")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.commit()
    assert upgrade(path)
    async with open_engine(path) as engine:
        assert await engine.get_control("mails") == QueueControl(paused=True, worker_concurrency=3)
