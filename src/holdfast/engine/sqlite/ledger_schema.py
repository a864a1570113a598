"""The ledger's tables and indexes in an engine's file, and upgrades of older files.

Loads SQLAlchemy, so it is imported only when a file is created or migrated.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast import schema
from holdfast.core.job import Attempt, Failure
from holdfast.core.text import error_fingerprint
from holdfast.engine.sqlite.schema import SCHEMA_VERSION, create_schema, version_of
from holdfast.errors import EngineUnavailable
from holdfast.schema import columns
from holdfast.sqlite.connection import connect, exclusive_lock, translate

#: The engine has these itself, under the ledger's names: `job_events` as a view, `feed_entries` as its own feed.
_OWN: Final = frozenset({"jobs", "job_events", "dlq_items", "feed_entries"})
#: The ledger's versions would be updated at every claim and settle, which costs 7 % of the engine's throughput, and
#: would contain every job without a key; `sql/schema.sql` has smaller ones.
_SMALLER: Final = frozenset({"jobs_by_state", "jobs_by_key"})


def statements() -> list[str]:
    """The CREATE statements, in an order in which they can be run."""
    dialect = sqlite.dialect()
    tables = [table for table in columns.metadata.sorted_tables if table.name not in _OWN]
    indexes = [index for table in (schema.jobs, *tables) for index in table.indexes if index.name not in _SMALLER]
    indexes.sort(key=lambda index: str(index.name))
    return [str(CreateTable(table).compile(dialect=dialect)).strip() for table in tables] + [
        str(CreateIndex(index).compile(dialect=dialect)) for index in indexes
    ]


#: What fills a column when a file of this version or an older one is upgraded, if not the old column of the same name.
#: `old` is the old row.
_FILLED: Final[dict[tuple[str, str], tuple[int, str]]] = {
    ("jobs", "dlq_id"): (
        1,
        """iif(old.state IN ('dlq_pending', 'dlq_recorded', 'failed'),
            coalesce(old.dlq_id, lower(hex(randomblob(16)))), old.dlq_id)""",
    ),
    # The submitted values, as far as they can still be derived.
    ("events", "data"): (
        1,
        """iif(old.from_state IS NOT NULL OR old.to_state IS NULL, old.data, (
        SELECT nullif(json_patch('{}', json_object(
                   'run_at_ms', iif(run_at > created_at, run_at, NULL),
                   'meta', nullif(json_remove(meta, '$.retry_count', '$.lost_leases', '$.unavailable_count',
                                              '$.unavailable_since_ms', '$.history', '$.dlq_id'), '{}') || '')), '{}')
          FROM jobs WHERE jobs.id = old.job))""",
    ),
    ("dlq_items", "acked_at"): (1, "old.failed_at"),
    ("dlq_items", "fingerprint"): (2, "fingerprint(old.job_type, old.error_code, old.error, old.history)"),
    ("approvals", "job_type"): (
        2,
        """coalesce((SELECT job_type FROM jobs WHERE jobs.tenant_id = old.tenant_id AND jobs.job_id = old.job_id
                        AND jobs.queue = old.queue), '')""",
    ),
    ("approvals", "policies"): (2, "iif(old.policy IS NULL, '[]', json_array(old.policy))"),
    ("approvals", "reason"): (2, "coalesce(old.reason, '')"),
    # What older files have under this name is `worker_concurrency`.
    ("queues", "concurrency"): (4, "NULL"),
}
#: Copies the dead letter's id into `meta` of jobs that had none because they waited for a ledger.
_SET_DLQ_ID: Final = """
UPDATE jobs SET meta = json_set(coalesce(meta, '{}'), '$.dlq_id', dlq_id)
 WHERE dlq_id IS NOT NULL AND coalesce(json_extract(meta, '$.dlq_id'), '') = ''
"""
#: In files of the first version.
_RENAMED: Final = {"job_events": "events"}
#: Table and column, and what the column was called in files up to the third version (`worker_concurrency`: the fourth).
_RENAMED_COLUMNS: Final = {
    ("jobs", "ready_seq"): "line",
    ("jobs", "claim_seq"): "place",
    ("jobs", "previous_state"): "came_from",
    ("jobs", "lease_expires_at"): "lease_until",
    ("jobs", "notified_at"): "told_at",
    ("events", "job_row"): "job",
    ("feed_entries", "urgent"): "hurry",
    ("queues", "has_jobs"): "used",
    ("queues", "fair_share"): "turns",
    ("queues", "worker_concurrency"): "concurrency",
    ("approvals", "notified_status"): "told",
    ("approval_votes", "voter"): "person",
    ("operator_events", "notified_at"): "told_at",
    ("outbox_lanes", "lease_expires_at"): "until",
    ("feed_positions", "lease_expires_at"): "until",
}


def upgrade(path: Path) -> bool:
    """Migrate the file to this release's schema; False if it already has it.

    Blocks until no other process writes. Close every engine of this process on the file first. Other processes may keep
    running; restart them afterwards.
    """
    try:
        with exclusive_lock(path), closing(connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                version = version_of(connection, path)
                changed = version != SCHEMA_VERSION
                if version is None:
                    create_schema(connection)
                elif changed:
                    _rebuild(connection, version)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
    except sqlite3.Error as exc:
        raise translate(exc, path) from exc
    except OSError as exc:
        raise EngineUnavailable(f"the database {path} cannot be opened: {exc.strerror}; check its directory") from exc
    return changed


def _rebuild(connection: sqlite3.Connection, version: int) -> None:
    connection.create_function("fingerprint", 4, _fingerprint, deterministic=True)
    # AUTOINCREMENT guarantees that no id is used twice, even those of deleted rows.
    sequences = dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    tables = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        if not name.startswith("sqlite_")
    ]
    made = "SELECT type, name FROM sqlite_schema WHERE type IN ('view', 'index') AND sql IS NOT NULL"
    for kind, name in connection.execute(made).fetchall():
        connection.execute(f"DROP {kind} {name}")
    for table in tables:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    create_schema(connection)
    # Jobs first: events are filled from them.
    for table in sorted(tables, key=lambda table: table != "jobs"):
        _copy_rows(connection, version, table, _RENAMED.get(table, table))
        connection.execute(f"DROP TABLE old_{table}")
    connection.execute(_SET_DLQ_ID)
    for table, sequence in sequences.items():
        name = _RENAMED.get(table, table)
        connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (name,))
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, sequence))


def _copy_rows(connection: sqlite3.Connection, version: int, old: str, new: str) -> None:
    filled = {column: value for column, (last, value) in _FILLED.items() if version <= last}
    # table_info omits generated columns.
    before = {row[1] for row in connection.execute(f"PRAGMA table_info(old_{old})")}
    values: dict[str, str] = {}
    for row in connection.execute(f"PRAGMA table_info({new})").fetchall():
        column = row[1]
        source = column if column in before else _RENAMED_COLUMNS.get((new, column), "")
        if (new, column) in filled:
            values[column] = filled[new, column]
        elif source in before:
            values[column] = f"old.{source}"
    # All names are of holdfast's tables and columns.
    copy = f"INSERT INTO {new} ({', '.join(values)}) SELECT {', '.join(values.values())} FROM old_{old} AS old"  # noqa: S608
    connection.execute(copy)


def _fingerprint(task: str, code: str, message: str, history: str) -> str:
    """The fingerprint of a dead letter that was written before fingerprints existed."""
    attempts = msgspec.json.decode(history, type=tuple[Attempt, ...])
    last = attempts[-1].failure if attempts else None
    known = last if last is not None and last.code == code else Failure(code, message)
    return error_fingerprint(task, known)
