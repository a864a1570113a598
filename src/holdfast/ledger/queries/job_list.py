"""Lists of jobs, newest first, in keyset pages: filters, cursors and statements.

Every index leads with the tenant, so a list over all tenants (or over several states) is one search per tenant (and
state), merged here. Each search is driven by one index that has the order of the list. Conditions that the index does
not cover are checked on the rows it returns, at most `SCANNED` rows a page. A page therefore takes bounded time
whatever the filter; rare matches cost more pages, never a long query.

The order is (created, job id, queue, tenant), descending, compared by code point on every store: new jobs come before
the first page, and rows do not move between pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Dialect, Select, and_, func, literal, literal_column, or_, select, tuple_
from sqlalchemy.sql.expression import collate

from holdfast.core.states import State
from holdfast.core.text import clean
from holdfast.ledger.queries import paging
from holdfast.ledger.queries.paging import SCANNED, SCANNED_EACH
from holdfast.ledger.queries.records import JobRow
from holdfast.schema import jobs
from holdfast.schema.columns import INDEXED_BYTES

#: Searching a text in one row costs as much as reading this many rows.
TEXT_COST: Final = 3
#: Names in a cursor: job, queue, tenant.
CURSOR_NAMES: Final = 3

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: Columns of `JobRow`; payloads can be large and are not read.
COLUMNS: Final = tuple(jobs.c[name] for name in JobRow.__struct_fields__)


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of jobs: all given conditions must hold; without any, every job of every tenant matches."""

    states: frozenset[State] = frozenset()
    job_type: str | None = None
    tenant_id: str | None = None
    #: Tenants that the caller may see; None: all.
    tenants: Sequence[str] | None = None
    queues: frozenset[str] = frozenset()
    #: Created at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None
    #: Text in the last error, case-insensitive.
    error: str | None = None
    trace_id: str | None = None
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        paging.check_instants(since=self.since, until=self.until)

    def chosen_tenants(self) -> list[str] | None:
        """Tenants to search; None: all."""
        if self.tenant_id is None:
            return None if self.tenants is None else list(dict.fromkeys(self.tenants))
        visible = self.tenants is None or self.tenant_id in self.tenants
        return [self.tenant_id] if visible else []


class JobCursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A position in the order of all jobs."""

    created_us: int
    job_id: str
    queue: str
    tenant_id: str

    @property
    def created_at(self) -> datetime:
        return _EPOCH + self.created_us * _MICROSECOND


def cursor_of(row: Any) -> JobCursor:
    """Return the position of a row."""
    return JobCursor((row.created_at - _EPOCH) // _MICROSECOND, row.job_id, row.queue, row.tenant_id)


def to_cursor(position: JobCursor) -> str:
    """Encode a position as text."""
    return paging.encode_cursor(position.created_us, position.job_id, position.queue, position.tenant_id)


def from_cursor(cursor: str) -> JobCursor:
    """Decode a cursor. Raises `UsageError` if it is invalid."""
    created_us, names = paging.decode_cursor(cursor, CURSOR_NAMES)
    return JobCursor(created_us, *names)


class JobSearch(msgspec.Struct, frozen=True):
    """One tenant's part of a list, in one state if its index needs one."""

    filters: JobFilter
    tenant_id: str
    state: State | None
    after: JobCursor | None
    #: Rows to scan.
    scanned: int

    def page(self, dialect: Dialect, limit: int) -> Select[Any]:
        """Select the first matches."""
        conditions = self._residual()
        if not conditions:
            return self._order(select(*COLUMNS).where(*self._driving(dialect)), jobs.c, dialect).limit(limit)
        scanned = (
            self._order(select(*COLUMNS).where(*self._driving(dialect)), jobs.c, dialect).limit(self.scanned).subquery()
        )
        checks = self._residual(scanned.c)
        return self._order(select(scanned).where(*checks), scanned.c, dialect).limit(limit)

    def end(self, dialect: Dialect) -> Select[Any] | None:
        """Select the last row that `page` scanned, if there are more rows.

        Returns None if the index covers all conditions.
        """
        if not self._residual():
            return None
        columns = select(jobs.c.created_at, jobs.c.job_id, jobs.c.queue, jobs.c.tenant_id)
        return self._order(columns.where(*self._driving(dialect)), jobs.c, dialect).offset(self.scanned - 1).limit(1)

    def _order(self, statement: Select[Any], columns: Any, dialect: Dialect) -> Select[Any]:
        created_at, job_id, queue = (
            columns.created_at,
            _collate_by_code(columns.job_id, dialect),
            _collate_by_code(columns.queue, dialect),
        )
        if self.after is not None and columns is jobs.c:
            here = tuple_(created_at, job_id, queue)
            there = tuple_(
                literal(self.after.created_at, jobs.c.created_at.type),
                literal(clean(self.after.job_id)),
                literal(clean(self.after.queue)),
            )
            # The tenant comes last in the order: at an equal position, rows of smaller tenants are still to come.
            statement = statement.where(here <= there if self.tenant_id < self.after.tenant_id else here < there)
            # Repeated for the index, whose further columns have another collation.
            statement = statement.where(created_at <= self.after.created_at)
        return statement.order_by(created_at.desc(), job_id.desc(), queue.desc())

    def _driving(self, dialect: Dialect) -> list[ColumnElement[bool]]:
        """Conditions that the index covers, and its predicate, word for word."""
        filters = self.filters
        conditions = [jobs.c.tenant_id == clean(self.tenant_id)]
        if filters.since is not None:
            conditions.append(jobs.c.created_at >= filters.since)
        if filters.until is not None:
            conditions.append(jobs.c.created_at < filters.until)
        match self._driver():
            case "key":
                key = clean(filters.idempotency_key)
                own = and_(jobs.c.job_id == key, jobs.c.idempotency_key.in_((key, "")))
                given = [jobs.c.idempotency_key == key, jobs.c.idempotency_key != jobs.c.job_id]
                conditions.append(or_(and_(*given, *_index_predicate(jobs.c.idempotency_key, dialect)), own))
            case "trace":
                conditions += [jobs.c.trace_id == clean(filters.trace_id), jobs.c.trace_id != ""]
                conditions += _index_predicate(jobs.c.trace_id, dialect)
            case "state":
                conditions += [jobs.c.state == self.state, jobs.c.state != State.SUCCEEDED.value]
            case "error":
                conditions.append(jobs.c.last_error.is_not(None))
            case "type":
                conditions.append(jobs.c.job_type == clean(filters.job_type))
        return conditions

    def _residual(self, columns: Any = jobs.c) -> list[ColumnElement[bool]]:
        """Conditions that are checked row by row."""
        filters, driver = self.filters, self._driver()
        conditions: list[ColumnElement[bool]] = []
        if filters.idempotency_key is not None and driver != "key":
            conditions.append(columns.idempotency_key == clean(filters.idempotency_key))
        if filters.trace_id is not None and driver != "trace":
            conditions.append(columns.trace_id == clean(filters.trace_id))
        if filters.states and driver != "state":
            conditions.append(columns.state.in_([state.value for state in sorted(filters.states)]))
        if filters.error:
            conditions.append(columns.last_error.icontains(clean(filters.error), autoescape=True))
        if filters.job_type is not None and driver != "type":
            conditions.append(columns.job_type == clean(filters.job_type))
        if filters.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, filters.queues))))
        return conditions

    def _driver(self) -> str:
        filters = self.filters
        if filters.idempotency_key is not None and _is_indexed(filters.idempotency_key):
            return "key"
        if filters.trace_id and _is_indexed(filters.trace_id):
            return "trace"
        if self.state is not None:
            return "state"
        if filters.error:
            return "error"
        return "type" if filters.job_type is not None else "time"


def searches(filters: JobFilter, tenants: list[str], after: JobCursor | None) -> list[JobSearch]:
    """Return the searches that make up a page."""
    by_state = filters.states and State.SUCCEEDED not in filters.states
    unkeyed = filters.idempotency_key is None and not filters.trace_id
    states: list[State | None] = [*sorted(filters.states)] if by_state and unkeyed else [None]
    cost = TEXT_COST if filters.error else 1
    each = max(SCANNED // max(1, len(tenants) * len(states) * cost), SCANNED_EACH)
    return [JobSearch(filters, tenant, state, after, each) for tenant in tenants for state in states]


def _collate_by_code(column: ColumnElement[str], dialect: Dialect) -> ColumnElement[str]:
    return collate(column, "BINARY" if dialect.name == "sqlite" else "C")


def _is_indexed(text: str) -> bool:
    """Whether the index has the text; longer texts, sent by other programs only, are compared row by row."""
    return len(clean(text).encode()) <= INDEXED_BYTES


def _index_predicate(column: ColumnElement[str], dialect: Dialect) -> list[ColumnElement[bool]]:
    """The rest of the index's predicate, as in `holdfast.schema`."""
    if dialect.name == "sqlite":
        return []
    return [func.octet_length(column) <= literal_column(str(INDEXED_BYTES))]
