"""Keyset pages and cursors for lists, newest first: approvals, dead letters, the audit log.

Every index leads with the tenant, so a list over several tenants is one search per tenant, merged here. Each search is
driven by one index that has the order of the list. Conditions that the index does not cover are checked on the rows it
returns, about `SCANNED` rows a page. A page therefore takes bounded time whatever the filter; rare matches cost more
pages, never a long query. The order is (instant, id, tenant), descending: new rows come before the first page, and
rows do not move between pages. Lists of jobs (`ledger.queries.job_list`) work the same way and use the same limits.

A cursor is opaque to callers: an instant in microseconds, then the names that follow it in the order, as hexadecimal
UTF-8. Every text of that shape is a valid position, even where there is no row, so `cursor_pattern` is the whole check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Select, Table, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast.core.text import clean, decode_text
from holdfast.errors import InvalidOption, UsageError
from holdfast.schema.columns import tenants_of

#: Microseconds; 16 digits suffice until the year 2286.
_INSTANT: Final = "[0-9]{1,16}"
_NAME: Final = "-([0-9a-f]{2})*"


def cursor_pattern(names: int) -> str:
    """Return the pattern of a cursor with this many names."""
    return f"^{_INSTANT}({_NAME}){{{names}}}$"


def encode_cursor(instant_us: int, *names: str) -> str:
    """Encode a position as text."""
    return "-".join((str(instant_us), *(name.encode("utf-8", "surrogatepass").hex() for name in names)))


def decode_cursor(cursor: str, names: int) -> tuple[int, list[str]]:
    """Decode a position. Raises `UsageError` if the cursor is invalid."""
    if not re.fullmatch(cursor_pattern(names), cursor):
        raise UsageError(f"{cursor[:80]!r} is not a cursor; use the cursor of the previous page")
    instant, *encoded = cursor.split("-")
    return int(instant), [decode_text(bytes.fromhex(name)) for name in encoded]


#: Rows scanned for one page by all its searches together …
SCANNED: Final = 6_000
#: … and by each at least.
SCANNED_EACH: Final = 300
MAX_LIMIT: Final = 1_000


#: Names in a cursor: the row, its tenant.
CURSOR_NAMES: Final = 2

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

Conditions = list[ColumnElement[bool]]


class ListCursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A position in the order of a list."""

    at_us: int
    id: str
    tenant_id: str

    @property
    def at(self) -> datetime:
        return _EPOCH + self.at_us * _MICROSECOND


