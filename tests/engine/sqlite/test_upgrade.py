"""Files of earlier releases: refused until they are migrated, then as good as new."""

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
from tests.engine.sqlite.rig import QUEUE, envelope, look, opened, settle

RELEASES = Path(__file__).parent / "data"
#: Table, column, and what it was called up to the third release.
RENAMED = [(table, new, old) for (table, new), old in upgrading._RENAMED_COLUMNS.items()]
#: When the file was written.
LATER_MS = ManualClock().now_ms() + 10_000


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
    return look(path, "SELECT type, name, sql FROM sqlite_schema WHERE name <> 'sqlite_sequence' ORDER BY type, name")


async def test_an_old_file_is_refused_and_left_alone(path: Path, version: int) -> None:
    before = schema(path)
    with pytest.raises(
        SchemaMismatch, match=f"version {version}, .* needs {SCHEMA_VERSION}; run `holdfast migrate up`"
    ):
        async with opened(path):
            pass
    assert schema(path) == before


def test_a_migrated_file_has_the_schema_of_a_fresh_one(path: Path, tmp_path: Path) -> None:
    open_writer(tmp_path / "new.db", prepare_schema).close()
    assert upgrade(path)
    assert schema(path) == schema(tmp_path / "new.db")
    for pragma in ("user_version", "application_id"):
        assert look(path, f"PRAGMA {pragma}") == look(tmp_path / "new.db", f"PRAGMA {pragma}")
    assert look(path, "PRAGMA integrity_check") == [("ok",)]
    assert not upgrade(path)


def test_nothing_is_lost_on_the_way(path: Path, version: int) -> None:
    columns = "id, tenant_id, job_id, state, came_from, attempt, retry_count, run_at, line, due_at, lease_until"
    columns += (
        ", worker, place, deliveries, token, last_seq, meta, result, payload, error_code, last_error, finished_at"
    )
    columns += ", idempotency_key"
    jobs = look(path, f"SELECT {columns} FROM jobs ORDER BY id")
    events = "SELECT id, tenant_id, job_id, job, seq, type, from_state, to_state, attempt, worker, at FROM job_events"
    events += " ORDER BY id"
    stories, keys = look(path, events), look(path, "SELECT * FROM submission_keys")
    renamed = [look(path, f"SELECT {old} FROM {table}") for table, _, old in RENAMED] if version == 3 else []
    dlq_ids = look(path, "SELECT job_id, dlq_id FROM jobs WHERE dlq_id IS NOT NULL")
    letters = look(path, "SELECT tenant_id, dlq_id, job_id, payload, error, stack, history, failed_at FROM dlq_items")
    entries = look(path, "SELECT queue, position, first_event, nonce, bytes, total_bytes FROM feed_entries")
    assert {row[3] for row in jobs} == set(State)
    upgrade(path)
    if version == 3:
        assert all(any(value for (value,) in rows) for rows in renamed), "a renamed column is empty in the file"
        assert [look(path, f"SELECT {new} FROM {table}") for table, new, _ in RENAMED] == renamed
    for old, new in (("came_from", "previous_state"), ("line", "ready_seq"), ("lease_until", "lease_expires_at")):
        columns = columns.replace(f" {old},", f" {new},")
    columns = columns.replace(" lease_until,", " lease_expires_at,").replace(" place,", " claim_seq,")
    events = events.replace(" job,", " job_row,")
    migrated = look(path, f"SELECT {columns} FROM jobs ORDER BY id")
    at = columns.split(", ").index("meta")
    assert [row[:at] + row[at + 1 :] for row in migrated] == [row[:at] + row[at + 1 :] for row in jobs]
    for old, new in zip(jobs, migrated, strict=True):
        before, after = (msgspec.json.decode(row[at] or "{}") for row in (old, new))
        # Jobs that wait for a ledger were not told which dead letter they have.
        assert after == before | {key: after[key] for key in after.keys() - before.keys() if key == "dlq_id"}
    assert look(path, events) == stories
    assert look(path, "SELECT * FROM submission_keys") == keys
    assert set(look(path, "SELECT job_id, dlq_id FROM jobs")) >= set(dlq_ids)
    assert (
        look(path, "SELECT tenant_id, dlq_id, job_id, payload, error, stack, history, acked_at FROM dlq_items")
        == letters
    )
    assert look(path, "SELECT queue, position, first_event, nonce, bytes, total_bytes FROM feed_entries") == entries
    # Ids of rows that are gone do not come again.
    jobs_made, events_written, notices = {1: (14, 37, 3), 2: (16, 39, 3), 3: (22, 53, 4)}[version]
    assert dict(look(path, "SELECT name, seq FROM sqlite_sequence WHERE seq > 0")) == {
        "jobs": jobs_made,
        "events": events_written,
        "notices": notices,
    }


