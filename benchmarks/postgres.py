"""A PostgreSQL server, as durable as a user's: `fsync` and `synchronous_commit` on. Probes have fresh databases.

It is started by the first stage that needs it, with its data next to the results if user postgres can access them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks import machine
from benchmarks.children import ProbeFailed
from benchmarks.stores import Store
from benchmarks.usage import tree_cpu_s
from holdfast.verification.chaos.servers import PostgresServer
from tools.servers import POSTGRES, find

#: The same for all sides. No checkpoint is triggered by size during a measurement.
SETTINGS: Final[Mapping[str, str]] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
    # Its path may be longer than a socket's name is allowed to be.
    "unix_socket_directories": "",
}
_ANSWER_WITHIN_S: Final = 60.0


class Postgres:
    """The server."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._server: PostgresServer | None = None
        self._databases: list[Database] = []

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._server is not None:
            return
        binary = find(POSTGRES)
        if binary is None:
            raise ProbeFailed(f"no PostgreSQL here; run: {POSTGRES.how_to_install}")
        self._server = PostgresServer(binary, SETTINGS, parent=_reachable(self._scratch))
        self._server.start()

    @property
    def running(self) -> PostgresServer:
        if self._server is None:
            raise ProbeFailed("PostgreSQL was not started")
        return self._server

    @property
    def description(self) -> str:
        """Version, settings and what its files lie on."""
        version = self.database("postgres").value("SHOW server_version")
        names = ("fsync", "synchronous_commit", "shared_buffers")
        settings = ", ".join(f"{name} {SETTINGS[name]}" for name in names)
        return f"{version}, {settings}, on {machine.filesystem(self.running.folder)}"

    def cpu_s(self) -> float:
        """CPU time of the whole server so far, backends that have gone included."""
        return tree_cpu_s(self.running.pid)

    def database(self, name: str, template: str = "template0") -> Database:
        """A database by its name; `reset` makes it."""
        database = Database(self, name, template)
        self._databases.append(database)
        return database

    def has(self, name: str) -> bool:
        """Whether there is such a database."""
        return bool(self.database("postgres").value("SELECT count(*) FROM pg_database WHERE datname = $1", name))

    def execute(self, statement: str, database: str = "postgres") -> None:
        """A statement of an administrator, however long it takes."""
        self.running.execute(statement, database)

    def close(self) -> None:
        """Stop it and delete what it had."""
        for database in self._databases:
            database.disconnect()
        if self._server is not None:
            self._server.remove()


class Database(Store):
    """One database, and the parent's connection to it."""

    name = "PostgreSQL"

    def __init__(self, server: Postgres, database: str, template: str) -> None:
        self.server = server
        self.database = database
        self._template = template
        self._runner: asyncio.Runner | None = None
        self._connection: asyncpg.Connection[Any] | None = None

    @property
    def url(self) -> str:
        return self.server.running.url_of(self.database)

    def reset(self) -> None:
        """Create it from its template, after a checkpoint, so that earlier writes do not disturb the measurement."""
        self.drop()
        self.server.execute(f"CREATE DATABASE {self.database} TEMPLATE {self._template}")
        self.server.execute("CHECKPOINT")

    def drop(self) -> None:
        self.disconnect()
        self.server.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")

    def used_bytes(self) -> int:
        return int(self.value("SELECT pg_database_size(current_database())"))

    def cpu_s(self) -> float:
        return self.server.cpu_s()

    def value(self, query: str, *arguments: object) -> Any:
        """The first column of the first row."""
        rows = self.rows(query, *arguments)
        return rows[0][0] if rows else None

    def rows(self, query: str, *arguments: object) -> list[Any]:
        """All rows, over one connection that stays open."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(self._fetch(query, arguments))

    def disconnect(self) -> None:
        """Hang up; the next query connects again."""
        if self._runner is not None:
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            self._runner.close()
            self._runner = None

    async def _fetch(self, query: str, arguments: tuple[object, ...]) -> list[Any]:
        if self._connection is None:
            self._connection = await asyncpg.connect(self.url, timeout=_ANSWER_WITHIN_S)
        return list(await self._connection.fetch(query, *arguments, timeout=_ANSWER_WITHIN_S))


def _reachable(scratch: Path) -> Path:
    """A folder that user postgres can access: next to the results if possible."""
    if os.geteuid() != 0:
        return scratch
    scratch.chmod(0o711)
    through = all(folder.stat().st_mode & 0o001 for folder in (scratch, *scratch.parents))
    return scratch if through else Path("/tmp")