@dataclass(frozen=True, slots=True)
class ListSpec:
    """A listed table: the column that orders it and the column that names its rows."""

    table: Table
    instant: str
    name: str

    def cursor_of(self, row: Any) -> ListCursor:
        """Return the position of a row."""
        return ListCursor((getattr(row, self.instant) - _EPOCH) // _MICROSECOND, getattr(row, self.name), row.tenant_id)


@dataclass(frozen=True, slots=True)
class ListSearch:
    """One tenant's part of a list."""

    register: ListSpec
    columns: Sequence[ColumnElement[Any]]
    tenant_id: str
    #: Conditions that the index covers besides tenant and instant.
    driving: Conditions
    #: Conditions that are checked row by row.
    residual: Callable[[Any], Conditions]
    after: ListCursor | None
    scanned: int

    @property
    def is_exact(self) -> bool:
        """Whether every row that the index returns matches."""
        return not self.residual(self.register.table.c)

    def page(self, limit: int) -> Select[Any]:
        """Select the first matches."""
        if self.is_exact:
            return self._order(select(*self.columns)).limit(limit)
        scanned = self._order(select(*self.columns)).limit(self.scanned).subquery()
        instant, name = scanned.c[self.register.instant], scanned.c[self.register.name]
        matches = select(scanned).where(*self.residual(scanned.c))
        return matches.order_by(instant.desc(), name.desc()).limit(limit)

    def end(self) -> Select[Any]:
        """Select the last row that `page` scanned, if there are more."""
        register = self.register
        cursor_columns = select(*(register.table.c[name] for name in (register.instant, register.name, "tenant_id")))
        return self._order(cursor_columns).offset(self.scanned - 1).limit(1)

    def _order(self, statement: Select[Any]) -> Select[Any]:
        columns = self.register.table.c
        instant, name = columns[self.register.instant], columns[self.register.name]
        statement = statement.where(columns.tenant_id == clean(self.tenant_id), *self.driving)
        if self.after is not None:
            here, there = (
                tuple_(instant, name),
                tuple_(literal(self.after.at, instant.type), literal(clean(self.after.id))),
            )
            # The tenant comes last in the order: at an equal position, rows of smaller tenants are still to come.
            statement = statement.where(here <= there if self.tenant_id < self.after.tenant_id else here < there)
            # Repeated for indexes that have the instant only.
            statement = statement.where(instant <= self.after.at)
        return statement.order_by(instant.desc(), name.desc())


def visible_tenants(tenants: Sequence[str] | None, visible: Sequence[str] | None) -> Sequence[str] | None:
    """Return the requested tenants that are visible; None means all."""
    if tenants is None or visible is None:
        return visible if tenants is None else tenants
    return [tenant for tenant in tenants if tenant in visible]


def between(column: ColumnElement[Any], since: datetime | None, until: datetime | None) -> Conditions:
    """Conditions for an instant at `since` or later, and before `until`."""
    conditions = []
    if since is not None:
        conditions.append(column >= since)
    if until is not None:
        conditions.append(column < until)
    return conditions


def check_instants(**instants: datetime | None) -> None:
    """Raise `InvalidOption` for an instant without a time zone, or one that has no date in UTC."""
    for name, value in instants.items():
        if value is None:
            continue
        if value.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone; pass an aware datetime")
        try:
            value.astimezone(UTC)
        except OverflowError:
            raise InvalidOption(f"{name} {value.isoformat()} is outside the years 1 to 9999 in UTC") from None


async def read_page(
    connection: AsyncConnection,
    register: ListSpec,
    columns: Sequence[ColumnElement[Any]],
    tenants: Sequence[str] | None,
    driving: Sequence[Conditions],
    residual: Callable[[Any], Conditions],
    limit: int,
    cursor: str | None,
    cost: int = 1,
) -> tuple[list[Any], str | None]:
    """Return the rows of a page and the cursor of the next one.

    `driving` are searches within each tenant that exclude each other; `cost` is that of a row, as in
    `job_list.TEXT_COST`.
    """
    check_limit(limit)
    after = from_cursor(cursor) if cursor else None
    if tenants is None:
        tenants = await all_tenants(connection, register.table)
    each = max(SCANNED // max(1, len(tenants) * len(driving) * cost), SCANNED_EACH)
    rows: list[Any] = []
    horizon: ListCursor | None = None
    for tenant in tenants:
        for conditions in driving:
            search = ListSearch(register, columns, tenant, conditions, residual, after, each)
            found, end = await _search(connection, search, limit + 1)
            rows += found
            horizon = max((position for position in (horizon, end) if position is not None), default=None)
    ordered = sorted(rows, key=register.cursor_of, reverse=True)
    whole = [row for row in ordered if horizon is None or register.cursor_of(row) >= horizon]
    shown = whole[:limit]
    if len(whole) > limit:
        horizon = register.cursor_of(shown[-1])
    return shown, None if horizon is None else to_cursor(horizon)


async def all_tenants(connection: AsyncConnection, table: Table) -> list[str]:
    """Return all tenants that have a row in the table."""
    return list((await connection.execute(tenants_of(table))).scalars())


async def _search(connection: AsyncConnection, search: ListSearch, limit: int) -> tuple[list[Any], ListCursor | None]:
    rows = list((await connection.execute(search.page(limit))).all())
    if len(rows) == limit:
        return rows, search.register.cursor_of(rows[-1])
    if search.is_exact:
        return rows, None
    last = (await connection.execute(search.end())).first()
    return rows, None if last is None else search.register.cursor_of(last)


def check_limit(limit: int) -> None:
    """Raise `InvalidOption` for a limit out of range."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidOption(f"limit must be from 1 to {MAX_LIMIT}, got {limit}")


def to_cursor(position: ListCursor) -> str:
    """Encode a position as text."""
    return encode_cursor(position.at_us, position.id, position.tenant_id)


def from_cursor(cursor: str) -> ListCursor:
    """Decode a cursor. Raises `UsageError` if it is invalid."""
    at_us, names = decode_cursor(cursor, CURSOR_NAMES)
    return ListCursor(at_us, *names)
