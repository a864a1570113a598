"""Marks of what has been told, in the file's one writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from holdfast.clock import Clock
from holdfast.engine.sqlite.transaction import Transaction, json_list
from holdfast.ledger.keys import JobKey
from holdfast.ledger.sqlite.store import SqliteStore
from holdfast.ledger.telling import AlertNews, ApprovalNews, Marks

_JOBS: Final = """
UPDATE jobs SET told_at = :now_ms FROM json_each(:rows) AS row
WHERE jobs.tenant_id = row.value ->> 0 AND jobs.queue = row.value ->> 1 AND jobs.job_id = row.value ->> 2
    AND told_at IS NULL"""
_APPROVALS: Final = """
UPDATE approvals SET told = row.value ->> 2 FROM json_each(:rows) AS row
WHERE approvals.tenant_id = row.value ->> 0 AND approval_id = row.value ->> 1"""
_ALERTS: Final = """
UPDATE operator_events SET told_at = :now_ms FROM json_each(:rows) AS row
WHERE operator_events.tenant_id = row.value ->> 0 AND operator_events.id = row.value ->> 1 AND told_at IS NULL"""


class SqliteMarks(Marks):
    """Writes them."""

    def __init__(self, store: SqliteStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def jobs(self, keys: Sequence[JobKey]) -> None:
        await self._write(_JOBS, [(key.tenant_id, key.queue, key.job_id) for key in keys])

    async def approvals(self, told: Sequence[ApprovalNews]) -> None:
        await self._write(_APPROVALS, [(one.tenant_id, one.approval_id, one.status) for one in told])

    async def alerts(self, told: Sequence[AlertNews]) -> None:
        await self._write(_ALERTS, [(one.tenant_id, one.id) for one in told])

    async def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        await self._store.write(_mark, statement, {"rows": json_list(rows), "now_ms": self._clock.now_ms()})


def _mark(transaction: Transaction, statement: str, values: dict[str, Any]) -> None:
    transaction.begin()
    transaction.execute(statement, values)
