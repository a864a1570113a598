"""Marks of what has been told, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.ledger.keys import JobKey
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.telling import AlertNews, ApprovalNews, Marks

_JOBS: Final = """
UPDATE jobs SET told_at = now() FROM unnest($1::text[], $2::text[], $3::text[]) AS told (tenant_id, queue, job_id)
WHERE jobs.tenant_id = told.tenant_id AND jobs.queue = told.queue AND jobs.job_id = told.job_id AND told_at IS NULL"""
_APPROVALS: Final = """
UPDATE approvals SET told = news.status FROM unnest($1::text[], $2::text[], $3::text[]) AS news (tenant_id, id, status)
WHERE approvals.tenant_id = news.tenant_id AND approval_id = news.id"""
_ALERTS: Final = """
UPDATE operator_events SET told_at = now() FROM unnest($1::text[], $2::text[]) AS told (tenant_id, id)
WHERE operator_events.tenant_id = told.tenant_id AND operator_events.id = told.id AND told_at IS NULL"""


class PostgresMarks(Marks):
    """Writes them."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def jobs(self, keys: Sequence[JobKey]) -> None:
        await self._store.execute(
            _JOBS, [key.tenant_id for key in keys], [key.queue for key in keys], [key.job_id for key in keys]
        )

    async def approvals(self, told: Sequence[ApprovalNews]) -> None:
        await self._store.execute(
            _APPROVALS,
            [one.tenant_id for one in told],
            [one.approval_id for one in told],
            [str(one.status) for one in told],
        )

    async def alerts(self, told: Sequence[AlertNews]) -> None:
        await self._store.execute(_ALERTS, [one.tenant_id for one in told], [one.id for one in told])
