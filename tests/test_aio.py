"""`serve_tcp`: every accepted connection is closed when the server ends."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
import uvloop

from holdfast.aio import serve_tcp

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


async def _wait_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("iterations", range(8))
@pytest.mark.parametrize("waits", [0, 4])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_made_during_shutdown_is_closed(loop: MakeLoop, iterations: int, waits: int) -> None:
    """Before or after shutdown has begun, and not by the garbage collector, which would warn."""
    connections: list[socket.socket] = []

    async def connect(port: int) -> None:
        for _ in range(iterations):
            await asyncio.sleep(0)
        with suppress(ConnectionRefusedError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))

    async def run_server() -> None:
        async with serve_tcp(_wait_for_ever, "127.0.0.1") as port:
            connecting = asyncio.create_task(connect(port))
            for _ in range(waits):
                await asyncio.sleep(0)
        await connecting

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run_server())
    gc.collect()
    for connection in connections:
        with connection, suppress(ConnectionResetError):
            assert connection.recv(1) == b""


async def test_written_data_arrives_although_the_server_closes_immediately() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 1_000_000)

    async with serve_tcp(serve, "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert len(await reader.read(-1)) == 1_000_000
        writer.close()


async def test_a_connection_whose_handler_fails_is_closed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ValueError("boom")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    contexts: list[dict[str, object]] = []
    async with serve_tcp(serve, "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            assert await reader.read(1) == b""
        writer.close()
    assert [str(context["exception"]) for context in contexts] == ["boom"]
