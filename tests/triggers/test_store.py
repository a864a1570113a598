"""The trigger store behaves the same on PostgreSQL, in a separate SQLite file and in the engine's file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.principal import AuditEntry
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat, TriggerStore
from holdfast.ledger.queries.operator_filters import AuditFilter
from tests.outbox.store_rig import Rig

NOW_MS = 1_800_000_000_000


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), "sqlite", "embedded"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    kind: str = request.param
    rig = Rig(kind, request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "book.db"))
    await rig.ledger.store.open()
    yield rig
    await rig.ledger.close()


@pytest.fixture
def book(rig: Rig) -> TriggerStore:
    return rig.ledger.triggers


def execution(name: str, **changes: Any) -> Execution:
    values: dict[str, Any] = {
        "tenant_id": "default",
        "id": name,
        "message_id": f"m-{name}",
        "queue_name": "orders",
        "event_name": "order.paid",
        "status": ExecutionStatus.SUCCESS,
        "started_at_ms": NOW_MS,
        "completed_at_ms": NOW_MS + 25,
    }
    return Execution(**values | changes)


def trigger_heartbeat(name: str, process: str, **health: Any) -> TriggerHeartbeat:
    return TriggerHeartbeat(
        name=name, process=process, queue_name="orders", adapter="kafka", health=health, seen_at_ms=0
    )


def pause(name: str, kind: str = "operator.trigger_pause") -> AuditEntry:
    return AuditEntry(type=kind, actor="ann", tenant_id="default", target="trigger", target_id=name, reason="storm")


async def test_executions_are_written_and_read(book: TriggerStore, rig: Rig) -> None:
    full = execution(
        "a", agent_run_id="job-1", error_message="no \0 way", retry_count=2, trace_id="t", status=ExecutionStatus.FAILED
    )
    later = execution("b", started_at_ms=NOW_MS + 1_000, completed_at_ms=NOW_MS + 900, event_name="")
    await book.record_executions([full, later])
    assert await book.executions(None) == [later, Execution(**_fields(full) | {"error_message": "no \ufffd way"})]
    assert await rig.run("SELECT id, duration_ms FROM queue_executions ORDER BY id") == [("a", 25), ("b", 0)]


def _fields(each: Execution) -> dict[str, Any]:
    return {name: getattr(each, name) for name in each.__struct_fields__}


async def test_a_record_written_twice_is_stored_once(book: TriggerStore) -> None:
    await book.record_executions([])
    first = execution("a")
    await book.record_executions([first, first])
    await book.record_executions([execution("a", status=ExecutionStatus.FAILED), execution("b")])
    assert {each.id: each.status for each in await book.executions(None)} == {
        "a": ExecutionStatus.SUCCESS,
        "b": ExecutionStatus.SUCCESS,
    }
    await book.record_executions([execution("a", tenant_id="acme", status=ExecutionStatus.REJECTED)])
    assert len(await book.executions(None)) == 3


async def test_many_executions_are_recorded_at_once(book: TriggerStore) -> None:
    await book.record_executions([execution(f"e{number}", started_at_ms=NOW_MS + number) for number in range(2_000)])
    newest = await book.executions(["default"], limit=3)
    assert [each.id for each in newest] == ["e1999", "e1998", "e1997"]


async def test_executions_are_found(book: TriggerStore) -> None:
    await book.record_executions(
        [execution("a"), execution("b", queue_name="bills"), execution("c", tenant_id="acme", message_id="m-a")]
    )

    async def ids(tenants: list[str] | None = None, **filters: Any) -> set[str]:
        return {each.id for each in await book.executions(tenants, **filters)}

    assert await ids() == {"a", "b", "c"}
    assert await ids(["acme"]) == {"c"}
    assert await ids([]) == set()
    assert await ids(queue_name="bills") == {"b"}
    assert await ids(message_id="m-a") == {"a", "c"}
    assert await ids(["default"], message_id="m-a", queue_name="orders") == {"a"}


async def test_executions_are_found_by_status(book: TriggerStore) -> None:
    await book.record_executions([execution(str(status), status=status) for status in ExecutionStatus])

    async def ids(*statuses: ExecutionStatus, **filters: Any) -> set[str]:
        return {each.id for each in await book.executions(None, statuses=statuses, **filters)}

    assert await ids(ExecutionStatus.FAILED) == {"failed"}
    assert await ids(ExecutionStatus.FAILED, ExecutionStatus.UNPARSABLE) == {"failed", "unparsable"}
    assert await ids() == set(ExecutionStatus)
    assert await ids(ExecutionStatus.FAILED, queue_name="bills") == set()


async def test_heartbeats_list_the_running_processes(book: TriggerStore, rig: Rig) -> None:
    assert (
        await book.heartbeat(
            [trigger_heartbeat("t1", "p1", ready=True), trigger_heartbeat("t2", "p1")], expire_after_ms=60_000
        )
        == set()
    )
    await book.heartbeat(
        [trigger_heartbeat("t1", "p2"), trigger_heartbeat("t1", "p1", ready=False, lag=7)], expire_after_ms=60_000
    )
    rows = await book.processes()
    assert [(each.name, each.process) for each in rows] == [("t1", "p1"), ("t1", "p2"), ("t2", "p1")]
    assert rows[0].health == {"ready": False, "lag": 7}
    # By the store's clock, not by that of the process.
    now_ms = await rig.outbox.now_ms()
    assert all(abs(each.seen_at_ms - now_ms) < 60_000 for each in rows)
    await book.remove_process("p1")
    assert [(each.name, each.process) for each in await book.processes()] == [("t1", "p2")]


async def test_processes_without_heartbeats_are_removed(book: TriggerStore) -> None:
    await book.heartbeat([trigger_heartbeat("t1", "gone")], expire_after_ms=60_000)
    await asyncio.sleep(0.03)
    await book.heartbeat([trigger_heartbeat("t1", "here")], expire_after_ms=20)
    assert [each.process for each in await book.processes()] == ["here"]


async def test_a_pause_is_returned_to_every_process_and_audited_once(book: TriggerStore, rig: Rig) -> None:
    assert await book.set_paused("t1", True, pause("t1")) is True
    assert await book.set_paused("t1", True, pause("t1")) is False
    (rows,) = await book.pauses()
    assert (rows.name, rows.paused_by, rows.reason) == ("t1", "ann", "storm")
    assert await book.heartbeat([trigger_heartbeat("t1", "p1")], expire_after_ms=60_000) == {"t1"}
    assert await book.set_paused("t1", False, pause("t1", "operator.trigger_resume")) is True
    assert await book.set_paused("t1", False, pause("t1", "operator.trigger_resume")) is False
    assert await book.heartbeat([], expire_after_ms=60_000) == set()
    entries = (await rig.ledger.queries.audit_log(AuditFilter())).entries
    assert [(entry.type, entry.actor, entry.target_id, entry.reason) for entry in entries] == [
        ("operator.trigger_resume", "ann", "t1", "storm"),
        ("operator.trigger_pause", "ann", "t1", "storm"),
    ]


async def test_concurrent_pauses_write_one_audit_entry(book: TriggerStore, rig: Rig) -> None:
    other = rig.new_ledger()
    try:
        both = (book.set_paused("t", True, pause("t")), other.triggers.set_paused("t", True, pause("t")))
        assert sorted(await asyncio.gather(*both)) == [False, True]
    finally:
        await other.close()
    assert len((await rig.ledger.queries.audit_log(AuditFilter())).entries) == 1
