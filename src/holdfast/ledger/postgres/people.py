"""People's acts on PostgreSQL."""

from __future__ import annotations

from holdfast.ledger.acts.people import SqlPeople
from holdfast.ledger.postgres.acts import PostgresActs


class PostgresPeople(PostgresActs, SqlPeople):
    """Times are the server's."""
