"""The look at a ledger's own SQLite file before it is used. Its tables are looked at where the file is opened."""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.engine.sqlite.transaction import Transaction
from holdfast.ledger.owner import READ_OWNER, check_owner, is_another
from holdfast.ledger.sqlite.store import Guard

_CLAIM = "INSERT INTO ledger_owner (id, namespace, engine, since) VALUES (1, ?, ?, ?)"
_NOTE = "UPDATE ledger_owner SET engine = ?"


def guard_for(namespace: str, clock: Clock, engine: str = "") -> Guard:
    """Raises `InvalidOption` for another namespace's ledger; warns if it was another engine's."""

    def look(transaction: Transaction, where: str) -> None:
        row = transaction.execute(READ_OWNER).fetchone()
        if row is None:
            transaction.execute(_CLAIM, (namespace, engine, clock.now_ms()))
            return
        check_owner(where, row[0], namespace)
        if is_another(where, row[1], engine):
            transaction.execute(_NOTE, (engine,))

    return look
