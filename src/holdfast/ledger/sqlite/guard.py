"""The look at a ledger's own SQLite file before it is used. Its tables are looked at where the file is opened."""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.engine.sqlite.transaction import Transaction
from holdfast.ledger.owner import READ_OWNER, check_owner
from holdfast.ledger.sqlite.store import Guard

_CLAIM = "INSERT INTO ledger_owner (id, namespace, since) VALUES (1, ?, ?)"


def guard_for(namespace: str, clock: Clock) -> Guard:
    """Raises `InvalidOption` for another namespace's ledger."""

    def look(transaction: Transaction, where: str) -> None:
        row = transaction.execute(READ_OWNER).fetchone()
        if row is None:
            transaction.execute(_CLAIM, (namespace, clock.now_ms()))
        else:
            check_owner(where, row[0], namespace)

    return look
