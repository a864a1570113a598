"""What triggers need of a ledger in a SQLite file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.engine.sqlite.transaction import Transaction, json_list
from holdfast.ledger.acts.triggers import EXECUTION_COLUMNS, SqlTriggerBook, execution_row
from holdfast.ledger.sqlite.acts import SqliteActs
from holdfast.ledger.trigger_book import Execution

_FIELDS: Final = ", ".join(f"row.value ->> {number}" for number in range(len(EXECUTION_COLUMNS)))
_RECORD: Final = f"""
INSERT INTO queue_executions ({", ".join(EXECUTION_COLUMNS)})
SELECT {_FIELDS} FROM json_each(?) AS row WHERE true
ON CONFLICT DO NOTHING"""  # noqa: S608 - constants


class SqliteTriggers(SqliteActs, SqlTriggerBook):
    """Times of presence are the given clock's."""

    async def record(self, executions: Sequence[Execution]) -> None:
        if executions:
            await self._store.write(_record, json_list([execution_row(execution) for execution in executions]))


def _record(transaction: Transaction, rows: str) -> None:
    transaction.execute(_RECORD, (rows,))
