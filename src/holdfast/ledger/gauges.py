"""What a scrape asks the ledger: a few numbers, each from a small index."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Table, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from holdfast.errors import LedgerUnavailable
from holdfast.ledger import schema
from holdfast.ledger.people import ApprovalStatus
from holdfast.ledger.queries import Queries

#: Tenants with the most are told; a metric must not have a line for each of a million.
MAX_TENANTS: Final = 1_000


class Gauges(msgspec.Struct, frozen=True):
    """Numbers by tenant, and the keys of the alerts that stand."""

    #: Dead letters whose jobs still wait in `dlq_pending` for the engine to be told.
    dlq_pending: dict[str, int]
    approvals_waiting: dict[str, int]
    alerts: list[str]


async def read_gauges(queries: Queries) -> Gauges:
    """All of them, at about the same moment. Raises `LedgerUnavailable`."""
    letters, approvals = schema.dlq_items, schema.approvals
    try:
        async with queries.engine.connect() as connection:

            async def by_tenant(table: Table, condition: ColumnElement[bool]) -> dict[str, int]:
                number = func.count()
                grouped = select(table.c.tenant_id, number).where(condition).group_by(table.c.tenant_id)
                rows: Any = await connection.execute(grouped.order_by(number.desc()).limit(MAX_TENANTS))
                return dict(rows.all())

            return Gauges(
                await by_tenant(letters, letters.c.acked_at.is_(None)),
                await by_tenant(approvals, approvals.c.status == ApprovalStatus.REQUESTED.value),
                list((await connection.execute(select(schema.alerts.c.key))).scalars()),
            )
    except (DBAPIError, PoolTimeout, OSError, TimeoutError) as exc:
        said = getattr(exc, "orig", None) or exc
        raise LedgerUnavailable(f"the ledger does not answer: {said}; check that it is up, then try again") from exc
