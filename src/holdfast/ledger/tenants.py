"""Which tenants a table has. Every index leads with the tenant: a question about all of them is one about each."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, Table, func, select


def tenants_of(table: Table, *conditions: ColumnElement[bool]) -> Select[Any]:
    """All tenants that have such a row, by a walk from one to the next in the index: there are few."""
    column = table.c.tenant_id
    first = select(func.min(column).label("tenant_id")).where(*conditions).cte("tenants", recursive=True)
    after = select(func.min(column)).where(column > first.c.tenant_id, *conditions).scalar_subquery()
    walk = first.union_all(select(after).where(first.c.tenant_id.is_not(None)))
    return select(walk.c.tenant_id).where(walk.c.tenant_id.is_not(None))
