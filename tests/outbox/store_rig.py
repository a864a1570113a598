"""Outbox stores of every kind, filled with rows as user programs write them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.clock import SystemClock
from holdfast.core.publishing import lane_of
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus, OutboxStore
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.ledger.sqlite.ledger import SqliteLedger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile

AnyLedger = PostgresLedger | SqliteLedger | EmbeddedLedger
ALL_LANES: Final = list(range(64))


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    key: str | None = None
    status: OutboxStatus = OutboxStatus.NEW
    #: Relative to now.
    retry_in_ms: int = 0
    destination: str = "kafka"
    topic: str = "orders"
    tenant_id: str = "default"
    attempts: int = 0
    age_ms: int = 0


class Rig:
    """A ledger on one store, with helpers to write and read its outbox."""

    def __init__(self, kind: str, location: str) -> None:
        self.kind = kind
        self._location = location
        self.ledger = self.new_ledger()

    def new_ledger(self) -> AnyLedger:
        match self.kind:
            case "postgres":
                return PostgresLedger(PostgresStore(self._location))
            case "sqlite":
                return SqliteLedger(SqliteLedgerStore(DatabaseFile(self._location), prepare_ledger), SystemClock())
            case _:
                return EmbeddedLedger(DatabaseFile(self._location), SystemClock())

    @property
    def outbox(self) -> OutboxStore:
        return self.ledger.outbox

    async def write(self, *events: EventRow) -> None:
        """Write the events in this order in one transaction on another connection."""
        now_ms = await self.outbox.now_ms()
        await self.insert([_row(event, now_ms) for event in events])

    async def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if isinstance(self.ledger, PostgresLedger):
            await self.ledger.store.execute_many(_INSERT.format(values=_POSTGRES), rows)
        else:
            await asyncio.to_thread(_insert, Path(self._location), rows)

    async def run(self, statement: str) -> list[Any]:
        """Run SQL that is valid for PostgreSQL and SQLite."""
        if isinstance(self.ledger, PostgresLedger):
            return [tuple(row) for row in await self.ledger.store.fetch(statement)]
        return await asyncio.to_thread(_run, Path(self._location), statement)

    async def acquire_lanes(
        self, relay: str = "me", limit: int = 64, lease_ms: int = 60_000, **options: Any
    ) -> list[int]:
        return await self.outbox.acquire_lanes(relay, ["kafka"], limit, lease_ms, **options)

    async def due_ids(self, relay: str = "me", limit: int = 100, dead_blocks: bool = False) -> list[str]:
        """Return the ids of due events in all lanes that can be acquired."""
        return [event.id for event in await self.due_events(relay, limit, dead_blocks)]

    async def due_events(self, relay: str = "me", limit: int = 100, dead_blocks: bool = False) -> list[OutboxEvent]:
        lanes = await self.acquire_lanes(relay, dead_blocks=dead_blocks)
        return await self.outbox.due_events(relay, lanes, ["kafka"], limit, dead_blocks=dead_blocks)

    async def get_status(self, event_id: str) -> OutboxStatus:
        event = await self.outbox.get("default", event_id)
        assert event is not None
        return event.status


_INSERT: Final = """
INSERT INTO outbox_events (tenant_id, id, destination, topic, key, lane, payload, headers, status, attempt_count,
                           next_retry_at, created_at, sent_at) VALUES ({values})"""
_POSTGRES: Final = (
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, to_timestamp($11::bigint / 1000.0), to_timestamp($12::bigint / 1000.0), "
    "to_timestamp($13::bigint / 1000.0)"
)


def _row(event: EventRow, now_ms: int) -> tuple[Any, ...]:
    created_ms = now_ms - event.age_ms
    return (
        event.tenant_id,
        event.id,
        event.destination,
        event.topic,
        event.key,
        lane_of(event.destination, event.topic, event.key, event.id),
        '{"n":1}',
        '{"x-event-name":"paid"}',
        str(event.status),
        event.attempts,
        now_ms + event.retry_in_ms if event.status is OutboxStatus.RETRYING else None,
        created_ms,
        created_ms if event.status is OutboxStatus.SENT else None,
    )


def _insert(path: Path, rows: Sequence[tuple[Any, ...]]) -> None:
    connection = sqlite3.connect(path, timeout=10)
    try:
        with connection:
            connection.executemany(_INSERT.format(values=", ".join("?" * 13)), rows)
    finally:
        connection.close()


def _run(path: Path, statement: str) -> list[Any]:
    connection = sqlite3.connect(path, timeout=10)
    try:
        with connection:
            return connection.execute(statement).fetchall()
    finally:
        connection.close()