async def test_a_migrated_file_goes_on_working(path: Path) -> None:
    upgrade(path)
    clock = ManualClock(LATER_MS)
    async with opened(path, clock) as engine:
        (running,) = await engine.recover_claims("w1", [QUEUE], ())
        assert running.job_id == "running"
        assert await settle(engine, running, Succeed(b"1")) is SettleResult.APPLIED
        claims = await engine.claim("w2", [QUEUE], 10, 0)
        assert [claim.job_id for claim in claims] == ["queued"]
        assert await settle(engine, claims[0], Succeed(b"1")) is SettleResult.APPLIED
        # Its key is known.
        (receipt,) = await engine.submit([envelope(idempotency_key="k1")])
        assert (receipt.job_id, receipt.duplicate) == ("queued", True)
        clock.advance(120.0)
        due = await engine.claim("w2", [QUEUE], 10, 0)
        assert sorted(claim.job_id for claim in due) == ["delayed", "retrying"]
        for to in (State.DLQ_RECORDED, State.FAILED):
            await engine.move(QUEUE, "dlq_pending", to, actor="ann", reason="seen")
        await engine.move(QUEUE, "dlq_recorded", State.FAILED, actor="ann", reason="seen")
        views = await engine.get(QUEUE, ["dlq_pending", "dlq_recorded"])
        assert all(view and view.state is State.FAILED and view.meta.dlq_id for view in views)
        assert await engine.get_control("mails") == QueueControl(paused=True, concurrency=3)
        # Dead letters of the same kind are found together, those from before included.
        kinds = look(path, "SELECT error_code, fingerprint FROM dlq_items WHERE job_id = 'failed'")
        failure = Failure("TASK_ERROR", "no luck", "LuckError")
        assert kinds == [("TASK_ERROR", error_fingerprint("print", failure))]
        entries = await engine.read_feed(QUEUE, "", 1_000)
        created = {
            event.job_id: event.data or {} for entry in entries for event in entry.events if not event.from_state
        }
        assert created["succeeded"]["context"] == {"user": "u1"}
        assert created["succeeded"]["meta"] == '{"max_retries":3,"context":{"user":"u1"}}'
        assert created["retrying"]["meta"] == '{"max_retries":9}'
        assert "meta" not in created["failed"]
        assert (created["queued"]["run_at_ms"], created["queued"]["idempotency_key"]) == (0, "k1")
        assert created["delayed"]["run_at_ms"] > LATER_MS


@pytest.mark.parametrize("version", [2])
async def test_what_the_second_release_knew_better_is_kept(path: Path) -> None:
    upgrade(path)
    asked = "SELECT job_type, status, policies, reason, quorum, requested_by FROM approvals"
    assert look(path, asked) == [("print", "requested", '["large-sums"]', "", 1, "ada")]
    async with opened(path, ManualClock(LATER_MS)) as engine:
        entries = await engine.read_feed(QUEUE, "", 1_000)
        created = {
            event.job_id: event.data or {} for entry in entries for event in entry.events if not event.from_state
        }
        assert created["second"]["meta"] == '{"max_retries":9,"context":{"user":"u2"}}'
        assert created["second"]["run_at_ms"] == LATER_MS + 3_600_000
        assert created["held"]["meta"] == '{"max_retries":4}'
        # Nobody has to decide about a job that is gone.
        await engine.move(QUEUE, "held", State.CANCELLED, actor="ann", reason="old")
    assert look(path, "SELECT status, decided_by FROM approvals") == [("withdrawn", "ann")]


@pytest.mark.parametrize("version", [1])
def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, jobs = schema(path), look(path, "SELECT * FROM jobs")
    monkeypatch.setitem(upgrading._RENAMED, "notices", "no_such_table")
    with pytest.raises(EngineUnavailable):
        upgrade(path)
    assert (schema(path), look(path, "SELECT * FROM jobs")) == (before, jobs)
    monkeypatch.undo()
    assert upgrade(path)


def test_only_our_files_are_migrated(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE jobs (id)")
    with pytest.raises(InvalidOption, match="another program"):
        upgrade(theirs)
    with pytest.raises(EngineUnavailable):
        upgrade(tmp_path / "missing" / "jobs.db")
    fresh = tmp_path / "fresh.db"
    assert upgrade(fresh)
    assert look(fresh, "SELECT count(*) FROM jobs") == [(0,)]
