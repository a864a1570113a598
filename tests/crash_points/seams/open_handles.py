"""Handles that a crashed process leaves open."""

from __future__ import annotations

import asyncpg

from holdfast.engine.redis.net.connection import PipelinedConnection
from holdfast.sqlite import writer as writers


class OpenHandles:
    """Connections and files that the operating system closes after a crash."""

    def __init__(self) -> None:
        self._redis: set[PipelinedConnection] = set()
        self._postgres: set[asyncpg.Connection] = set()

    def add_redis(self, connection: PipelinedConnection) -> None:
        self._redis.add(connection)

    def add_postgres(self, connection: asyncpg.Connection) -> None:
        self._postgres.add(connection)

    def abandon(self) -> None:
        """Close them. Must run on the loop that opened them."""
        for connection in self._redis:
            connection.close()
        for database in self._postgres:
            if not database.is_closed():
                database.terminate()
        self._redis.clear()
        self._postgres.clear()
        for writer in list(writers._writers.values()):
            del writers._writers[writer.path]
            writer.close()
