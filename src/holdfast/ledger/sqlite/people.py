"""People's acts on SQLite."""

from __future__ import annotations

from holdfast.ledger.acts.people import SqlPeople
from holdfast.ledger.sqlite.acts import SqliteActs


class SqlitePeople(SqliteActs, SqlPeople):
    """Times are the given clock's."""
