"""Reads of a ledger's file can be cancelled at any time and leave no task that never ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from holdfast.ledger.sqlite.store import SqliteLedgerStore, connect, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile


class Blocker:
    """A SQL function that blocks until it is released."""

    def __init__(self) -> None:
        self._begun, self._released = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self._begun.set()
        self._released.wait(30)
        return 1

    async def wait_begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 30)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteLedgerStore]:
    store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger)
    await store.open()
    yield store
    await store.close()


async def query(store: SqliteLedgerStore) -> Any:
    async with store.read_engine.connect() as connection:
        return await connection.scalar(text("SELECT hold()"))


@pytest.mark.parametrize("passes", range(10))
async def test_a_process_can_end_during_a_long_query(store: SqliteLedgerStore, passes: int) -> None:
    blocker = Blocker()
    event.listen(
        store.read_engine.sync_engine, "connect", lambda connection, _: connection.create_function("hold", 0, blocker)
    )
    querying = asyncio.create_task(query(store))
    await blocker.wait_begun()
    querying.cancel()
    for _ in range(passes):
        await asyncio.sleep(0)
    # As `asyncio.run` does.
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    blocker.release()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)


async def test_a_connection_can_be_stopped_while_it_is_closed(tmp_path: Path) -> None:
    blocker = Blocker()
    connection = await connect(str(tmp_path / "some.db"))
    await connection.create_function("hold", 0, blocker)
    querying = asyncio.create_task(connection.execute_fetchall("SELECT hold()"))
    await blocker.wait_begun()
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    connection.stop()
    blocker.release()
    async with asyncio.timeout(10):
        await closing
        assert list(await querying) == [(1,)]
