"""Reuses databases between tests.

Creating a database from a template and dropping it takes PostgreSQL longer than most tests run; emptying its tables
takes a tenth of that. A database whose schema or settings a test has changed is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import asyncpg

from holdfast.verification.chaos.servers import PostgresServer, in_own_loop

_TEMPLATE: Final = "holdfast_template"
#: Table that the migrations write to.
_VERSION: Final = "holdfast_version"

#: Ends connections that the finished test has left open, and waits until they are closed.
_END_OTHERS: Final = """
    SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

#: Hash of tables, columns, indexes, constraints, triggers, functions, settings and schema version.
_SHAPE: Final = f"""
    SELECT md5(string_agg(line, chr(10) ORDER BY line)) FROM (
        SELECT concat_ws(' ', c.relkind, n.nspname, c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
                         a.attnotnull, pg_get_expr(d.adbin, d.adrelid), c.reloptions::text) AS line
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
        UNION ALL SELECT concat(pg_get_indexdef(i.indexrelid), i.indisvalid) FROM pg_index i
            JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = 'public'::regnamespace
        UNION ALL SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint
            WHERE connamespace = 'public'::regnamespace
        UNION ALL SELECT concat(pg_get_triggerdef(oid), tgenabled) FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc
            WHERE pronamespace = 'public'::regnamespace AND prokind = 'f'
        UNION ALL SELECT setconfig::text FROM pg_db_role_setting
            WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL SELECT version::text FROM {_VERSION} AS version
    ) AS lines
"""


class Databases:
    """A pool of empty databases for one process. Databases are emptied when they are returned."""

    def __init__(self, server: PostgresServer, migrate: Callable[[str], None]) -> None:
        self._server = server
        self._free: list[str] = []
        server.execute(f"CREATE DATABASE {_TEMPLATE}")
        migrate(server.url_of(_TEMPLATE))
        self._tables, self._shape = in_own_loop(self._read_template)

    @contextmanager
    def borrow(self) -> Iterator[str]:
        """Yield the URL of an empty database."""
        name = self._free.pop() if self._free else self._make()
        yield self._server.url_of(name)
        if in_own_loop(lambda: self._empty(name)):
            self._free.append(name)
        else:
            self._server.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _make(self) -> str:
        name = f"test_{secrets.token_hex(6)}"
        self._server.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
        return name

    async def _read_template(self) -> tuple[list[str], str]:
        connection = await asyncpg.connect(self._server.url_of(_TEMPLATE))
        try:
            rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
            tables = [row[0] for row in rows if row[0] != _VERSION]
            for table in tables:
                rows_written = await connection.fetchval(f'SELECT count(*) FROM "{table}"')
                assert rows_written == 0, (
                    f"a migration writes {rows_written} rows to {table}: they would be lost between tests"
                )
            return tables, await _shape(connection)
        finally:
            await connection.close()

    async def _empty(self, name: str) -> bool:
        """Empty the tables. Return False if the schema or the settings have changed."""
        connection = await asyncpg.connect(self._server.url_of(name))
        try:
            await connection.execute(_END_OTHERS)
            if await _shape(connection) != self._shape:
                return False
            find_filled = " UNION ALL ".join(
                f"SELECT '{table}' WHERE EXISTS (SELECT FROM \"{table}\")" for table in self._tables
            )
            if tables := [f'"{row[0]}"' for row in await connection.fetch(find_filled)]:
                await connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
            return True
        finally:
            await connection.close()


async def _shape(connection: asyncpg.Connection[Any]) -> str:
    shape: str = await connection.fetchval(_SHAPE)
    return shape
