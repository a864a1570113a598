"""The small TCP server under metrics and the proxies: whatever it accepted is closed when it ends."""

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
@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("waits", [0, 4])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_comes_about_the_end_is_closed(loop: MakeLoop, turns: int, waits: int) -> None:
    """Whenever it comes, before or after the end has begun: not by the garbage collector, which would warn."""
    connections: list[socket.socket] = []

    async def come(port: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        with suppress(ConnectionRefusedError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))

    async def end() -> None:
        async with serve_tcp(_wait_for_ever, "127.0.0.1") as port:
            coming = asyncio.create_task(come(port))
            for _ in range(waits):
                await asyncio.sleep(0)
        await coming

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(end())
    gc.collect()
    for connection in connections:
        with connection, suppress(ConnectionResetError):
            assert connection.recv(1) == b""


async def test_what_was_written_arrives_although_the_server_closes_at_once() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 1_000_000)

    async with serve_tcp(serve, "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert len(await reader.read(-1)) == 1_000_000
        writer.close()


async def test_a_connection_whose_server_fails_is_cut() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ValueError("as told")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    told: list[dict[str, object]] = []
    async with serve_tcp(serve, "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            assert await reader.read(1) == b""
        writer.close()
    assert [str(one["exception"]) for one in told] == ["as told"]
