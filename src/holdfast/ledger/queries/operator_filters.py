"""Filters, rows, pages and groups for approvals, the audit log and dead letters (A3, H5, D2, D5)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Select, func, select

from holdfast.core.text import clean
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus, DeadLetterStatus
from holdfast.ledger.queries.paging import Conditions, ListSpec, between, check_instants, visible_tenants
from holdfast.ledger.queries.records import EventRow, JsonText
from holdfast.schema import approvals, dlq_items, operator_events

APPROVALS: Final = ListSpec(approvals, "requested_at", "approval_id")
LOG: Final = ListSpec(operator_events, "at", "id")
#: Target of entries about a whole queue.
_QUEUE: Final = "queue"


class ApprovalFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of approvals: all given conditions must hold; without any, every approval matches."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    statuses: frozenset[ApprovalStatus] = frozenset()
    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    job_id: str | None = None
    #: Requested at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def limited_to(self, tenants: Sequence[str] | None) -> ApprovalFilter:
        """Return the filter restricted to these tenants; None: not restricted."""
        return msgspec.structs.replace(self, tenants=visible_tenants(self.tenants, tenants))

    def index_conditions(self) -> list[Conditions]:
        """Conditions that an index covers, one search per status: in the index, the status precedes the time."""
        span = between(approvals.c.requested_at, self.since, self.until)
        if self.job_id is not None:
            return [[*span, approvals.c.job_id == clean(self.job_id)]]
        return [[*span, approvals.c.status == status.value] for status in sorted(self.statuses or ApprovalStatus)]

    def row_conditions(self, columns: Any = approvals.c) -> Conditions:
        """Conditions that are checked row by row."""
        conditions: Conditions = []
        if self.statuses and self.job_id is not None:
            conditions.append(columns.status.in_(sorted(status.value for status in self.statuses)))
        if self.job_type is not None:
            conditions.append(columns.job_type == clean(self.job_type))
        if self.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, self.queues))))
        return conditions


class ApprovalPage(msgspec.Struct, frozen=True):
    """Approvals, newest first. A cursor means that there may be more, even after a short page."""

    approvals: list[ApprovalRow]
    cursor: str | None


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of audit entries: all given conditions must hold; without any, every entry matches."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    #: `operator.cancel` …; the log also has alerts.
    types: frozenset[str] = frozenset()
    actor: str | None = None
    #: What was changed: `job`, `queue`, `dlq`, `approval`, `token`.
    target: str | None = None
    target_id: str | None = None
    queues: frozenset[str] = frozenset()
    since: datetime | None = None
    until: datetime | None = None
    #: Without entries about a whole queue: they are recorded under the default tenant, but concern every tenant.
    without_queues: bool = False

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def limited_to(self, tenants: Sequence[str] | None) -> AuditFilter:
        """Return the filter restricted to these tenants, without entries about whole queues; None: not restricted."""
        if tenants is None:
            return self
        return msgspec.structs.replace(self, tenants=visible_tenants(self.tenants, tenants), without_queues=True)

    def driving(self) -> Conditions:
        """Conditions that an index covers."""
        return between(operator_events.c.at, self.since, self.until)

    def residual(self, columns: Any = operator_events.c) -> Conditions:
        """Conditions that are checked row by row."""
        conditions: Conditions = []
        if self.types:
            conditions.append(columns.type.in_(sorted(map(clean, self.types))))
        if self.queues:
            conditions.append(columns.queue.in_(sorted(map(clean, self.queues))))
        if self.without_queues:
            conditions.append(columns.target != _QUEUE)
        given = ((columns.actor, self.actor), (columns.target, self.target), (columns.target_id, self.target_id))
        return conditions + [column == clean(value) for column, value in given if value is not None]


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit log."""

    tenant_id: str
    id: str
    type: str
    actor: str
    target: str
    target_id: str
    queue: str
    reason: str
    before: JsonText | None
    after: JsonText | None
    at: datetime


class AuditPage(msgspec.Struct, frozen=True):
    """Audit entries, newest first. A cursor means that there may be more, even after a short page."""

    entries: list[AuditRow]
    cursor: str | None


LOG_COLUMNS: Final = tuple(operator_events.c[name] for name in AuditRow.__struct_fields__)


def to_audit_row(row: Any) -> AuditRow:
    jsons = {name: None if (text := getattr(row, name)) is None else JsonText(text) for name in ("before", "after")}
    return AuditRow(**{**row._mapping, **jsons})


