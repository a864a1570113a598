"""Shared by the SQLite tests: an engine on its own file, and queries of that file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from holdfast.core.job import Claim, Envelope, Failure, new_job_ids
from holdfast.core.verdict import Settlement, SettleResult, Verdict
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.testing.inline import ManualClock

QUEUE = "orders"
FAILURE = Failure("TASK_ERROR", "no luck", "LuckError", "Traceback: line 1")


@asynccontextmanager
async def open_engine(path: Path, clock: ManualClock | None = None, **options: Any) -> AsyncIterator[SqliteEngine]:
    engine = SqliteEngine(path, EngineOptions(**options), clock)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


def envelope(**fields: Any) -> Envelope:
    return Envelope(**{"job_id": new_job_ids(1)[0], "task": "print", "payload": b'{"n":1}', "queue": QUEUE, **fields})


async def start_one(engine: SqliteEngine, **fields: Any) -> Claim:
    await engine.submit([envelope(**fields)])
    (claim,) = await engine.claim("w1", [QUEUE], 1, 0)
    return claim


async def settle(engine: SqliteEngine, claim: Claim, verdict: Verdict) -> SettleResult:
    (answer,) = await engine.settle([Settlement(claim, verdict, await engine.now_ms())])
    return answer


def query_file(path: Path, query: str, *values: Any) -> list[Any]:
    """Query the file through a separate connection."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, values).fetchall()


def exists(path: Path) -> bool:
    return path.exists()
