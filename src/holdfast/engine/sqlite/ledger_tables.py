"""The embedded ledger's part of the file, generated from `ledger.schema`: tables that the engine does not write itself,
and indexes over jobs for the ledger's queries.

Imported when a file is made or migrated: it needs SQLAlchemy, which workers on an existing file do without.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast.ledger import schema

#: The engine has these itself, under the ledger's names: `job_events` as a view, `feed_entries` as its own feed.
_OWN: Final = frozenset({"jobs", "job_events", "dlq_items", "feed_entries"})
#: The ledger's would follow every job through the line and its lease, at 7 % of the engine's speed, and hold every job
#: without a key; so there are smaller ones in `sql/schema.sql`.
_SMALLER: Final = frozenset({"jobs_by_state", "jobs_by_key"})


def statements() -> list[str]:
    """All of it, in an order in which it can be made."""
    dialect = sqlite.dialect()
    tables = [table for table in schema.metadata.sorted_tables if table.name not in _OWN]
    indexes = [index for table in (schema.jobs, *tables) for index in table.indexes if index.name not in _SMALLER]
    indexes.sort(key=lambda index: str(index.name))
    return [str(CreateTable(table).compile(dialect=dialect)).strip() for table in tables] + [
        str(CreateIndex(index).compile(dialect=dialect)) for index in indexes
    ]
