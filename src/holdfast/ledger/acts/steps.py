"""An act is a generator: it yields SQLAlchemy statements and is sent their rows, all within one transaction.

So each act is written once and every store runs it: `ledger.postgres.acts`, `ledger.sqlite.acts`. What an act
raises takes the transaction back. An error that it *returns* is raised after the commit: for what has to be written
down although the caller is refused.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Executable, Table, insert, select

from holdfast.core.job import new_job_ids
from holdfast.errors import HoldfastError, Unknown
from holdfast.ledger.people import Action
from holdfast.ledger.schema import operator_events
from holdfast.ledger.tenants import tenants_of
from holdfast.ledger.text import clean

T = TypeVar("T")

#: Values of one list in a statement; stores take some 32,000.
_LISTED: Final = 1_000


class Ask(Enum):
    """What an act may want to know beside rows."""

    #: The time, as a datetime. After the rows are locked: whoever had to wait is judged by when the wait was over.
    NOW = "now"


NOW: Final = Ask.NOW

Row = Mapping[str, Any]
Act = Generator[Executable | Ask, Any, T | HoldfastError]


def locked(
    table: Table, column: ColumnElement[str], what: str, name: str, tenants: Sequence[str] | None
) -> Generator[Executable | Ask, Any, Row]:
    """The row of that name, ours until the transaction ends. Raises `Unknown` if these tenants have none."""
    if tenants is None:
        tenants = [row["tenant_id"] for row in (yield tenants_of(table))]
    for some in listed(tenants):
        rows: list[Row] = yield (
            select(table)
            .where(table.c.tenant_id.in_([clean(tenant) for tenant in some]), column == clean(name))
            .with_for_update()
        )
        if rows:
            return rows[0]
    raise Unknown(what, name)


def listed(values: Sequence[T]) -> list[Sequence[T]]:
    """In portions that a statement can list."""
    return [values[start : start + _LISTED] for start in range(0, len(values), _LISTED)]


def line(actions: Sequence[Action], now: datetime) -> Executable:
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
                "before": as_json(action.before),
                "after": as_json(action.after),
                "at": now,
            }
            for action, unique in zip(actions, new_job_ids(len(actions)), strict=True)
        ]
    )


def as_json(value: Any) -> str | None:
    """As a column holds it; of None, nothing."""
    return None if value is None else msgspec.json.encode(value).decode()
