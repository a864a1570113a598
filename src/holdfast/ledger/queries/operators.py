"""Read-only queries about what operators decide on, pending notifications, gauges and effect keys.

- `OperatorQueries`, a part of `Queries`: approvals, dead letters, the audit log. `tenants` are those that the caller
  may see, None for all; rows of other tenants are treated as absent.
- `PendingNotifications`: what has to be sent to subscribers by webhook (requirement H7). A row is pending until it is
  marked. Rows are marked after their deliveries were submitted under idempotency keys, so a crash between the two
  steps, or a second process doing the same, does not send a notification twice.
- `read_gauges`: the numbers for a metrics scrape, each from a small index.
- `EffectQueries`: effect keys in doubt or reserved, and one key with everything known about it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import ColumnElement, Select, Table, and_, func, or_, select, tuple_
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from holdfast import schema
from holdfast.core.job import JobKey
from holdfast.core.text import clean
from holdfast.errors import LedgerUnavailable, NotFound
from holdfast.ledger.fold_events import meta_of
from holdfast.ledger.port.effects import EffectState
from holdfast.ledger.port.operators import (
    ALERT_PREFIX,
    MAX_NOTIFICATION_AGE,
    AlertNotification,
    ApprovalNotification,
    ApprovalRow,
    ApprovalStatus,
    FinishedJob,
    NotificationMarks,
    VoteRow,
)
from holdfast.ledger.queries import operator_filters
from holdfast.ledger.queries.job_list import TEXT_COST
from holdfast.ledger.queries.operator_filters import (
    ApprovalFilter,
    ApprovalPage,
    AuditFilter,
    AuditPage,
    DeadLetterDetail,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterPage,
)
from holdfast.ledger.queries.paging import all_tenants, read_page
from holdfast.ledger.queries.records import EventRow
from holdfast.ledger.transactions.approvals import to_approval, to_vote
from holdfast.schema import approvals, jobs, operator_events
from holdfast.schema import idempotency_keys as keys

if TYPE_CHECKING:
    from holdfast.ledger.queries.jobs import Queries


#: The job that an approval is about.
_OF_JOB: Final = and_(
    jobs.c.tenant_id == approvals.c.tenant_id, jobs.c.job_id == approvals.c.job_id, jobs.c.queue == approvals.c.queue
)


class PendingNotifications:
    """Reads what has not been sent, oldest first within a tenant. All raise `LedgerUnavailable`.

    `except_for`: tenants whose rows are left out.
    """

    def __init__(self, engine: AsyncEngine, mark: NotificationMarks) -> None:
        self._engine = engine
        self.mark = mark

    async def finished_jobs(self, limit: int, except_for: Collection[str] = ()) -> list[FinishedJob]:
        """Return jobs that have ended and have a webhook."""
        query = (
            select(jobs)
            .where(jobs.c.webhook.is_not(None), jobs.c.notified_at.is_(None), jobs.c.finished_at.is_not(None))
            .order_by(jobs.c.tenant_id, jobs.c.finished_at)
            .limit(limit)
        )
        return [_finished_job(row) for row in await self._rows(query, jobs, except_for)]

    async def approvals(self, limit: int, except_for: Collection[str] = ()) -> list[ApprovalNotification]:
        """Return approvals requested or decided within `MAX_NOTIFICATION_AGE`."""
        since = datetime.now(UTC) - MAX_NOTIFICATION_AGE
        query = (
            select(approvals, jobs.c.trace_id, jobs.c.meta)
            .outerjoin(jobs, _OF_JOB)
            .where(
                or_(approvals.c.notified_status.is_(None), approvals.c.notified_status != approvals.c.status),
                or_(approvals.c.requested_at > since, approvals.c.decided_at > since),
            )
            .order_by(approvals.c.tenant_id, approvals.c.requested_at)
            .limit(limit)
        )
        return [_approval(row) for row in await self._rows(query, approvals, except_for)]

    async def alerts(self, limit: int, except_for: Collection[str] = ()) -> list[AlertNotification]:
        """Return alerts raised or cleared within `MAX_NOTIFICATION_AGE`."""
        query = (
            select(operator_events)
            .where(
                operator_events.c.notified_at.is_(None),
                operator_events.c.type.like(f"{ALERT_PREFIX}%"),
                operator_events.c.at > datetime.now(UTC) - MAX_NOTIFICATION_AGE,
            )
            .order_by(operator_events.c.tenant_id, operator_events.c.at)
            .limit(limit)
        )
        rows = await self._rows(query, operator_events, except_for)
        return [msgspec.convert(row, AlertNotification) for row in rows]

    async def _rows(self, query: Select[Any], table: Table, except_for: Collection[str]) -> list[dict[str, Any]]:
        if except_for:
            query = query.where(table.c.tenant_id.not_in(except_for))
        try:
            async with self._engine.connect() as connection:
                found = (await connection.execute(query)).mappings()
                # SQLAlchemy's column names are a subclass of str, which msgspec does not accept.
                return [{str(name): value for name, value in row.items()} for row in found]
        except (DBAPIError, PoolTimeout, OSError, TimeoutError) as exc:
            raise LedgerUnavailable(f"the ledger does not answer: {type(exc).__name__}") from exc


def _finished_job(row: dict[str, Any]) -> FinishedJob:
    key = JobKey(row["tenant_id"], row["queue"], row["job_id"])
    return msgspec.convert({**row, "key": key, "traceparent": _traceparent(row)}, FinishedJob)


def _approval(row: dict[str, Any]) -> ApprovalNotification:
    trace = {"trace_id": row["trace_id"] or "", "traceparent": _traceparent(row)}
    return msgspec.convert(row | trace, ApprovalNotification)


def _traceparent(row: dict[str, Any]) -> str:
    meta: str = row["meta"] or ""
    # Most jobs were not traced, and their `meta` is not decoded.
    if '"traceparent"' not in meta:
        return ""
    try:
        return meta_of(meta).traceparent
    except msgspec.MsgspecError:
        return ""


class OperatorQueries:
    """Lists in keyset pages, newest first. Lists raise `UsageError` for an invalid cursor."""

    def _connection(self) -> AbstractAsyncContextManager[AsyncConnection]:
        raise NotImplementedError

    async def events(self, key: JobKey) -> list[EventRow]:
        raise NotImplementedError

    # Approvals -------------------------------------------------------------------------------------

    async def approvals(
        self, filters: ApprovalFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> ApprovalPage:
        """Return a page of approvals, with their votes."""
        filters = filters or ApprovalFilter()
        async with self._connection() as connection:
            rows, next_cursor = await read_page(
                connection,
                operator_filters.APPROVALS,
                list(schema.approvals.c),
                filters.tenants,
                filters.index_conditions(),
                filters.row_conditions,
                limit,
                cursor,
            )
            return ApprovalPage(await _with_votes(connection, rows), next_cursor)

    async def approval(self, tenants: Sequence[str] | None, approval_id: str) -> ApprovalRow:
        """Return one approval, with its votes. Raises `NotFound`."""
        async with self._connection() as connection:
            row = await _one(connection, schema.approvals, "approval_id", "approval", approval_id, tenants)
            return (await _with_votes(connection, [row]))[0]

    # Dead letters ----------------------------------------------------------------------------------

    async def dead_letters(
        self, filters: DeadLetterFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> DeadLetterPage:
        """Return a page of dead letters."""
        filters = filters or DeadLetterFilter()
        async with self._connection() as connection:
            rows, next_cursor = await read_page(
                connection,
                operator_filters.REGISTER,
                operator_filters.COLUMNS,
                filters.tenants,
                [filters.driving()],
                filters.residual,
                limit,
                cursor,
                cost=TEXT_COST if filters.text else 1,
            )
        return DeadLetterPage([operator_filters.to_dead_letter(row) for row in rows], next_cursor)

    async def dead_letter(self, tenants: Sequence[str] | None, dlq_id: str) -> DeadLetterDetail:
        """Return one dead letter with its job's history. Raises `NotFound`."""
        async with self._connection() as connection:
            row = await _one(connection, schema.dlq_items, "dlq_id", "dead letter", dlq_id, tenants)
        return operator_filters.to_detail(row, await self.events(JobKey(row.tenant_id, row.queue, row.job_id)))

    async def dead_letter_groups(self, filters: DeadLetterFilter | None = None) -> list[DeadLetterGroup]:
        """Group each tenant's newest dead letters by kind of error, the most frequent first."""
        filters = filters or DeadLetterFilter()
        rows: list[Any] = []
        async with self._connection() as connection:
            for tenant in await _tenants(connection, schema.dlq_items, filters.tenants):
                rows += (await connection.execute(operator_filters.group_query(filters, tenant))).all()
        return operator_filters.merge_groups(rows)

    async def dead_letter_count(self, filters: DeadLetterFilter | None = None) -> int:
        """Count dead letters exactly."""
        filters, count = filters or DeadLetterFilter(), 0
        async with self._connection() as connection:
            for tenant in await _tenants(connection, schema.dlq_items, filters.tenants):
                count += (await connection.execute(operator_filters.count_query(filters, tenant))).scalar_one()
        return count

    # Audit log -------------------------------------------------------------------------------------

    async def audit_log(
        self, filters: AuditFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> AuditPage:
        """Return a page of audit entries and alerts."""
        filters = filters or AuditFilter()
        async with self._connection() as connection:
            rows, next_cursor = await read_page(
                connection,
                operator_filters.LOG,
                operator_filters.LOG_COLUMNS,
                filters.tenants,
                [filters.driving()],
                filters.residual,
                limit,
                cursor,
            )
        return AuditPage([operator_filters.to_audit_row(row) for row in rows], next_cursor)


async def _tenants(connection: AsyncConnection, table: Table, tenants: Sequence[str] | None) -> Sequence[str]:
    return await all_tenants(connection, table) if tenants is None else tenants


async def _one(
    connection: AsyncConnection, table: Table, column: str, what: str, name: str, tenants: Sequence[str] | None
) -> Any:
    for tenant in await _tenants(connection, table, tenants):
        where = (table.c.tenant_id == clean(tenant), table.c[column] == clean(name))
        columns = (
            select(table)
            if table is schema.approvals
            else select(*operator_filters.COLUMNS, table.c.stack, table.c.history)
        )
        if (row := (await connection.execute(columns.where(*where))).first()) is not None:
            return row
    raise NotFound(what, name)


async def _with_votes(connection: AsyncConnection, rows: Sequence[Any]) -> list[ApprovalRow]:
    cast: dict[tuple[str, str], list[VoteRow]] = {}
    votes = schema.approval_votes.c
    if rows:
        names = [(row.tenant_id, row.approval_id) for row in rows]
        found = select(schema.approval_votes).where(tuple_(votes.tenant_id, votes.approval_id).in_(names))
        for row in await connection.execute(found.order_by(votes.at, votes.voter)):
            cast.setdefault((row.tenant_id, row.approval_id), []).append(to_vote(dict(row._mapping)))
    return [to_approval(dict(row._mapping), tuple(cast.get((row.tenant_id, row.approval_id), ()))) for row in rows]


#: Only tenants with the highest counts are reported; a metric must not have a million series.
MAX_TENANTS: Final = 1_000


class LedgerGauges(msgspec.Struct, frozen=True):
    """Counts by tenant, and the keys of standing alerts."""

    #: Dead letters whose jobs are still in `dlq_pending` because the engine was not notified yet.
    dlq_pending: dict[str, int]
    approvals_waiting: dict[str, int]
    alerts: list[str]


async def read_gauges(queries: Queries) -> LedgerGauges:
    """Read all gauges at about the same moment. Raises `LedgerUnavailable`."""
    dead_letters, approvals = schema.dlq_items, schema.approvals
    try:
        async with queries.engine.connect() as connection:

            async def count_by_tenant(table: Table, condition: ColumnElement[bool]) -> dict[str, int]:
                number = func.count()
                grouped = select(table.c.tenant_id, number).where(condition).group_by(table.c.tenant_id)
                rows: Any = await connection.execute(grouped.order_by(number.desc()).limit(MAX_TENANTS))
                return dict(rows.all())

            return LedgerGauges(
                await count_by_tenant(dead_letters, dead_letters.c.acked_at.is_(None)),
                await count_by_tenant(approvals, approvals.c.status == ApprovalStatus.REQUESTED.value),
                list((await connection.execute(select(schema.alerts.c.key))).scalars()),
            )
    except (DBAPIError, PoolTimeout, OSError, TimeoutError) as exc:
        cause = getattr(exc, "orig", None) or exc
        raise LedgerUnavailable(f"the ledger does not answer: {cause}; check that it is up, then retry") from exc


class EffectKeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One effect key. `value` is JSON text."""

    tenant_id: str
    key: str
    state: str
    function: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    reason: str | None
    value: str | None
    token: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None


_COLUMNS = tuple(keys.c[name] for name in EffectKeyRow.__struct_fields__)


class EffectQueries:
    """Read-only queries on effect keys, on PostgreSQL and SQLite."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find_unresolved(
        self, tenant_id: str | None = None, state: EffectState | None = None, limit: int = 100
    ) -> list[EffectKeyRow]:
        """Return keys that are reserved or in doubt, the longest unchanged first. Done keys are not read."""
        query = select(*_COLUMNS).where(keys.c.state != EffectState.DONE.value)
        if tenant_id is not None:
            query = query.where(keys.c.tenant_id == tenant_id)
        if state is not None:
            query = query.where(keys.c.state == state.value)
        return await self._rows(query.order_by(keys.c.updated_at).limit(limit))

    async def find(self, tenant_id: str, key: str) -> EffectKeyRow | None:
        """Return one key, or None."""
        rows = await self._rows(select(*_COLUMNS).where(keys.c.tenant_id == tenant_id, keys.c.key == key))
        return rows[0] if rows else None

    async def _rows(self, statement: Select[Any]) -> list[EffectKeyRow]:
        try:
            async with self._engine.connect() as connection:
                found = (await connection.execute(statement)).mappings().all()
        except DBAPIError as exc:
            raise LedgerUnavailable(f"the ledger does not answer: {exc.orig}") from exc
        return [EffectKeyRow(**row) for row in found]
