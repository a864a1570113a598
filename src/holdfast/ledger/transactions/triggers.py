"""Role `TriggerBook`, written once for every store but for its rows of executions, of which there are many."""

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

#: What a row of `queue_executions` is written with; `execution_row` gives the values in this order.
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
_MOST_MS = 2**31 - 1


def execution_row(execution: Execution) -> tuple[Any, ...]:
    """With times in milliseconds."""
    return (
        clean(execution.tenant_id),
        clean(execution.id),
        clean(execution.message_id),
        clean(execution.queue_name),
        clean(execution.event_name) or None,
        str(execution.status),
        execution.started_at_ms,
        execution.completed_at_ms,
        min(max(0, execution.completed_at_ms - execution.started_at_ms), _MOST_MS),
        clean(execution.agent_run_id) or None,
        clean(execution.error_message) or None,
        execution.retry_count,
        clean(execution.trace_id),
    )


class SqlTriggerStore(TransactionRunner, TriggerStore):
    """A store says how an act is run, and writes executions its own way."""

    async def executions(
        self,
        tenants: Sequence[str] | None,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> list[Execution]:
        return await self._look(_executions(tenants, queue_name, message_id, statuses, limit))

    async def heartbeat(self, presences: Sequence[TriggerHeartbeat], *, forget_after_ms: int) -> set[str]:
        return await self._run(_report(presences, forget_after_ms))

    async def remove_process(self, process: str) -> None:
        await self._run(_leave(process))

    async def processes(self) -> list[TriggerHeartbeat]:
        return await self._look(_present())

    async def pauses(self) -> list[TriggerPause]:
        return await self._look(_pauses())

    async def set_paused(self, name: str, paused: bool, action: AuditEntry) -> bool:
        return await self._run(_pause(name, action) if paused else _resume(name, action))


def _executions(
    tenants: Sequence[str] | None, queue_name: str, message_id: str, statuses: Collection[ExecutionStatus], limit: int
) -> SqlTransaction[list[Execution]]:
    wanted = select(queue_executions)
    if tenants is not None:
        wanted = wanted.where(queue_executions.c.tenant_id.in_([clean(tenant) for tenant in tenants]))
    if queue_name:
        wanted = wanted.where(queue_executions.c.queue_name == queue_name)
    if message_id:
        wanted = wanted.where(queue_executions.c.message_id == message_id)
    if statuses:
        wanted = wanted.where(queue_executions.c.status.in_([str(status) for status in statuses]))
    newest = (queue_executions.c.started_at.desc(), queue_executions.c.id.desc())
    rows = yield wanted.order_by(*newest).limit(limit)
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


def _report(presences: Sequence[TriggerHeartbeat], forget_after_ms: int) -> SqlTransaction[set[str]]:
    # The store's time, since those who look compare several processes; theirs may differ.
    now: datetime = yield NOW
    yield delete(trigger_presences).where(trigger_presences.c.seen_at < now - timedelta(milliseconds=forget_after_ms))
    # In one order, so that two processes that report each other's names do not wait for one another.
    latest = {(presence.name, presence.process): presence for presence in presences}
    for name, process in sorted(latest):
        presence = latest[name, process]
        said = {
            "queue_name": presence.queue_name,
            "adapter": presence.adapter,
            "health": msgspec.json.encode(presence.health).decode(),
            "seen_at": now,
        }
        row = insert(trigger_presences).values(name=name, process=process, **said)
        yield row.on_conflict_do_update(index_elements=["name", "process"], set_=said)
    return (yield from _paused())


def _leave(process: str) -> SqlTransaction[None]:
    yield delete(trigger_presences).where(trigger_presences.c.process == process)
    return None


def _present() -> SqlTransaction[list[TriggerHeartbeat]]:
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


def _paused() -> SqlTransaction[set[str]]:
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


def _pause(name: str, action: AuditEntry) -> SqlTransaction[bool]:
    now = yield NOW
    pause = insert(trigger_pauses).values(name=name, paused_by=action.actor, reason=action.reason, paused_at=now)
    paused = yield pause.on_conflict_do_nothing().returning(trigger_pauses.c.name)
    if paused:
        yield insert_audit([action], now)
    return bool(paused)


def _resume(name: str, action: AuditEntry) -> SqlTransaction[bool]:
    resumed = yield delete(trigger_pauses).where(trigger_pauses.c.name == name).returning(trigger_pauses.c.name)
    if resumed:
        now = yield NOW
        yield insert_audit([action], now)
    return bool(resumed)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
