"""A server that says goodbye between two statements: the driver has read its words, but not yet the end of the
connection. That is an outage like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from holdfast.aio import serve_tcp
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.postgres.store import Connection, PostgresStore, StoreOptions

pytestmark = pytest.mark.postgres


@asynccontextmanager
async def without_endings(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The server's address by a way that passes on all it says, but not that it hung up; set once it has."""
    target, ended = urlsplit(url), asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(target.hostname, target.port)
        asking = asyncio.create_task(pump(reader, server_writer))
        try:
            await pump(server_reader, writer)
            ended.set()
            await asking
        except OSError:
            pass
        finally:
            asking.cancel()
            server_writer.transport.abort()

    async with serve_tcp(serve, "127.0.0.1") as port:
        yield url.replace(f":{target.port}/", f":{port}/"), ended


@pytest.mark.parametrize("when", ["in a transaction", "at rest"])
async def test_a_farewell_is_an_outage_and_over_at_once(postgres_url: str, when: str) -> None:
    other = await asyncpg.connect(postgres_url)
    async with without_endings(postgres_url) as (url, ended):
        store = PostgresStore(url, StoreOptions(pool_size=1))

        async def part(connection: Connection) -> None:
            pid = await connection.fetchval("SELECT pg_backend_pid()")
            await other.execute("SELECT pg_terminate_backend($1)", pid)
            await ended.wait()
            # Passed on, and read by the driver.
            await asyncio.sleep(0.05)
            if when == "in a transaction":
                await connection.fetch("SELECT $1::int", 1)

        try:
            with pytest.raises(LedgerUnavailable, match=r"the connection broke|shut down"):
                await store.transact(part)
            assert (await store.fetch("SELECT 1 AS x"))[0]["x"] == 1
        finally:
            await store.close()
    await other.close()
