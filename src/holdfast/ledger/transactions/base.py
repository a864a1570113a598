"""Store-independent transactions (`SqlTransaction`) and the class that runs them.

A `SqlTransaction` is a generator: it yields SQLAlchemy statements and is sent their rows, all within one database
transaction. Each is written once, and every store runs it (`ledger.postgres.transactions`,
`ledger.sqlite.transactions`). An error that it raises rolls the transaction back. An error that it *returns* is raised
after the commit, for what must be recorded although the caller is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Executable, Table, insert, select

from holdfast.core.job import new_job_ids
from holdfast.core.principal import AuditEntry
from holdfast.core.text import clean
from holdfast.errors import HoldfastError, NotFound
from holdfast.schema import operator_events
from holdfast.schema.columns import tenants_of

T = TypeVar("T")

#: Values in one list of a statement; stores accept about 32,000.
_LISTED: Final = 1_000


class ClockRead(Enum):
    """What a transaction may request besides rows."""

    #: The time, as a datetime. Read after rows are locked, so that waiting for a lock does not make it stale.
    NOW = "now"


NOW: Final = ClockRead.NOW

Row = Mapping[str, Any]
SqlTransaction = Generator[Executable | ClockRead, Any, T | HoldfastError]


def lock_row(
    table: Table, column: ColumnElement[str], what: str, name: str, tenants: Sequence[str] | None
) -> Generator[Executable | ClockRead, Any, Row]:
    """Lock the row of that name until the transaction ends. Raises `NotFound` if these tenants have none."""
    if tenants is None:
        tenants = [row["tenant_id"] for row in (yield tenants_of(table))]
    for chunk in chunks(tenants):
        rows: list[Row] = yield (
            select(table)
            .where(table.c.tenant_id.in_([clean(tenant) for tenant in chunk]), column == clean(name))
            .with_for_update()
        )
        if rows:
            return rows[0]
    raise NotFound(what, name)


def chunks(values: Sequence[T]) -> list[Sequence[T]]:
    """Split values into lists that fit one statement."""
    return [values[start : start + _LISTED] for start in range(0, len(values), _LISTED)]


def insert_audit(entries: Sequence[AuditEntry], now: datetime) -> Executable:
    """Insert entries into the audit log."""
    return insert(operator_events).values(
        [
            {
                "tenant_id": entry.tenant_id,
                "id": entry_id,
                "type": entry.type,
                "actor": entry.actor,
                "target": entry.target,
                "target_id": entry.target_id,
                "queue": entry.queue,
                "reason": entry.reason,
                "before": json_or_null(entry.before),
                "after": json_or_null(entry.after),
                "at": now,
            }
            for entry, entry_id in zip(entries, new_job_ids(len(entries)), strict=True)
        ]
    )


def json_or_null(value: Any) -> str | None:
    """Encode for a JSON column; None stays NULL."""
    return None if value is None else msgspec.json.encode(value).decode()


class TransactionRunner(ABC):
    """Base of the ledger roles that are written as `SqlTransaction`s; each store implements `_run`."""

    @abstractmethod
    async def _run(self, transaction: SqlTransaction[T]) -> T:
        """Run it in one database transaction; return its result after the commit.

        An error that it returned is raised.
        """

    async def _read(self, transaction: SqlTransaction[T]) -> T:
        """Run one that only reads; a store with a single writer need not block other writes for it."""
        return await self._run(transaction)