REGISTER: Final = ListSpec(dlq_items, "failed_at", "dlq_id")
#: Groups cover at most this many of a tenant's dead letters, the newest.
GROUPED: Final = 100_000
#: At most this many groups are returned, the most frequent.
GROUPS: Final = 500
#: Characters of a group's sample error.
_SAMPLE: Final = 500


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of dead letters: all given conditions must hold; without any, every dead letter matches."""

    #: None: of all tenants.
    tenants: Sequence[str] | None = None
    statuses: frozenset[DeadLetterStatus] = frozenset()
    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    error_code: str | None = None
    #: Kind of error (`DeadLetterGroup.fingerprint`).
    fingerprint: str | None = None
    #: Text in the error, case-insensitive.
    text: str | None = None
    #: Failed at this instant or later …
    since: datetime | None = None
    #: … and before this one.
    until: datetime | None = None

    def __post_init__(self) -> None:
        check_instants(since=self.since, until=self.until)

    def limited_to(self, tenants: Sequence[str] | None) -> DeadLetterFilter:
        """Return the filter restricted to these tenants; None: not restricted."""
        return msgspec.structs.replace(self, tenants=visible_tenants(self.tenants, tenants))

    def driving(self) -> Conditions:
        """Conditions that an index covers."""
        conditions = between(dlq_items.c.failed_at, self.since, self.until)
        if self.fingerprint is not None:
            conditions.append(dlq_items.c.fingerprint == clean(self.fingerprint))
        return conditions

    def residual(self, columns: Any = dlq_items.c) -> Conditions:
        """Conditions that are checked row by row."""
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


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter as shown in lists."""

    tenant_id: str
    dlq_id: str
    job_id: str
    queue: str
    job_type: str
    trace_id: str
    payload: JsonText
    error_code: str
    error: str
    retry_count: int
    failed_at: datetime
    status: DeadLetterStatus
    requested_by: str | None
    confirmed_by: str | None
    reason: str | None
    replayed_as: str | None
    replay_count: int
    fingerprint: str


class DeadLetterDetail(DeadLetterRow, frozen=True, kw_only=True):
    """A dead letter with everything needed to decide about it."""

    stack: str
    #: Every attempt.
    history: JsonText
    #: The job's history.
    events: list[EventRow]


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Dead letters, newest first. A cursor means that there may be more, even after a short page."""

    dead_letters: list[DeadLetterRow]
    cursor: str | None


class DeadLetterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same kind of error."""

    fingerprint: str
    job_type: str
    error_code: str
    #: A sample.
    error: str
    count: int
    first: datetime
    last: datetime


COLUMNS: Final = tuple(dlq_items.c[name] for name in DeadLetterRow.__struct_fields__)


def to_dead_letter(row: Any) -> DeadLetterRow:
    return DeadLetterRow(**_to_fields(row))


def to_detail(row: Any, events: list[EventRow]) -> DeadLetterDetail:
    return DeadLetterDetail(**_to_fields(row) | {"history": JsonText(row.history), "events": events})


def _to_fields(row: Any) -> dict[str, Any]:
    return {**row._mapping, "payload": JsonText(row.payload), "status": DeadLetterStatus(row.status)}


def group_query(filters: DeadLetterFilter, tenant_id: str) -> Select[Any]:
    """Select one tenant's dead letters grouped by kind of error, the most frequent first."""
    columns = dlq_items.c
    kind = (columns.fingerprint, columns.job_type, columns.error_code)
    newest = (
        select(*kind, func.substr(columns.error, 1, _SAMPLE).label("error"), columns.failed_at)
        .where(columns.tenant_id == clean(tenant_id), *filters.driving(), *filters.residual())
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


def count_query(filters: DeadLetterFilter, tenant_id: str) -> Select[Any]:
    """Count one tenant's dead letters."""
    return (
        select(func.count())
        .select_from(dlq_items)
        .where(dlq_items.c.tenant_id == clean(tenant_id), *filters.driving(), *filters.residual())
    )


def merge_groups(rows: Sequence[Any]) -> list[DeadLetterGroup]:
    """Merge groups of several tenants, the most frequent first, then the latest."""
    groups: dict[tuple[str, str, str], DeadLetterGroup] = {}
    for row in rows:
        group = DeadLetterGroup(**row._mapping)
        key = (group.fingerprint, group.job_type, group.error_code)
        if (other := groups.get(key)) is not None:
            group = msgspec.structs.replace(
                max(group, other, key=lambda one: one.last),
                count=group.count + other.count,
                first=min(group.first, other.first),
            )
        groups[key] = group
    return sorted(groups.values(), key=lambda one: (one.count, one.last), reverse=True)[:GROUPS]
