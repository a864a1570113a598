"""A server that closes a session between two statements: the driver has read the server's message, but not the end of
the connection. It is reported as an outage."""

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
async def hide_close(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Proxy the server without passing on that it closed the connection; yields the address and an event for that."""
    target, closed = urlsplit(url), asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(target.hostname, target.port)
        to_server = asyncio.create_task(pump(reader, server_writer))
        try:
            await pump(server_reader, writer)
            closed.set()
            await to_server
        except OSError:
            pass
        finally:
            to_server.cancel()
            server_writer.transport.abort()

    async with serve_tcp(serve, "127.0.0.1") as port:
        yield url.replace(f":{target.port}/", f":{port}/"), closed


@pytest.mark.parametrize("when", ["in a transaction", "at rest"])
async def test_a_terminated_session_is_an_outage_and_the_next_call_works(postgres_url: str, when: str) -> None:
    other = await asyncpg.connect(postgres_url)
    async with hide_close(postgres_url) as (url, closed):
        store = PostgresStore(url, StoreOptions(pool_size=1))

        async def terminate_session(connection: Connection) -> None:
            pid = await connection.fetchval("SELECT pg_backend_pid()")
            await other.execute("SELECT pg_terminate_backend($1)", pid)
            await closed.wait()
            # Time for the driver to read the message.
            await asyncio.sleep(0.05)
            if when == "in a transaction":
                await connection.fetch("SELECT $1::int", 1)

        try:
            with pytest.raises(LedgerUnavailable, match=r"the connection broke|shut down"):
                await store.transact(terminate_session)
            assert (await store.fetch("SELECT 1 AS x"))[0]["x"] == 1
        finally:
            await store.close()
    await other.close()
