"""Lists of what people have to do with, newest first, in keyset pages: approvals, dead letters, the operators' log.

As with jobs (`ledger.listing`): one search per tenant, driven by one index that has the order of the list; what the
index does not know is checked on what it gives, at most `SCANNED` rows a page. So a page takes bounded time whatever is
asked for. The order is (instant, id, tenant), descending: what is new comes before the first page, and nothing moves
between pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, Table, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast.errors import InvalidOption
from holdfast.ledger import cursors
from holdfast.ledger.listing import MAX_LIMIT, SCANNED, SCANNED_EACH
from holdfast.ledger.tenants import tenants_of
from holdfast.ledger.text import clean

T = TypeVar("T")

#: Names in a cursor: the row, its tenant.
CURSOR_NAMES: Final = 2

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

Conditions = list[ColumnElement[bool]]


class Spot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A place in the order of a list."""

    at_us: int
    id: str
    tenant_id: str

    @property
    def at(self) -> datetime:
        return _EPOCH + self.at_us * _MICROSECOND


@dataclass(frozen=True, slots=True)
class Register:
    """A table that is listed: by which instant, under which name."""

    table: Table
    instant: str
    name: str

    def spot_of(self, row: Any) -> Spot:
        """Where a row stands."""
        return Spot((getattr(row, self.instant) - _EPOCH) // _MICROSECOND, getattr(row, self.name), row.tenant_id)


@dataclass(frozen=True, slots=True)
class Search:
    """One tenant's share of a list."""

    register: Register
    columns: Sequence[ColumnElement[Any]]
    tenant_id: str
    #: What the index knows beside tenant and instant.
    driving: Conditions
    #: What is checked row by row.
    residual: Callable[[Any], Conditions]
    after: Spot | None
    scanned: int

    @property
    def is_exact(self) -> bool:
        """Whether the index gives nothing that is not wanted."""
        return not self.residual(self.register.table.c)

    def page(self, limit: int) -> Select[Any]:
        """The first matches."""
        if self.is_exact:
            return self._ordered(select(*self.columns)).limit(limit)
        scanned = self._ordered(select(*self.columns)).limit(self.scanned).subquery()
        instant, name = scanned.c[self.register.instant], scanned.c[self.register.name]
        matches = select(scanned).where(*self.residual(scanned.c))
        return matches.order_by(instant.desc(), name.desc()).limit(limit)

    def end(self) -> Select[Any]:
        """The last row that `page` looked through, if there may be more behind it."""
        register = self.register
        place = select(*(register.table.c[name] for name in (register.instant, register.name, "tenant_id")))
        return self._ordered(place).offset(self.scanned - 1).limit(1)

    def _ordered(self, statement: Select[Any]) -> Select[Any]:
        columns = self.register.table.c
        instant, name = columns[self.register.instant], columns[self.register.name]
        statement = statement.where(columns.tenant_id == clean(self.tenant_id), *self.driving)
        if self.after is not None:
            here, there = (
                tuple_(instant, name),
                tuple_(literal(self.after.at, instant.type), literal(clean(self.after.id))),
            )
            # The tenant comes last in the order: of equal places, those of smaller tenants are still to come.
            statement = statement.where(here <= there if self.tenant_id < self.after.tenant_id else here < there)
            # Said again for indexes that have the instant only.
            statement = statement.where(instant <= self.after.at)
        return statement.order_by(instant.desc(), name.desc())


def common(wanted: Sequence[str] | None, seen: Sequence[str] | None) -> Sequence[str] | None:
    """Those of the wanted tenants that somebody may see; None is all."""
    if wanted is None or seen is None:
        return seen if wanted is None else wanted
    return [tenant for tenant in wanted if tenant in seen]


def between(column: ColumnElement[Any], since: datetime | None, until: datetime | None) -> Conditions:
    """At `since` or later, and before `until`."""
    conditions = []
    if since is not None:
        conditions.append(column >= since)
    if until is not None:
        conditions.append(column < until)
    return conditions


def check_instants(**instants: datetime | None) -> None:
    """Raise `InvalidOption` for one without a time zone."""
    for name, value in instants.items():
        if value is not None and value.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone; give an aware datetime")


async def read_page(
    connection: AsyncConnection,
    register: Register,
    columns: Sequence[ColumnElement[Any]],
    tenants: Sequence[str] | None,
    driving: Sequence[Conditions],
    residual: Callable[[Any], Conditions],
    limit: int,
    cursor: str | None,
    cost: int = 1,
) -> tuple[list[Any], str | None]:
    """Rows of a page, and where the next one begins. `driving` are searches within each tenant that exclude another;
    `cost` is that of a row, as in `listing.TEXT_COST`."""
    check_limit(limit)
    after = from_cursor(cursor) if cursor else None
    if tenants is None:
        tenants = await every_tenant(connection, register.table)
    each = max(SCANNED // max(1, len(tenants) * len(driving) * cost), SCANNED_EACH)
    rows: list[Any] = []
    horizon: Spot | None = None
    for tenant in tenants:
        for known in driving:
            search = Search(register, columns, tenant, known, residual, after, each)
            found, end = await _search(connection, search, limit + 1)
            rows += found
            horizon = max((spot for spot in (horizon, end) if spot is not None), default=None)
    ordered = sorted(rows, key=register.spot_of, reverse=True)
    whole = [row for row in ordered if horizon is None or register.spot_of(row) >= horizon]
    shown = whole[:limit]
    if len(whole) > limit:
        horizon = register.spot_of(shown[-1])
    return shown, None if horizon is None else to_cursor(horizon)


async def every_tenant(connection: AsyncConnection, table: Table) -> list[str]:
    """All that have a row there."""
    return list((await connection.execute(tenants_of(table))).scalars())


async def _search(connection: AsyncConnection, search: Search, limit: int) -> tuple[list[Any], Spot | None]:
    rows = list((await connection.execute(search.page(limit))).all())
    if len(rows) == limit:
        return rows, search.register.spot_of(rows[-1])
    if search.is_exact:
        return rows, None
    last = (await connection.execute(search.end())).first()
    return rows, None if last is None else search.register.spot_of(last)


def check_limit(limit: int) -> None:
    """Raise `InvalidOption` for a page that is none."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidOption(f"limit must be from 1 to {MAX_LIMIT}, got {limit}")


def to_cursor(spot: Spot) -> str:
    """A place as text."""
    return cursors.written(spot.at_us, spot.id, spot.tenant_id)


def from_cursor(cursor: str) -> Spot:
    """Raises `UsageError` for what is no cursor."""
    at_us, names = cursors.read(cursor, CURSOR_NAMES)
    return Spot(at_us, *names)
