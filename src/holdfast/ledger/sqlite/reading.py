"""Connections for readers."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial
from typing import Any, Final

import aiosqlite

#: As aiosqlite has it: how many rows are fetched at a time.
_ROWS: Final = 64


class Connection(aiosqlite.Connection):
    """One that may be stopped twice.

    aiosqlite (0.22) answers no second `stop`: its thread has ended with the first. SQLAlchemy stops a connection once
    more if whoever waits for it to be closed is cancelled, as happens when a process ends in the middle of a long
    query, and then the event loop would never end.
    """

    _stopped: asyncio.Future[Any] | None = None

    def stop(self) -> asyncio.Future[Any] | None:
        if self._stopped is None:
            self._stopped = super().stop()
        return self._stopped


def connect(database: str, **options: Any) -> Connection:
    """To be awaited. What its thread is in the middle of does not keep the process from ending."""
    connection = Connection(partial(sqlite3.connect, database, **options), _ROWS)
    connection._thread.daemon = True
    return connection
