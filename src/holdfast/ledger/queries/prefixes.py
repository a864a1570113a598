"""Find ids by prefix.

A search by prefix is a range scan of the primary key's index, once for each tenant that the caller may see; ids of
other tenants neither match nor count. Ids are compared byte by byte: case matters, and no character is a wildcard.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Dialect, Select, Table, and_, func, literal_column, select

from holdfast.core.text import clean
from holdfast.schema import approvals, dlq_items, jobs

#: Sorts after every character used in ids.
_LAST: Final = "\U0010ffff"
#: Selectivity hint for SQLite's planner; without it the embedded file is scanned by tenant.
_FEW: Final[ColumnElement[float]] = literal_column("0.000001")


class Identified(msgspec.Struct, frozen=True, kw_only=True):
    """A table whose rows have ids that can be abbreviated."""

    table: Any
    id: str
    task: str = "job_type"
    state: str
    at: str


#: Kind of row → its table.
KINDS: Final = {
    "job": Identified(table=jobs, id="job_id", state="state", at="created_at"),
    "approval": Identified(table=approvals, id="approval_id", state="status", at="requested_at"),
    "dead letter": Identified(table=dlq_items, id="dlq_id", state="status", at="failed_at"),
}


class Candidate(msgspec.Struct, frozen=True):
    """One of the ids with the same prefix."""

    id: str
    task: str
    state: str
    at: datetime


def matching_ids(kind: Identified, tenant: str, prefix: str, queue: str | None, dialect: Dialect) -> Select[Any]:
    """Select a tenant's ids with the prefix, in order; the caller sets the limit."""
    column = _columns(kind)[kind.id]
    start = clean(prefix)
    bounds = [column >= start, column < start + _LAST]
    if dialect.name == "sqlite":
        bounds = [func.likelihood(bound, _FEW) for bound in bounds]
    where = and_(_is_owned_by(kind, tenant, queue), *bounds)
    return select(column).distinct().where(where).order_by(column)


def candidates(kind: Identified, tenant: str, ids: Sequence[str], queue: str | None) -> Select[Any]:
    """Select what distinguishes these ids of a tenant: task, state and time."""
    columns = _columns(kind)
    shown = (columns[name] for name in (kind.id, kind.task, kind.state, kind.at))
    return select(*shown).where(_is_owned_by(kind, tenant, queue), columns[kind.id].in_(list(ids)))


def _is_owned_by(kind: Identified, tenant: str, queue: str | None) -> ColumnElement[bool]:
    columns = _columns(kind)
    of_tenant = columns.tenant_id == clean(tenant)
    return of_tenant if queue is None else and_(of_tenant, columns.queue == clean(queue))


def _columns(kind: Identified) -> Any:
    table: Table = kind.table
    return table.c
