"""What others are to be told by webhook, as the ledger knows it (requirement H7): the courier's end.

A row is *untold* until it is marked. Rows are marked after their deliveries have been handed in under keys of their
own, so whoever comes between the two, or at the same time, tells nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import msgspec
from sqlalchemy import Select, and_, or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.core.states import State
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.folding import meta_of
from holdfast.ledger.keys import JobKey
from holdfast.ledger.people import ApprovalStatus
from holdfast.ledger.schema import approvals, jobs, operator_events

#: Approvals and alerts that are older are no news: nobody had subscribed when they happened.
NEWS_AGE: Final = timedelta(days=1)

ALERT_PREFIX: Final = "alert."

#: The job that an approval is about.
_OF_JOB: Final = and_(
    jobs.c.tenant_id == approvals.c.tenant_id, jobs.c.job_id == approvals.c.job_id, jobs.c.queue == approvals.c.queue
)


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended, without its insides."""

    key: JobKey
    job_type: str
    state: State
    attempt: int
    retry_count: int
    trace_id: str
    idempotency_key: str
    error_code: str | None
    #: For outsiders.
    error_message: str | None
    #: JSON.
    result: str | None
    dlq_id: str | None
    #: An address, or `core.webhook.SUBSCRIBERS`.
    webhook: str
    created_at: datetime
    finished_at: datetime
    #: W3C trace context of its submission; empty if it was not traced.
    traceparent: str


class ApprovalNews(msgspec.Struct, frozen=True, kw_only=True):
    """An approval whose status subscribers have not been told of."""

    tenant_id: str
    approval_id: str
    job_id: str
    queue: str
    job_type: str
    status: ApprovalStatus
    told: ApprovalStatus | None
    name: str
    reason: str
    #: JSON.
    policies: str
    details: str | None
    quorum: int
    requested_by: str
    requested_at: datetime
    deadline: datetime | None
    decided_by: str | None
    decided_at: datetime | None
    decision_reason: str | None
    #: Of the job; empty if the ledger no longer has it.
    trace_id: str
    traceparent: str


class AlertNews(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was raised or has ended."""

    tenant_id: str
    id: str
    type: str
    target: str
    target_id: str
    queue: str
    reason: str
    #: JSON.
    after: str | None
    at: datetime


class Marks(Protocol):
    """Writes marks. Each call is one transaction; to mark what is marked does nothing."""

    async def jobs(self, keys: Sequence[JobKey]) -> None: ...
    async def approvals(self, told: Sequence[ApprovalNews]) -> None: ...
    async def alerts(self, told: Sequence[AlertNews]) -> None: ...


class Telling:
    """Reads what is untold, oldest first within a tenant. All raise `LedgerUnavailable`."""

    def __init__(self, engine: AsyncEngine, mark: Marks) -> None:
        self._engine = engine
        self.mark = mark

    async def jobs(self, limit: int) -> list[EndedJob]:
        """Jobs that have ended and have somebody to tell."""
        query = (
            select(jobs)
            .where(jobs.c.webhook.is_not(None), jobs.c.told_at.is_(None), jobs.c.finished_at.is_not(None))
            .order_by(jobs.c.tenant_id, jobs.c.finished_at)
            .limit(limit)
        )
        return [_ended(row) for row in await self._rows(query)]

    async def approvals(self, limit: int) -> list[ApprovalNews]:
        """Approvals that were asked for or decided lately."""
        since = datetime.now(UTC) - NEWS_AGE
        query = (
            select(approvals, jobs.c.trace_id, jobs.c.meta)
            .outerjoin(jobs, _OF_JOB)
            .where(
                or_(approvals.c.told.is_(None), approvals.c.told != approvals.c.status),
                or_(approvals.c.requested_at > since, approvals.c.decided_at > since),
            )
            .order_by(approvals.c.tenant_id, approvals.c.requested_at)
            .limit(limit)
        )
        return [_approval(row) for row in await self._rows(query)]

    async def alerts(self, limit: int) -> list[AlertNews]:
        """Alerts of late."""
        query = (
            select(operator_events)
            .where(
                operator_events.c.told_at.is_(None),
                operator_events.c.type.like(f"{ALERT_PREFIX}%"),
                operator_events.c.at > datetime.now(UTC) - NEWS_AGE,
            )
            .order_by(operator_events.c.tenant_id, operator_events.c.at)
            .limit(limit)
        )
        return [msgspec.convert(row, AlertNews) for row in await self._rows(query)]

    async def _rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        try:
            async with self._engine.connect() as connection:
                found = (await connection.execute(query)).mappings()
                # SQLAlchemy's names are a kind of text of their own, which msgspec does not take.
                return [{str(name): value for name, value in row.items()} for row in found]
        except (DBAPIError, PoolTimeout, OSError, TimeoutError) as exc:
            raise LedgerUnavailable(f"the ledger does not answer: {type(exc).__name__}") from exc


def _ended(row: dict[str, Any]) -> EndedJob:
    key = JobKey(row["tenant_id"], row["queue"], row["job_id"])
    return msgspec.convert({**row, "key": key, "traceparent": _traceparent(row)}, EndedJob)


def _approval(row: dict[str, Any]) -> ApprovalNews:
    trace = {"trace_id": row["trace_id"] or "", "traceparent": _traceparent(row)}
    return msgspec.convert(row | trace, ApprovalNews)


def _traceparent(row: dict[str, Any]) -> str:
    meta: str = row["meta"] or ""
    # Most have none, and need not be read.
    if '"traceparent"' not in meta:
        return ""
    try:
        return meta_of(meta).traceparent
    except msgspec.MsgspecError:
        return ""
