"""Rows that people have to do with, put into a ledger of any kind by acts of our own."""

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
    """So many before now; later than now if negative."""
    return NOW - timedelta(minutes=number)


def _doing(*statements: Executable) -> SqlTransaction[list[Any]]:
    rows: list[Any] = []
    for statement in statements:
        rows = yield statement
    return rows


async def run(ledger: AnyLedger, *statements: Executable) -> list[Any]:
    """In one transaction; the rows of the last."""
    people = ledger.operators
    assert isinstance(people, SqlOperatorStore)
    return await people._run(_doing(*statements))


async def rows(ledger: AnyLedger, table: Table, **wanted: Any) -> list[dict[str, Any]]:
    found = await run(ledger, select(table).where(*(table.c[name] == value for name, value in wanted.items())))
    return [dict(row) for row in found]


async def ask(ledger: AnyLedger, approval_id: str = "a", **row: Any) -> None:
    """A question to people, as a projector writes it."""
    usual = {
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
    await run(ledger, insert(schema.approvals).values(usual | row))


async def bury(ledger: AnyLedger, dlq_id: str = "d", *, job: dict[str, Any] | None = None, **row: Any) -> None:
    """A dead letter; with `job`, its job, too."""
    usual = {
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
    letter = usual | row
    await run(ledger, insert(schema.dlq_items).values(letter))
    if job is not None:
        await run(ledger, _failed(ledger, letter, job))


async def events(ledger: AnyLedger, *lines: dict[str, Any]) -> None:
    """Lines of the operators' log."""
    usual = {"tenant_id": "default", "type": "operator.cancel", "actor": "ann", "target": "job", "target_id": "j"}
    await run(ledger, *(insert(schema.operator_events).values(usual | line) for line in lines))


async def log(ledger: AnyLedger) -> list[tuple[str, str, str, str]]:
    """Who did what to which, in order."""
    found = await rows(ledger, schema.operator_events)
    found.sort(key=lambda row: (row["at"], row["id"]))
    return [(row["type"], row["actor"], row["target_id"], row["reason"]) for row in found]


def _failed(ledger: AnyLedger, letter: dict[str, Any], job: dict[str, Any]) -> Executable:
    row = {
        **{
            name: letter[name] for name in ("tenant_id", "job_id", "queue", "job_type", "trace_id", "payload", "dlq_id")
        },
        "state": "failed",
        "priority": 1,
        "last_seq": 4,
        "idempotency_key": letter["job_id"],
        "created_at": minutes(20),
        "updated_at": minutes(10),
        "finished_at": minutes(10),
        **job,
    }
    table = schema.jobs
    if isinstance(ledger, EmbeddedLedger):
        # The engine's own table holds its jobs to the state table.
        from sqlalchemy import Column, MetaData, Text

        columns: Sequence[Column[Any]] = [Column(name, table.c[name].type) for name in row]
        table = Table("jobs", MetaData(), *columns, Column("previous_state", Text))
        row["previous_state"] = "dlq_recorded"
    return insert(table).values(row)
