"""Store-independent transactions (`SqlTransaction`) and the base class that runs them (`TransactionRunner`).

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

#: Values of one list in a statement; stores take some 32,000.
_LISTED: Final = 1_000


class ClockRead(Enum):
    """What an act may want to know beside rows."""

    #: The time, as a datetime. After the rows are locked: whoever had to wait is judged by when the wait was over.
    NOW = "now"


NOW: Final = ClockRead.NOW

Row = Mapping[str, Any]
SqlTransaction = Generator[Executable | ClockRead, Any, T | HoldfastError]


def lock_row(
    table: Table, column: ColumnElement[str], what: str, name: str, tenants: Sequence[str] | None
) -> Generator[Executable | ClockRead, Any, Row]:
    """The row of that name, ours until the transaction ends. Raises `Unknown` if these tenants have none."""
    if tenants is None:
        tenants = [row["tenant_id"] for row in (yield tenants_of(table))]
    for some in chunks(tenants):
        rows: list[Row] = yield (
            select(table)
            .where(table.c.tenant_id.in_([clean(tenant) for tenant in some]), column == clean(name))
            .with_for_update()
        )
        if rows:
            return rows[0]
    raise NotFound(what, name)


def chunks(values: Sequence[T]) -> list[Sequence[T]]:
    """In portions that a statement can list."""
    return [values[start : start + _LISTED] for start in range(0, len(values), _LISTED)]


def insert_audit(actions: Sequence[AuditEntry], now: datetime) -> Executable:
    """Into the operators' log."""
    return insert(operator_events).values(
        [
            {
                "tenant_id": action.tenant_id,
                "id": unique,
                "type": action.type,
                "actor": action.actor,
                "target": action.target,
                "target_id": action.target_id,
                "queue": action.queue,
                "reason": action.reason,
                "before": json_or_null(action.before),
                "after": json_or_null(action.after),
                "at": now,
            }
            for action, unique in zip(actions, new_job_ids(len(actions)), strict=True)
        ]
    )


def json_or_null(value: Any) -> str | None:
    """As a column holds it; of None, nothing."""
    return None if value is None else msgspec.json.encode(value).decode()


class TransactionRunner(ABC):
    """The roles of a ledger that are written as acts are made of this and of a store's way to run them."""

    @abstractmethod
    async def _run(self, act: SqlTransaction[T]) -> T:
        """In one transaction; what it returns, once that is committed. An error that it returns is raised then."""

    async def _look(self, act: SqlTransaction[T]) -> T:
        """The same for one that only reads: a store that has one writer need not keep others from writing for it."""
        return await self._run(act)
