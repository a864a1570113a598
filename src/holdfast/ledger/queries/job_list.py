"""Lists of jobs, newest first, in keyset pages: filters, cursors, and the statements that find a page.

Every index leads with the tenant, so a list over all tenants (or over several states) is one search per tenant (and
state), merged here. Each search is driven by one index that has the order of the list; conditions that the index does
not know are checked on what it gives, at most `SCANNED` rows a page. So a page takes bounded time whatever is asked
for, and a rare thing costs more pages, never a long query.

The order is (created, job id, queue, tenant), descending, compared by code point everywhere: new jobs come before the
first page, and nothing moves between pages.
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
from holdfast.errors import InvalidOption
from holdfast.ledger.queries import paging
from holdfast.ledger.queries.paging import SCANNED, SCANNED_EACH
from holdfast.ledger.queries.records import JobRow
from holdfast.schema import jobs
from holdfast.schema.columns import INDEXED_BYTES

#: To look for a text in a row costs as much as to look at so many rows.
TEXT_COST: Final = 3
#: Names in a cursor: job, queue, tenant.
CURSOR_NAMES: Final = 3

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: What JobRow holds; payloads can be large and stay where they are.
COLUMNS: Final = tuple(jobs.c[name] for name in JobRow.__struct_fields__)


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs. Everything given must hold; nothing given is every job of every tenant."""

    states: frozenset[State] = frozenset()
    job_type: str | None = None
    tenant_id: str | None = None
    #: Those that the asker may see; None: all of them.
    tenants: Sequence[str] | None = None
    queues: frozenset[str] = frozenset()
    #: Created at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None
    #: Text in the last error, in any case.
    error: str | None = None
    trace_id: str | None = None
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("since", self.since), ("until", self.until)):
            if value is not None and value.tzinfo is None:
                raise InvalidOption(f"{name} has no time zone; give an aware datetime")

    def chosen_tenants(self) -> list[str] | None:
        """Whose jobs; None: everybody's."""
        if self.tenant_id is None:
            return None if self.tenants is None else list(dict.fromkeys(self.tenants))
        seen = self.tenants is None or self.tenant_id in self.tenants
        return [self.tenant_id] if seen else []


class JobCursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A place in the order of all jobs."""

    created_us: int
    job_id: str
    queue: str
    tenant_id: str

    @property
    def created_at(self) -> datetime:
        return _EPOCH + self.created_us * _MICROSECOND


def cursor_of(row: Any) -> JobCursor:
    """Where a row stands."""
    return JobCursor((row.created_at - _EPOCH) // _MICROSECOND, row.job_id, row.queue, row.tenant_id)


def to_cursor(place: JobCursor) -> str:
    """A place as text."""
    return paging.encode_cursor(place.created_us, place.job_id, place.queue, place.tenant_id)


def from_cursor(cursor: str) -> JobCursor:
    """Raises `UsageError` for what is no cursor."""
    created_us, names = paging.decode_cursor(cursor, CURSOR_NAMES)
    return JobCursor(created_us, *names)


class JobSearch(msgspec.Struct, frozen=True):
    """One tenant's share of a list, in one state if its index needs one."""

    wanted: JobFilter
    tenant_id: str
    state: State | None
    after: JobCursor | None
    #: Rows to look through.
    scanned: int

    def page(self, dialect: Dialect, limit: int) -> Select[Any]:
        """The first matches."""
        conditions = self._residual()
        if not conditions:
            return self._ordered(select(*COLUMNS).where(*self._driving(dialect)), jobs.c, dialect).limit(limit)
        scanned = (
            self._ordered(select(*COLUMNS).where(*self._driving(dialect)), jobs.c, dialect)
            .limit(self.scanned)
            .subquery()
        )
        checks = self._residual(scanned.c)
        return self._ordered(select(scanned).where(*checks), scanned.c, dialect).limit(limit)

    def end(self, dialect: Dialect) -> Select[Any] | None:
        """The last row that `page` looked through, if there may be more behind it."""
        if not self._residual():
            return None
        place = select(jobs.c.created_at, jobs.c.job_id, jobs.c.queue, jobs.c.tenant_id)
        return self._ordered(place.where(*self._driving(dialect)), jobs.c, dialect).offset(self.scanned - 1).limit(1)

    def _ordered(self, statement: Select[Any], columns: Any, dialect: Dialect) -> Select[Any]:
        created_at, job_id, queue = (
            columns.created_at,
            _by_code(columns.job_id, dialect),
            _by_code(columns.queue, dialect),
        )
        if self.after is not None and columns is jobs.c:
            here = tuple_(created_at, job_id, queue)
            there = tuple_(
                literal(self.after.created_at, jobs.c.created_at.type),
                literal(clean(self.after.job_id)),
                literal(clean(self.after.queue)),
            )
            # The tenant comes last in the order: of equal places, those of smaller tenants are still to come.
            statement = statement.where(here <= there if self.tenant_id < self.after.tenant_id else here < there)
            # Said again for the index, which has another collation for what follows.
            statement = statement.where(created_at <= self.after.created_at)
        return statement.order_by(created_at.desc(), job_id.desc(), queue.desc())

    def _driving(self, dialect: Dialect) -> list[ColumnElement[bool]]:
        """What the index knows, and its predicate, word for word."""
        wanted = self.wanted
        conditions = [jobs.c.tenant_id == clean(self.tenant_id)]
        if wanted.since is not None:
            conditions.append(jobs.c.created_at >= wanted.since)
        if wanted.until is not None:
            conditions.append(jobs.c.created_at < wanted.until)
        match self._driver():
            case "key":
                key = clean(wanted.idempotency_key)
                own = and_(jobs.c.job_id == key, jobs.c.idempotency_key.in_((key, "")))
                given = [jobs.c.idempotency_key == key, jobs.c.idempotency_key != jobs.c.job_id]
                conditions.append(or_(and_(*given, *_indexed(jobs.c.idempotency_key, dialect)), own))
            case "trace":
                conditions += [jobs.c.trace_id == clean(wanted.trace_id), jobs.c.trace_id != ""]
                conditions += _indexed(jobs.c.trace_id, dialect)
            case "state":
                conditions += [jobs.c.state == self.state, jobs.c.state != State.SUCCEEDED.value]
            case "error":
                conditions.append(jobs.c.last_error.is_not(None))
            case "type":
                conditions.append(jobs.c.job_type == clean(wanted.job_type))
        return conditions

    def _residual(self, columns: Any = jobs.c) -> list[ColumnElement[bool]]:
        """What is checked row by row."""
        wanted, driver = self.wanted, self._driver()
        conditions: list[ColumnElement[bool]] = []
        if wanted.idempotency_key is not None and driver != "key":
            conditions.append(columns.idempotency_key == clean(wanted.idempotency_key))
        if wanted.trace_id is not None and driver != "trace":
            conditions.append(columns.trace_id == clean(wanted.trace_id))
        if wanted.states and driver != "state":
            conditions.append(columns.state.in_([state.value for state in sorted(wanted.states)]))
        if wanted.error:
            conditions.append(columns.last_error.icontains(clean(wanted.error), autoescape=True))
        if wanted.job_type is not None and driver != "type":
            conditions.append(columns.job_type == clean(wanted.job_type))
        if wanted.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, wanted.queues))))
        return conditions

    def _driver(self) -> str:
        wanted = self.wanted
        if wanted.idempotency_key is not None and _is_indexed(wanted.idempotency_key):
            return "key"
        if wanted.trace_id and _is_indexed(wanted.trace_id):
            return "trace"
        if self.state is not None:
            return "state"
        if wanted.error:
            return "error"
        return "type" if wanted.job_type is not None else "time"


def searches(wanted: JobFilter, tenants: list[str], after: JobCursor | None) -> list[JobSearch]:
    """What has to be asked."""
    by_state = wanted.states and State.SUCCEEDED not in wanted.states
    alone = wanted.idempotency_key is None and not wanted.trace_id
    states: list[State | None] = [*sorted(wanted.states)] if by_state and alone else [None]
    cost = TEXT_COST if wanted.error else 1
    each = max(SCANNED // max(1, len(tenants) * len(states) * cost), SCANNED_EACH)
    return [JobSearch(wanted, tenant, state, after, each) for tenant in tenants for state in states]


def _by_code(column: ColumnElement[str], dialect: Dialect) -> ColumnElement[str]:
    return collate(column, "BINARY" if dialect.name == "sqlite" else "C")


def _is_indexed(text: str) -> bool:
    """Longer ones, which only other programs send, are looked for row by row."""
    return len(clean(text).encode()) <= INDEXED_BYTES


def _indexed(column: ColumnElement[str], dialect: Dialect) -> list[ColumnElement[bool]]:
    """What else the index says of its rows, as in `ledger.schema`."""
    if dialect.name == "sqlite":
        return []
    return [func.octet_length(column) <= literal_column(str(INDEXED_BYTES))]
