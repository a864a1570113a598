"""Whoever reads from a ledger's file can be cancelled at any moment, and leaves nothing behind that never ends."""

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


class Hold:
    """A function of SQL that takes as long as it is let."""

    def __init__(self) -> None:
        self._begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self._begun.set()
        self._may_end.wait(30)
        return 1

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 30)

    def end(self) -> None:
        self._may_end.set()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteLedgerStore]:
    store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger)
    await store.open()
    yield store
    await store.close()


async def ask(store: SqliteLedgerStore) -> Any:
    async with store.read_engine.connect() as connection:
        return await connection.scalar(text("SELECT hold()"))


@pytest.mark.parametrize("turns", range(10))
async def test_a_process_can_end_in_the_middle_of_a_long_query(store: SqliteLedgerStore, turns: int) -> None:
    hold = Hold()
    event.listen(store.read_engine.sync_engine, "connect", lambda opened, _: opened.create_function("hold", 0, hold))
    asking = asyncio.create_task(ask(store))
    await hold.begun()
    asking.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    # As `asyncio.run` does.
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    hold.end()
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*left, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ended)


async def test_a_connection_may_be_stopped_while_it_is_closed(tmp_path: Path) -> None:
    hold = Hold()
    connection = await connect(str(tmp_path / "some.db"))
    await connection.create_function("hold", 0, hold)
    asking = asyncio.create_task(connection.execute_fetchall("SELECT hold()"))
    await hold.begun()
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    connection.stop()
    hold.end()
    async with asyncio.timeout(10):
        await closing
        assert list(await asking) == [(1,)]
