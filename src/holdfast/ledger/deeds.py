"""Approvals and the operators' log as people look at them: filters and rows (requirements A3, H5)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.ledger.paging import Conditions, Register, between, check_instants, common
from holdfast.ledger.people import ApprovalRow, ApprovalStatus
from holdfast.ledger.records import Json
from holdfast.ledger.schema import approvals, operator_events
from holdfast.ledger.text import clean

APPROVALS: Final = Register(approvals, "requested_at", "approval_id")
LOG: Final = Register(operator_events, "at", "id")


class ApprovalFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which approvals. Everything given must hold; nothing given is every approval."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    statuses: frozenset[ApprovalStatus] = frozenset()
    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    job_id: str | None = None
    #: Asked for at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def seen_by(self, tenants: Sequence[str] | None) -> ApprovalFilter:
        """The same, of these tenants only; None: no fewer."""
        return msgspec.structs.replace(self, tenants=common(self.tenants, tenants))

    def driving(self) -> list[Conditions]:
        """What an index knows; a search for each status, since that comes before the time in it."""
        span = between(approvals.c.requested_at, self.since, self.until)
        if self.job_id is not None:
            return [[*span, approvals.c.job_id == clean(self.job_id)]]
        return [[*span, approvals.c.status == status.value] for status in sorted(self.statuses or ApprovalStatus)]

    def residual(self, columns: Any = approvals.c) -> Conditions:
        """What is checked row by row."""
        conditions: Conditions = []
        if self.statuses and self.job_id is not None:
            conditions.append(columns.status.in_(sorted(status.value for status in self.statuses)))
        if self.job_type is not None:
            conditions.append(columns.job_type == clean(self.job_type))
        if self.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, self.queues))))
        return conditions


class ApprovalPage(msgspec.Struct, frozen=True):
    """Approvals, newest first. While there is a cursor there may be more, even after a short page."""

    approvals: list[ApprovalRow]
    cursor: str | None


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines of the operators' log. Everything given must hold; nothing given is all of it."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    #: `operator.cancel` …; alerts are in the log, too.
    types: frozenset[str] = frozenset()
    actor: str | None = None
    #: What it was done to: `job`, `queue`, `dlq`, `approval`, `token`.
    target: str | None = None
    target_id: str | None = None
    queues: frozenset[str] = frozenset()
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def seen_by(self, tenants: Sequence[str] | None) -> LogFilter:
        """The same, of these tenants only; None: no fewer."""
        return msgspec.structs.replace(self, tenants=common(self.tenants, tenants))

    def driving(self) -> Conditions:
        """What an index knows."""
        return between(operator_events.c.at, self.since, self.until)

    def residual(self, columns: Any = operator_events.c) -> Conditions:
        """What is checked row by row."""
        conditions: Conditions = []
        if self.types:
            conditions.append(columns.type.in_(sorted(map(clean, self.types))))
        if self.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, self.queues))))
        given = ((columns.actor, self.actor), (columns.target, self.target), (columns.target_id, self.target_id))
        return conditions + [column == clean(value) for column, value in given if value is not None]


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the operators' log."""

    tenant_id: str
    id: str
    type: str
    actor: str
    target: str
    target_id: str
    queue: str
    reason: str
    before: Json | None
    after: Json | None
    at: datetime


class LogPage(msgspec.Struct, frozen=True):
    """Lines, newest first. While there is a cursor there may be more, even after a short page."""

    lines: list[LogRow]
    cursor: str | None


LOG_COLUMNS: Final = tuple(operator_events.c[name] for name in LogRow.__struct_fields__)


def to_line(row: Any) -> LogRow:
    jsons = {name: None if (text := getattr(row, name)) is None else Json(text) for name in ("before", "after")}
    return LogRow(**{**row._mapping, **jsons})
