"""The file itself: its columns, the state table in it, its version, and the plans of the hot queries."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from holdfast.core.states import FINAL, MOVES, State, is_legal
from holdfast.engine.sqlite.schema import SCHEMA_VERSION, prepare_schema
from holdfast.errors import EngineUnavailable, InvalidOption, SchemaMismatch
from holdfast.schema.columns import metadata
from holdfast.sqlite.connection import open_writer
from holdfast.sqlite.transaction import ACTIVE_STATES, bulk_statement, statement, statement_texts
from tests.engine.sqlite.rig import open_engine

#: Requirement L6: the ledger reads these by name.
FIXED = {
    "jobs": "tenant_id job_id job_type queue state priority attempt retry_count idempotency_key trace_id error_code "
    "last_error error_message payload context result run_at next_retry_at dlq_id created_at updated_at finished_at",
    "job_events": "tenant_id job_id seq type from_state to_state attempt retry_count worker message data at",
    "dlq_items": "tenant_id dlq_id job_id job_type payload error_code error stack retry_count history failed_at status "
    "requested_by confirmed_by reason replayed_as",
    "approvals": "tenant_id",
    "idempotency_keys": "tenant_id key state value created_at expires_at",
    "outbox_events": "tenant_id id destination topic key payload headers status attempt_count next_retry_at last_error "
    "created_at sent_at",
    "queue_executions": "tenant_id id message_id queue_name event_name status started_at completed_at duration_ms "
    "agent_run_id error_message retry_count",
}
#: Statements that run for every batch, or for every poll of an idle worker.
HOT = [
    "claimable",
    "lease_jobs",
    "insert_claimed_events",
    "leases_by_id",
    "worker_leases",
    "succeed",
    "insert_succeeded_events",
    "move",
    "renew",
    "intake_state",
]
HOT += [
    "insert_created_events",
    "ready_queues",
    "next_due",
    "promote",
    "expired_leases",
    "queues_with_expired_leases",
    "lost_jobs",
    "due_retries",
    "reclaim",
    "get",
    "job_for_move",
    "finished_among",
]
HOT += ["ready_tenants", "tenant_candidates", "count_backlog", "workers", "expedite", "withdraw_approvals"]
SQL = sorted(statement_texts())


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = open_writer(tmp_path / "holdfast.db", prepare_schema)
    yield connection
    connection.close()


def insert_job(database: sqlite3.Connection, state: State, previous_state: State | None, **columns: object) -> None:
    """Insert a job in this state, with otherwise valid columns."""
    row: dict[str, object] = {
        "job_id": f"{previous_state}-{state}",
        "job_type": "print",
        "queue": "orders",
        "priority": 1,
        "payload": "{}",
        "created_at": 1,
        "updated_at": 1,
        "state": state,
        "previous_state": previous_state,
        "finished_at": 1 if state in FINAL else None,
        "worker": "w" if state is State.RUNNING else None,
        "lease_expires_at": 1 if state is State.RUNNING else None,
        "ready_seq": 1 if state in ACTIVE_STATES - {State.RUNNING} else None,
        "dlq_id": "d" if state in (State.DLQ_RECORDED, State.FAILED) else None,
        **columns,
    }
    names = ", ".join(row)
    database.execute(f"INSERT INTO jobs ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))


@pytest.mark.parametrize("table", FIXED)
def test_the_ledger_finds_its_columns(database: sqlite3.Connection, table: str) -> None:
    # table_xinfo: generated columns too.
    embedded = {row[1] for row in database.execute(f"PRAGMA table_xinfo({table})")}
    # The schema of a ledger in PostgreSQL or in a separate SQLite file.
    separate = {column.name for column in metadata.tables[table].columns}
    assert set(FIXED[table].split()) <= embedded & separate


@pytest.mark.parametrize(("previous_state", "state"), list(product([None, *State], State)))
def test_the_file_enforces_the_state_table(
    database: sqlite3.Connection, previous_state: State | None, state: State
) -> None:
    if is_legal(previous_state, state):
        insert_job(database, state, previous_state)
    else:
        with pytest.raises(sqlite3.IntegrityError, match="legal_move"):
            insert_job(database, state, previous_state)


@pytest.mark.parametrize(
    ("state", "previous_state", "wrong"),
    [
        (State.SUCCEEDED, State.RUNNING, {"finished_at": None}),
        (State.QUEUED, None, {"finished_at": 1}),
        (State.QUEUED, None, {"ready_seq": None}),
        (State.QUEUED, None, {"due_at": 1}),
        (State.SUSPENDED, State.RUNNING, {"ready_seq": 1}),
        (State.RUNNING, State.QUEUED, {"worker": None}),
        (State.SUSPENDED, State.RUNNING, {"worker": "w"}),
        (State.QUEUED, None, {"priority": 7}),
        (State.QUEUED, None, {"attempt": -1}),
        (State.DLQ_RECORDED, State.DLQ_PENDING, {"dlq_id": None}),
        (State.FAILED, State.DLQ_RECORDED, {"dlq_id": None}),
    ],
)
def test_an_invalid_row_cannot_be_written(
    database: sqlite3.Connection, state: State, previous_state: State, wrong: dict[str, object]
) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        insert_job(database, state, previous_state, **wrong)


# Statements -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SQL)
def test_every_statement_has_a_header_and_compiles(database: sqlite3.Connection, name: str) -> None:
    text = statement_texts()[name]
    assert text.startswith("-- ")
    if name == "schema":
        return
    prepared = bulk_statement(name, 2)[0] if "{{rows" in statement(name) else statement(name)
    assert "{{" not in prepared
    names = set(re.findall(r":([a-z_]+)", prepared))
    documented = re.findall(r":([a-z_]+)", "".join(line for line in text.splitlines(True) if line.startswith("--")))
    assert names == set(documented), "the header and the statement have different parameters"
    values: object = dict.fromkeys(names) if names else [None] * prepared.count("?")
    database.execute(f"EXPLAIN {prepared}", values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SQL)
def test_no_statement_changes_a_state_without_its_previous_state(name: str) -> None:
    if name == "schema":
        return
    text = statement(name)
    sets = re.search(r"UPDATE jobs\s+SET(.*?)(?:\sFROM\s|\sWHERE\s)", text, re.DOTALL)
    if sets and re.search(r"(?<!_)\bstate = ", sets[1]):
        assert "previous_state = state" in sets[1]
        assert re.search(r"WHERE.*state (IN \('|= move\.from_state|= 'running')", text, re.DOTALL)


def test_no_statement_lists_states_literally() -> None:
    """Lists of states come from `core.states`; no statement lists two of them literally."""
    for name in SQL:
        text = statement_texts()[name]
        pairs = [f"'{one}', '{other}'" for one in MOVES if one for other in MOVES if other]
        assert not [pair for pair in pairs if pair in text], name


@pytest.mark.parametrize("name", HOT)
def test_hot_statements_never_read_the_whole_table(database: sqlite3.Connection, name: str) -> None:
    prepared = bulk_statement(name, 2)[0] if "{{rows" in statement(name) else statement(name)
    names = re.findall(r":([a-z_]+)", prepared)
    values: object = dict.fromkeys(names) if names else [None] * prepared.count("?")
    plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {prepared}", values)]  # type: ignore[arg-type]
    assert not [step for step in plan if re.match(r"SCAN (jobs|job_events|feed_entries|submission_keys)\b", step)], plan
    assert not [step for step in plan if "B-TREE FOR ORDER BY" in step], plan


@pytest.mark.parametrize("name", ["stats", "find"])
def test_counting_and_listing_use_the_partial_indexes(database: sqlite3.Connection, name: str) -> None:
    names = re.findall(r":([a-z_]+)", statement(name))
    plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement(name)}", dict.fromkeys(names))]
    assert not [step for step in plan if re.match(r"SCAN jobs\b", step)], plan
    for index in ("jobs_ready", "jobs_due", "jobs_leased", "jobs_parked"):
        assert [step for step in plan if index in step], (index, plan)


# Other files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        (SCHEMA_VERSION + 1, InvalidOption, "newer holdfast"),
        (SCHEMA_VERSION - 1, SchemaMismatch, "holdfast migrate up"),
    ],
)
async def test_a_file_of_another_version_is_refused(
    tmp_path: Path, version: int, error: type[Exception], words: str
) -> None:
    path = tmp_path / "holdfast.db"
    connection = open_writer(path, prepare_schema)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(error, match=words):
        async with open_engine(path):
            pass


async def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE jobs (id)")
    connection.commit()
    connection.close()
    with pytest.raises(InvalidOption, match="another program"):
        async with open_engine(path):
            pass
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("jobs",)]
    connection.close()


async def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Dear Sir or Madam, " * 100)
    with pytest.raises(EngineUnavailable, match="not a SQLite database"):
        async with open_engine(path):
            pass
    assert path.read_text().startswith("Dear")
