"""Approval requests, dead letters and audit entries, inserted into a ledger on any store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Executable, Table, insert, select

from holdfast import schema
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.ledger.transactions.base import SqlTransaction
from holdfast.ledger.transactions.operators import SqlOperatorStore
from tests.ledger.conftest import AnyLedger

NOW = datetime.now(UTC).replace(microsecond=0)


def minutes(number: float) -> datetime:
    """`number` minutes before now; after now if negative."""
    return NOW - timedelta(minutes=number)


def _transaction(*statements: Executable) -> SqlTransaction[list[Any]]:
    rows: list[Any] = []
    for statement in statements:
        rows = yield statement
    return rows


async def run(ledger: AnyLedger, *statements: Executable) -> list[Any]:
    """Run statements in one transaction; the rows of the last one."""
    operators = ledger.operators
    assert isinstance(operators, SqlOperatorStore)
    return await operators._run(_transaction(*statements))


async def rows(ledger: AnyLedger, table: Table, **conditions: Any) -> list[dict[str, Any]]:
    found = await run(ledger, select(table).where(*(table.c[name] == value for name, value in conditions.items())))
    return [dict(row) for row in found]


async def add_approval(ledger: AnyLedger, approval_id: str = "a", **row: Any) -> None:
    """Insert an approval request as a projector does."""
    defaults = {
        "tenant_id": "default",
        "approval_id": approval_id,
        "job_id": f"job-{approval_id}",
        "queue": "default",
        "job_type": "pay",
        "payload_hash": "hash",
        "policies": '["big"]',
        "quorum": 1,
        "requested_by": "",
        "requested_at": minutes(10),
    }
    await run(ledger, insert(schema.approvals).values(defaults | row))


async def add_dead_letter(
    ledger: AnyLedger, dlq_id: str = "d", *, job: dict[str, Any] | None = None, **row: Any
) -> None:
    """Insert a dead letter and, if `job` is given, its job."""
    defaults = {
        "tenant_id": "default",
        "dlq_id": dlq_id,
        "job_id": f"job-{dlq_id}",
        "queue": "default",
        "job_type": "pay",
        "trace_id": "trace",
        "payload": '{"amount": 1}',
        "error_code": "TASK_ERROR",
        "error": "boom",
        "retry_count": 3,
        "history": "[]",
        "failed_at": minutes(10),
        "fingerprint": "f",
    }
    dead_letter = defaults | row
    await run(ledger, insert(schema.dlq_items).values(dead_letter))
    if job is not None:
        await run(ledger, _failed_job(ledger, dead_letter, job))


async def add_audit_entries(ledger: AnyLedger, *entries: dict[str, Any]) -> None:
    """Insert audit entries."""
    defaults = {"tenant_id": "default", "type": "operator.cancel", "actor": "ann", "target": "job", "target_id": "j"}
    await run(ledger, *(insert(schema.operator_events).values(defaults | entry) for entry in entries))


async def list_audit_log(ledger: AnyLedger) -> list[tuple[str, str, str, str]]:
    """Type, actor, target and reason of every audit entry, in order."""
    found = await rows(ledger, schema.operator_events)
    found.sort(key=lambda row: (row["at"], row["id"]))
    return [(row["type"], row["actor"], row["target_id"], row["reason"]) for row in found]


def _failed_job(ledger: AnyLedger, dead_letter: dict[str, Any], job: dict[str, Any]) -> Executable:
    row = {
        **{
            name: dead_letter[name]
            for name in ("tenant_id", "job_id", "queue", "job_type", "trace_id", "payload", "dlq_id")
        },
        "state": "failed",
        "priority": 1,
        "last_seq": 4,
        "idempotency_key": dead_letter["job_id"],
        "created_at": minutes(20),
        "updated_at": minutes(10),
        "finished_at": minutes(10),
        **job,
    }
    table = schema.jobs
    if isinstance(ledger, EmbeddedLedger):
        # The engine's table has a constraint on legal moves.
        from sqlalchemy import Column, MetaData, Text

        columns: Sequence[Column[Any]] = [Column(name, table.c[name].type) for name in row]
        table = Table("jobs", MetaData(), *columns, Column("previous_state", Text))
        row["previous_state"] = "dlq_recorded"
    return insert(table).values(row)
