"""Run `SqlTransaction`s on SQLite: operators' writes, trigger executions, notification marks.

The file is the ledger's own or the engine's. Each transaction that writes is one operation of the file's writer, so
nothing else writes meanwhile. Times are those of the given clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from sqlalchemy import Executable
from sqlalchemy.dialects.sqlite import dialect

from holdfast.clock import Clock
from holdfast.core.job import JobKey
from holdfast.core.text import clean
from holdfast.errors import HoldfastError
from holdfast.ledger.port.messages import Execution
from holdfast.ledger.port.operators import AlertNotification, ApprovalNotification, NotificationMarks
from holdfast.ledger.sqlite.store import SqliteLedgerStore
from holdfast.ledger.transactions.base import NOW, ClockRead, SqlTransaction, TransactionRunner
from holdfast.ledger.transactions.operators import SqlOperatorStore
from holdfast.ledger.transactions.triggers import EXECUTION_COLUMNS, SqlTriggerStore, execution_row
from holdfast.schema.columns import InstantColumn
from holdfast.sqlite.transaction import Transaction, json_list
from holdfast.sqlite.writer import FileWriter

T = TypeVar("T")

_DIALECT: Final = dialect()


class SqliteTransactions(TransactionRunner):
    """Runs transactions on SQLite."""

    def __init__(self, store: FileWriter, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def _run(self, act: SqlTransaction[T]) -> T:
        result: T | HoldfastError = await self._store.write(self._perform, act)
        return _unwrap(result)

    async def _read(self, act: SqlTransaction[T]) -> T:
        # Lazy: a read begins no transaction.
        result: T | HoldfastError = await self._store.write(self._perform, act, lazy=True)
        return _unwrap(result)

    def _perform(self, transaction: Transaction, act: SqlTransaction[T]) -> T | HoldfastError:
        """Runs in the writer's thread."""
        answer: Any = None
        while True:
            try:
                statement = act.send(answer)
            except StopIteration as end:
                result: T | HoldfastError = end.value
                return result
            answer = self._now() if statement is NOW else _rows(transaction, statement)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)


def _unwrap(result: T | HoldfastError) -> T:
    if isinstance(result, HoldfastError):
        raise result
    return result


def _rows(transaction: Transaction, statement: Executable | ClockRead) -> list[dict[str, Any]]:
    compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})  # type: ignore[union-attr]
    cursor = transaction.execute(compiled.string, [_value(compiled.params[name]) for name in compiled.positiontup])
    if cursor.description is None:
        return []
    instants = {column.name for column in statement.exported_columns if isinstance(column.type, InstantColumn)}  # type: ignore[union-attr]
    names = [column[0] for column in cursor.description]
    return [{name: _read(name, value, instants) for name, value in zip(names, row, strict=True)} for row in cursor]


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    return clean(value) if isinstance(value, str) else value


def _read(name: str, value: Any, instants: set[str]) -> Any:
    return datetime.fromtimestamp(value / 1000, UTC) if value is not None and name in instants else value


class SqliteOperatorStore(SqliteTransactions, SqlOperatorStore):
    """The operator store of a ledger on SQLite. Times are the given clock's."""


_FIELDS: Final = ", ".join(f"row.value ->> {number}" for number in range(len(EXECUTION_COLUMNS)))
_RECORD: Final = f"""
INSERT INTO queue_executions ({", ".join(EXECUTION_COLUMNS)})
SELECT {_FIELDS} FROM json_each(?) AS row WHERE true
ON CONFLICT DO NOTHING"""  # noqa: S608 - constants


class SqliteTriggerStore(SqliteTransactions, SqlTriggerStore):
    """The trigger store of a ledger on SQLite. Times of presence are the given clock's."""

    async def record_executions(self, executions: Sequence[Execution]) -> None:
        if executions:
            await self._store.write(_record, json_list([execution_row(execution) for execution in executions]))


def _record(transaction: Transaction, rows: str) -> None:
    transaction.execute(_RECORD, (rows,))


_JOBS: Final = """
UPDATE jobs SET notified_at = :now_ms FROM json_each(:rows) AS row
WHERE jobs.tenant_id = row.value ->> 0 AND jobs.queue = row.value ->> 1 AND jobs.job_id = row.value ->> 2
    AND notified_at IS NULL"""
_APPROVALS: Final = """
UPDATE approvals SET notified_status = row.value ->> 2 FROM json_each(:rows) AS row
WHERE approvals.tenant_id = row.value ->> 0 AND approval_id = row.value ->> 1"""
_ALERTS: Final = """
UPDATE operator_events SET notified_at = :now_ms FROM json_each(:rows) AS row
WHERE operator_events.tenant_id = row.value ->> 0 AND operator_events.id = row.value ->> 1 AND notified_at IS NULL"""


class SqliteNotificationMarks(NotificationMarks):
    """Marks notifications as sent, on SQLite."""

    def __init__(self, store: SqliteLedgerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def jobs(self, keys: Sequence[JobKey]) -> None:
        await self._write(_JOBS, [(key.tenant_id, key.queue, key.job_id) for key in keys])

    async def approvals(self, notifications: Sequence[ApprovalNotification]) -> None:
        await self._write(_APPROVALS, [(one.tenant_id, one.approval_id, one.status) for one in notifications])

    async def alerts(self, notifications: Sequence[AlertNotification]) -> None:
        await self._write(_ALERTS, [(one.tenant_id, one.id) for one in notifications])

    async def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        await self._store.write(_mark, statement, {"rows": json_list(rows), "now_ms": self._clock.now_ms()})


def _mark(transaction: Transaction, statement: str, values: dict[str, Any]) -> None:
    transaction.begin()
    transaction.execute(statement, values)
