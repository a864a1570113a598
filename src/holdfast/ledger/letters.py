"""Dead letters as people look at them: filters, rows, groups (requirements D2, D5)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Select, func, select

from holdfast.ledger.paging import Conditions, Register, between, check_instants, common
from holdfast.ledger.people import LetterStatus
from holdfast.ledger.records import EventRow, Json
from holdfast.ledger.schema import dlq_items
from holdfast.ledger.text import clean

REGISTER: Final = Register(dlq_items, "failed_at", "dlq_id")
#: Groups are made of so many of a tenant's letters, the newest.
GROUPED: Final = 100_000
#: The most frequent kinds of errors; who has more looks at the letters.
GROUPS: Final = 500
#: Of a group's error, as a sample.
_SAMPLE: Final = 500


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters. Everything given must hold; nothing given is every letter."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    statuses: frozenset[LetterStatus] = frozenset()
    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    error_code: str | None = None
    #: Those that died of the same kind of error (`LetterGroup.fingerprint`).
    fingerprint: str | None = None
    #: Text in the error, in any case.
    text: str | None = None
    #: Died at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def seen_by(self, tenants: Sequence[str] | None) -> LetterFilter:
        """The same, of these tenants only; None: no fewer."""
        return msgspec.structs.replace(self, tenants=common(self.tenants, tenants))

    def driving(self) -> Conditions:
        """What an index knows."""
        conditions = between(dlq_items.c.failed_at, self.since, self.until)
        if self.fingerprint is not None:
            conditions.append(dlq_items.c.fingerprint == clean(self.fingerprint))
        return conditions

    def residual(self, columns: Any = dlq_items.c) -> Conditions:
        """What is checked row by row."""
        conditions: Conditions = []
        if self.statuses:
            conditions.append(columns.status.in_(sorted(status.value for status in self.statuses)))
        if self.job_type is not None:
            conditions.append(columns.job_type == clean(self.job_type))
        if self.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, self.queues))))
        if self.error_code is not None:
            conditions.append(columns.error_code == clean(self.error_code))
        if self.text:
            conditions.append(columns.error.icontains(clean(self.text), autoescape=True))
        return conditions


class LetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter as lists show it."""

    tenant_id: str
    dlq_id: str
    job_id: str
    queue: str
    job_type: str
    trace_id: str
    payload: Json
    error_code: str
    error: str
    retry_count: int
    failed_at: datetime
    status: LetterStatus
    requested_by: str | None
    confirmed_by: str | None
    reason: str | None
    replayed_as: str | None
    replay_count: int
    fingerprint: str


class LetterDetail(LetterRow, frozen=True, kw_only=True):
    """A dead letter with all that is needed to decide about it."""

    stack: str
    #: Every attempt.
    history: Json
    #: The job's whole story.
    events: list[EventRow]


class LetterPage(msgspec.Struct, frozen=True):
    """Letters, newest first. While there is a cursor there may be more, even after a short page."""

    letters: list[LetterRow]
    cursor: str | None


class LetterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Letters that died of the same kind of error."""

    fingerprint: str
    job_type: str
    error_code: str
    #: Of one of them.
    error: str
    count: int
    first: datetime
    last: datetime


COLUMNS: Final = tuple(dlq_items.c[name] for name in LetterRow.__struct_fields__)


def to_letter(row: Any) -> LetterRow:
    return LetterRow(**_given(row))


def to_detail(row: Any, events: list[EventRow]) -> LetterDetail:
    return LetterDetail(**_given(row) | {"history": Json(row.history), "events": events})


def _given(row: Any) -> dict[str, Any]:
    return {**row._mapping, "payload": Json(row.payload), "status": LetterStatus(row.status)}


def grouped(wanted: LetterFilter, tenant_id: str) -> Select[Any]:
    """One tenant's letters by the kind of error, the most frequent first."""
    columns = dlq_items.c
    kind = (columns.fingerprint, columns.job_type, columns.error_code)
    newest = (
        select(*kind, func.substr(columns.error, 1, _SAMPLE).label("error"), columns.failed_at)
        .where(columns.tenant_id == clean(tenant_id), *wanted.driving(), *wanted.residual())
        .order_by(columns.failed_at.desc())
        .limit(GROUPED)
        .subquery()
        .c
    )
    count = func.count().label("count")
    return (
        select(
            newest.fingerprint,
            newest.job_type,
            newest.error_code,
            func.max(newest.error).label("error"),
            count,
            func.min(newest.failed_at, type_=columns.failed_at.type).label("first"),
            func.max(newest.failed_at, type_=columns.failed_at.type).label("last"),
        )
        .group_by(newest.fingerprint, newest.job_type, newest.error_code)
        .order_by(count.desc())
        .limit(GROUPS)
    )


def counted(wanted: LetterFilter, tenant_id: str) -> Select[Any]:
    """How many of one tenant's letters there are."""
    return (
        select(func.count())
        .select_from(dlq_items)
        .where(dlq_items.c.tenant_id == clean(tenant_id), *wanted.driving(), *wanted.residual())
    )


def merged(rows: Sequence[Any]) -> list[LetterGroup]:
    """Groups of several tenants, the most frequent first, then the latest."""
    groups: dict[tuple[str, str, str], LetterGroup] = {}
    for row in rows:
        group = LetterGroup(**row._mapping)
        key = (group.fingerprint, group.job_type, group.error_code)
        if (other := groups.get(key)) is not None:
            group = msgspec.structs.replace(
                max(group, other, key=lambda one: one.last),
                count=group.count + other.count,
                first=min(group.first, other.first),
            )
        groups[key] = group
    return sorted(groups.values(), key=lambda one: (one.count, one.last), reverse=True)[:GROUPS]
