"""Feeds built by hand, and checks of what a ledger has recorded of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
from sqlalchemy import text

from holdfast.clock import SystemClock
from holdfast.core.history import JobHistory
from holdfast.core.job import Event
from holdfast.core.states import State, event_for
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.port.ledger import FeedPosition, Ledger
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.store import PostgresStore, StoreOptions
from holdfast.ledger.sqlite.ledger import SqliteLedger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile

QUEUE = "default"
LEASE_MS = 5_000
_S = State


def open_ledger(url: str, **options: Any) -> Ledger:
    """A ledger with its own store and without an owner check."""
    if url.startswith("sqlite:///"):
        return SqliteLedger(
            SqliteLedgerStore(DatabaseFile(url.removeprefix("sqlite:///")), prepare_ledger), SystemClock()
        )
    return PostgresLedger(PostgresStore(url, StoreOptions(**options)))


class Feed:
    """Builds feed entries and job events with increasing times."""

    def __init__(self, name: str = "a") -> None:
        self._name = name
        self._at = count(1_700_000_000_000)
        self._number = count(1)

    def created(self, job_id: str, *, hold: bool = False, **data: Any) -> Event:
        to = _S.WAITING_APPROVAL if hold else _S.QUEUED
        envelope = {
            "task": "add",
            "payload": '{"a": 1, "b":2.0}',
            "tenant_id": "default",
            "idempotency_key": job_id,
            "trace_id": "t-1",
            "priority": 1,
            "context": None,
            "run_at_ms": 0,
        }
        return self.event(job_id, None, to, data=envelope | data, tenant_id=data.get("tenant_id", "default"))

    def claimed(self, job_id: str, attempt: int = 1, retries: int = 0, *, was: State = _S.QUEUED, **more: Any) -> Event:
        return self.event(job_id, was, _S.RUNNING, attempt, retries, **{"worker": f"w{attempt}"} | more)

    def succeeded(self, job_id: str, attempt: int = 1, retries: int = 0, **more: Any) -> Event:
        return self.event(job_id, _S.RUNNING, _S.SUCCEEDED, attempt, retries, worker="w1", data={"result": "3"}, **more)

    def failed(self, job_id: str, to: State, attempt: int = 1, retries: int = 1, **more: Any) -> Event:
        data = {"code": "TASK_ERROR", "message": f"boom {attempt}", "type": "ValueError", "stack": "at x"} | more
        if to is _S.RETRYING:
            data |= {"next_attempt_at_ms": 1_800_000_000_000, "counted": True}
        return self.event(job_id, _S.RUNNING, to, attempt, retries, worker=f"w{attempt}", data=data)

    def life(self, job_id: str) -> list[Event]:
        return [self.created(job_id), self.claimed(job_id), self.succeeded(job_id)]

    def event(
        self, job_id: str, was: State | None, to: State | None, attempt: int = 0, retries: int = 0, **more: Any
    ) -> Event:
        event_type = more.pop("type", None) or event_for(was, to)  # type: ignore[arg-type]
        return Event(
            type=event_type,
            job_id=job_id,
            at_ms=next(self._at),
            from_state=was,
            to_state=to,
            attempt=attempt,
            retry_count=retries,
            **more,
        )

    def entry(self, *events: Event) -> FeedEntry:
        number = next(self._number)
        return FeedEntry(f"{number:08d}-0", f"{self._name}{number}", list(events))


class FeedWriter:
    """Projects given entries without an engine."""

    def __init__(self, ledger: Ledger, queue: str = QUEUE) -> None:
        assert ledger.projection is not None
        self.projection = ledger.projection
        self.ledger = ledger
        self.queue = queue
        self.at = FeedPosition()

    async def write(self, *entries: FeedEntry) -> Any:
        epoch = await self.projection.engine_epoch(self.queue)
        done = await self.projection.project(self.queue, "me", LEASE_MS, self.at, entries, epoch=epoch)
        self.at = done.at
        return done


async def rows(ledger: Ledger, statement: str, **values: Any) -> list[dict[str, Any]]:
    """Rows of a SQL query."""
    engine = ledger.store.read_engine  # type: ignore[attr-defined]
    async with engine.connect() as connection:
        found = await connection.execute(text(statement), values)
        return [dict(row._mapping) for row in found]


async def job(ledger: Ledger, job_id: str) -> dict[str, Any]:
    (row,) = await rows(ledger, "SELECT * FROM jobs WHERE job_id = :job_id", job_id=job_id)
    return row


async def event_types(ledger: Ledger, job_id: str) -> list[str]:
    """The types of a job's events; checks that they are numbered without gaps and legal."""
    found = await rows(ledger, "SELECT * FROM job_events WHERE job_id = :job_id ORDER BY seq", job_id=job_id)
    check_rows(found)
    return [row["type"] for row in found]


def check_rows(found: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], JobHistory]:
    """Check every job's events against the state table."""
    histories: dict[tuple[str, str, str], JobHistory] = {}
    faults: list[str] = []
    for row in found:
        key = (row["tenant_id"], row["queue"], row["job_id"])
        history = histories.setdefault(key, JobHistory(row["job_id"]))
        event = Event(
            type=row["type"],
            job_id=row["job_id"],
            at_ms=0,
            from_state=State(row["from_state"]) if row["from_state"] else None,
            to_state=State(row["to_state"]) if row["to_state"] else None,
            attempt=row["attempt"],
            retry_count=row["retry_count"],
        )
        faults += history.add(event, row["seq"])
    assert not faults, faults[:5]
    return histories


async def check_ledger(ledger: Ledger) -> dict[str, State | None]:
    """Check that every history is complete, legal and consistent with the job's row; the state of each job."""
    found = await rows(ledger, "SELECT * FROM job_events ORDER BY tenant_id, job_id, queue, seq")
    histories = check_rows(found)
    jobs = await rows(ledger, "SELECT * FROM jobs")
    assert {(row["tenant_id"], row["queue"], row["job_id"]) for row in jobs} == histories.keys()
    for row in jobs:
        history = histories[row["tenant_id"], row["queue"], row["job_id"]]
        assert (row["state"], row["last_seq"]) == (history.state, history.events), row
    return {row["job_id"]: State(row["state"]) for row in jobs}


def decode(value: str) -> Any:
    return msgspec.json.decode(value)
