"""A thread with a read-only connection, so that looking never blocks the event loop nor waits behind a writer."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.engine.sqlite.connection import is_lost, open_reader, translate
from holdfast.engine.sqlite.transaction import Value, read_rows

T = TypeVar("T")


class Reader:
    """One per engine; the thread starts with the first question."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"holdfast-reader-{path.name}")

    async def rows(self, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
        """What a statement says about the last commit."""
        return await self.ask(lambda connection: read_rows(connection, name, decoder, **values))

    async def ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _answer(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = open_reader(self._path)
            return question(self._connection)
        except sqlite3.Error as exc:
            if is_lost(exc):
                self._disconnect()
            raise translate(exc, self._path) from exc

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
