"""`SqlTriggerStore`, the `TriggerStore` written once for every store.

Only how executions are written differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert

from holdfast.core.principal import AuditEntry
from holdfast.core.text import clean
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat, TriggerPause, TriggerStore
from holdfast.ledger.transactions.base import NOW, Row, SqlTransaction, TransactionRunner, insert_audit
from holdfast.schema import queue_executions, trigger_pauses, trigger_presences

#: Columns written to `queue_executions`; `execution_row` returns the values in this order.
EXECUTION_COLUMNS = (
    "tenant_id",
    "id",
    "message_id",
    "queue_name",
    "event_name",
    "status",
    "started_at",
    "completed_at",
    "duration_ms",
    "agent_run_id",
    "error_message",
    "retry_count",
    "trace_id",
)
_MAX_DURATION_MS = 2**31 - 1


def execution_row(execution: Execution) -> tuple[Any, ...]:
    """Return the values of a row, with times in milliseconds."""
    return (
        clean(execution.tenant_id),
        clean(execution.id),
        clean(execution.message_id),
        clean(execution.queue_name),
        clean(execution.event_name) or None,
        str(execution.status),
        execution.started_at_ms,
        execution.completed_at_ms,
        min(max(0, execution.completed_at_ms - execution.started_at_ms), _MAX_DURATION_MS),
        clean(execution.agent_run_id) or None,
        clean(execution.error_message) or None,
        execution.retry_count,
        clean(execution.trace_id),
    )


class SqlTriggerStore(TransactionRunner, TriggerStore):
    """The trigger store; subclasses add how transactions are run and how executions are written."""

    async def executions(
        self,
        tenants: Sequence[str] | None,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> list[Execution]:
        return await self._read(_executions(tenants, queue_name, message_id, statuses, limit))

    async def heartbeat(self, heartbeats: Sequence[TriggerHeartbeat], *, expire_after_ms: int) -> set[str]:
        return await self._run(_record_heartbeats(heartbeats, expire_after_ms))

    async def remove_process(self, process: str) -> None:
        await self._run(_remove_process(process))

    async def processes(self) -> list[TriggerHeartbeat]:
        return await self._read(_processes())

    async def pauses(self) -> list[TriggerPause]:
        return await self._read(_pauses())

    async def set_paused(self, name: str, paused: bool, entry: AuditEntry) -> bool:
        return await self._run(_pause(name, entry) if paused else _resume(name, entry))


def _executions(
    tenants: Sequence[str] | None, queue_name: str, message_id: str, statuses: Collection[ExecutionStatus], limit: int
) -> SqlTransaction[list[Execution]]:
    query = select(queue_executions)
    if tenants is not None:
        query = query.where(queue_executions.c.tenant_id.in_([clean(tenant) for tenant in tenants]))
    if queue_name:
        query = query.where(queue_executions.c.queue_name == queue_name)
    if message_id:
        query = query.where(queue_executions.c.message_id == message_id)
    if statuses:
        query = query.where(queue_executions.c.status.in_([str(status) for status in statuses]))
    newest = (queue_executions.c.started_at.desc(), queue_executions.c.id.desc())
    rows = yield query.order_by(*newest).limit(limit)
    return [_execution(row) for row in rows]


def _execution(row: Row) -> Execution:
    started_at_ms = _ms(row["started_at"])
    return Execution(
        tenant_id=row["tenant_id"],
        id=row["id"],
        message_id=row["message_id"],
        queue_name=row["queue_name"],
        event_name=row["event_name"] or "",
        status=ExecutionStatus(row["status"]),
        started_at_ms=started_at_ms,
        completed_at_ms=started_at_ms if row["completed_at"] is None else _ms(row["completed_at"]),
        agent_run_id=row["agent_run_id"] or "",
        error_message=row["error_message"] or "",
        retry_count=row["retry_count"],
        trace_id=row["trace_id"],
    )


def _record_heartbeats(heartbeats: Sequence[TriggerHeartbeat], expire_after_ms: int) -> SqlTransaction[set[str]]:
    # The store's time: clocks of processes may differ, and readers compare their heartbeats.
    now: datetime = yield NOW
    yield delete(trigger_presences).where(trigger_presences.c.seen_at < now - timedelta(milliseconds=expire_after_ms))
    # Sorted, so that two processes that write the same names do not deadlock.
    latest = {(heartbeat.name, heartbeat.process): heartbeat for heartbeat in heartbeats}
    for name, process in sorted(latest):
        heartbeat = latest[name, process]
        values = {
            "queue_name": heartbeat.queue_name,
            "adapter": heartbeat.adapter,
            "health": msgspec.json.encode(heartbeat.health).decode(),
            "seen_at": now,
        }
        row = insert(trigger_presences).values(name=name, process=process, **values)
        yield row.on_conflict_do_update(index_elements=["name", "process"], set_=values)
    return (yield from _find_paused())


def _remove_process(process: str) -> SqlTransaction[None]:
    yield delete(trigger_presences).where(trigger_presences.c.process == process)
    return None


def _processes() -> SqlTransaction[list[TriggerHeartbeat]]:
    rows = yield select(trigger_presences).order_by(trigger_presences.c.name, trigger_presences.c.process)
    return [
        TriggerHeartbeat(
            name=row["name"],
            process=row["process"],
            queue_name=row["queue_name"],
            adapter=row["adapter"],
            health=msgspec.json.decode(row["health"]),
            seen_at_ms=_ms(row["seen_at"]),
        )
        for row in rows
    ]


def _find_paused() -> SqlTransaction[set[str]]:
    rows = yield select(trigger_pauses.c.name)
    return {row["name"] for row in rows}


def _pauses() -> SqlTransaction[list[TriggerPause]]:
    rows = yield select(trigger_pauses).order_by(trigger_pauses.c.name)
    return [
        TriggerPause(
            name=row["name"], paused_by=row["paused_by"], reason=row["reason"], paused_at_ms=_ms(row["paused_at"])
        )
        for row in rows
    ]


def _pause(name: str, entry: AuditEntry) -> SqlTransaction[bool]:
    now = yield NOW
    pause = insert(trigger_pauses).values(name=name, paused_by=entry.actor, reason=entry.reason, paused_at=now)
    paused = yield pause.on_conflict_do_nothing().returning(trigger_pauses.c.name)
    if paused:
        yield insert_audit([entry], now)
    return bool(paused)


def _resume(name: str, entry: AuditEntry) -> SqlTransaction[bool]:
    resumed = yield delete(trigger_pauses).where(trigger_pauses.c.name == name).returning(trigger_pauses.c.name)
    if resumed:
        now = yield NOW
        yield insert_audit([entry], now)
    return bool(resumed)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
