"""Generated job histories, written to a ledger as a projector would, for tests of queries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast.core.job import JobKey
from holdfast.core.states import FINAL, State, event_for
from holdfast.schema import dlq_items, job_events, jobs
from holdfast.schema.columns import metadata

START = datetime(2026, 11, 15, 14, 0, tzinfo=UTC)
S = State

#: A state, a state with fields of its event, or the type of an event that is not a move.
Step = State | tuple[State, dict[str, Any]] | str


def async_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+asyncpg://").replace("sqlite:///", "sqlite+aiosqlite:///")


@asynccontextmanager
async def open_engine(url: str) -> AsyncIterator[AsyncEngine]:
    """Open the ledger's SQL engine; create the tables in a SQLite file."""
    engine = create_async_engine(async_url(url))
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _disable_sync)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
    try:
        yield engine
    finally:
        await engine.dispose()


def _disable_sync(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


class History:
    """One job: its row, its events, its dead letter."""

    def __init__(
        self,
        *steps: Step,
        job_id: str = "j",
        tenant_id: str = "default",
        queue: str = "default",
        at: datetime = START,
        **row: Any,
    ) -> None:
        self.key = JobKey(tenant_id, queue, job_id)
        self._names = {"tenant_id": tenant_id, "queue": queue, "job_id": job_id}
        self.events: list[dict[str, Any]] = []
        self._state: Any = None
        self._attempt = self._retries = 0
        self._created_at = self._moved_at = at
        for step in steps:
            self._add(step)
        self.row = self._row() | row
        self.dead_letter: dict[str, Any] | None = self._dead_letter() if self.row["dlq_id"] is not None else None

    def _add(self, step: Step) -> None:
        number = len(self.events)
        common = {**self._names, "seq": number + 1, "at": self._created_at + timedelta(seconds=number)}
        if isinstance(step, str) and not isinstance(step, State):
            move = {"type": step, "from_state": None, "to_state": None}
            self.events.append({**common, **move, "attempt": self._attempt, "retry_count": self._retries, **_EMPTY})
            return
        state, fields = step if isinstance(step, tuple) else (step, {})
        self._attempt += state is S.RUNNING
        self._retries += state is S.RETRYING
        event = {
            **common,
            **_EMPTY,
            "type": event_for(self._state, state),
            "from_state": self._state,
            "to_state": state,
            "attempt": self._attempt,
            "retry_count": self._retries,
            **fields,
        }
        if isinstance(event["data"], dict):
            event["data"] = msgspec.json.encode(event["data"]).decode()
        self._attempt, self._retries = event["attempt"], event["retry_count"]
        self.events.append(event)
        self._state, self._moved_at = state, event["at"]

    def _row(self) -> dict[str, Any]:
        last = self.events[-1]["at"]
        return {
            **self._names,
            "job_type": "task",
            "state": self._state,
            "priority": 1,
            "attempt": self._attempt,
            "retry_count": self._retries,
            "last_seq": len(self.events),
            "idempotency_key": self.key.job_id,
            "trace_id": "",
            "worker": None,
            "error_code": None,
            "last_error": None,
            "error_message": None,
            "payload": "{}",
            "context": None,
            "result": None,
            "meta": None,
            "run_at": None,
            "next_retry_at": None,
            "dlq_id": f"dlq-{self.key.job_id}" if self._state in (S.DLQ_RECORDED, S.FAILED) else None,
            "created_at": self._created_at,
            "updated_at": last,
            "finished_at": self._moved_at if self._state in FINAL else None,
        }

    def _dead_letter(self) -> dict[str, Any]:
        return {
            **self._names,
            "dlq_id": f"dlq-{self.key.job_id}",
            "job_type": "task",
            "payload": "{}",
            "error_code": "TASK_ERROR",
            "error": "ValueError: boom",
            "stack": "Traceback …",
            "retry_count": self._retries,
            "history": "[]",
            "failed_at": self.row["updated_at"],
        }


_EMPTY: dict[str, Any] = {"worker": None, "message": None, "data": None}


async def write(engine: AsyncEngine, *histories: History) -> None:
    """Insert the histories into the ledger."""
    dead_letters = [history.dead_letter for history in histories if history.dead_letter is not None]
    async with engine.begin() as connection:
        await connection.execute(insert(jobs), [history.row for history in histories])
        await connection.execute(insert(job_events), [event for history in histories for event in history.events])
        if dead_letters:
            await connection.execute(insert(dlq_items), dead_letters)
