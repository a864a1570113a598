"""Run `SqlTransaction`s on PostgreSQL: operators' writes, trigger executions, notification marks.

Each runs on asyncpg in one transaction. Rows that two callers could race for are locked. Times are the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import Executable
from sqlalchemy.dialects.postgresql.asyncpg import dialect

from holdfast.core.job import JobKey
from holdfast.core.text import clean
from holdfast.errors import HoldfastError
from holdfast.ledger.port.messages import Execution
from holdfast.ledger.port.operators import AlertNotification, ApprovalNotification, NotificationMarks
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.transactions.base import NOW, ClockRead, SqlTransaction, TransactionRunner
from holdfast.ledger.transactions.operators import SqlOperatorStore
from holdfast.ledger.transactions.triggers import EXECUTION_COLUMNS, SqlTriggerStore, execution_row

T = TypeVar("T")

_DIALECT: Final = dialect()  # type: ignore[no-untyped-call]


class PostgresTransactions(TransactionRunner):
    """Runs transactions on PostgreSQL."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def _run(self, act: SqlTransaction[T]) -> T:
        async def work(connection: Connection) -> T | HoldfastError:
            answer: Any = None
            while True:
                try:
                    statement = act.send(answer)
                except StopIteration as end:
                    result: T | HoldfastError = end.value
                    return result
                answer = await _execute(connection, statement)

        result = await self._store.transact(work)
        if isinstance(result, HoldfastError):
            raise result
        return result


async def _execute(connection: Connection, statement: Executable | ClockRead) -> Any:
    if statement is NOW:
        return await connection.fetchval("SELECT clock_timestamp()")
    compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})  # type: ignore[attr-defined]
    values = (compiled.params[name] for name in compiled.positiontup)
    return await connection.fetch(compiled.string, *(clean(v) if isinstance(v, str) else v for v in values))


class PostgresOperatorStore(PostgresTransactions, SqlOperatorStore):
    """The operator store of a ledger on PostgreSQL. Times are the server's."""


_RECORD: Final = f"""
INSERT INTO queue_executions ({", ".join(EXECUTION_COLUMNS)})
SELECT tenant_id, id, message_id, queue_name, event_name, status,
       to_timestamp(started_at / 1000.0), to_timestamp(completed_at / 1000.0), duration_ms,
       agent_run_id, error_message, retry_count, trace_id
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[],
              $9::int[], $10::text[], $11::text[], $12::int[], $13::text[])
       AS row ({", ".join(EXECUTION_COLUMNS)})
ON CONFLICT DO NOTHING"""  # noqa: S608 - constants


class PostgresTriggerStore(PostgresTransactions, SqlTriggerStore):
    """The trigger store of a ledger on PostgreSQL. Times of presence are the server's."""

    async def record_executions(self, executions: Sequence[Execution]) -> None:
        if executions:
            columns = zip(*map(execution_row, executions), strict=True)
            await self._store.execute(_RECORD, *map(list, columns))


_JOBS: Final = """
UPDATE jobs SET notified_at = now() FROM unnest($1::text[], $2::text[], $3::text[]) AS row (tenant_id, queue, job_id)
WHERE jobs.tenant_id = row.tenant_id AND jobs.queue = row.queue AND jobs.job_id = row.job_id AND notified_at IS NULL"""
_APPROVALS: Final = """
UPDATE approvals SET notified_status = row.status
  FROM unnest($1::text[], $2::text[], $3::text[]) AS row (tenant_id, id, status)
WHERE approvals.tenant_id = row.tenant_id AND approval_id = row.id"""
_ALERTS: Final = """
UPDATE operator_events SET notified_at = now() FROM unnest($1::text[], $2::text[]) AS row (tenant_id, id)
WHERE operator_events.tenant_id = row.tenant_id AND operator_events.id = row.id AND notified_at IS NULL"""


class PostgresNotificationMarks(NotificationMarks):
    """Marks notifications as sent, on PostgreSQL."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def jobs(self, keys: Sequence[JobKey]) -> None:
        await self._store.execute(
            _JOBS, [key.tenant_id for key in keys], [key.queue for key in keys], [key.job_id for key in keys]
        )

    async def approvals(self, notifications: Sequence[ApprovalNotification]) -> None:
        await self._store.execute(
            _APPROVALS,
            [one.tenant_id for one in notifications],
            [one.approval_id for one in notifications],
            [str(one.status) for one in notifications],
        )

    async def alerts(self, notifications: Sequence[AlertNotification]) -> None:
        await self._store.execute(_ALERTS, [one.tenant_id for one in notifications], [one.id for one in notifications])
