"""The server of `/metrics`: no client can hold its memory or its connections."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.observe.prometheus import serve_metrics

_SOON_S: Final = 30.0
#: More than the buffers of a socket.
_LARGE: Final = b"x 1\n" * 4_000_000


async def _small() -> tuple[bytes, str]:
    return b"x 1\n", "text/plain"


async def _large() -> tuple[bytes, str]:
    return _LARGE, "text/plain"


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(_SOON_S):
            return await reader.read()
    finally:
        writer.transport.abort()


async def test_headers_are_bounded_in_size_and_time() -> None:
    async with serve_metrics("127.0.0.1", 0, _small, timeout_s=0.3) as port:
        reply = await _ask(port, b"GET /metrics HTTP/1.1\r\na: " + b"b" * 20_000)
        assert reply.startswith(b"HTTP/1.1 431 "), reply[:100]
        assert await _ask(port, b"GET /metrics HTTP/1.1\r\n") == b""
        assert b"200 OK" in await _ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with serve_metrics("127.0.0.1", 0, _large, timeout_s=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_000)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.sleep(2)
        received = b""
        try:
            async with asyncio.timeout(_SOON_S):
                while data := await reader.read(2**20):
                    received += data
        except ConnectionResetError:
            pass
        assert 0 < len(received) < len(_LARGE), "the response was kept for a client that does not read"
        writer.transport.abort()


async def test_connections_are_counted() -> None:
    release = asyncio.Event()

    async def wait() -> tuple[bytes, str]:
        await release.wait()
        return b"x 1\n", "text/plain"

    async with serve_metrics("127.0.0.1", 0, wait, timeout_s=_SOON_S) as port:
        request = b"GET /metrics HTTP/1.1\r\n\r\n"
        asking = [asyncio.create_task(_ask(port, request)) for _ in range(40)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=_SOON_S)
        assert all(b"503 Service Unavailable" in task.result() for task in done)
        release.set()
        replies = await asyncio.gather(*asking)
        assert sum(b"200 OK" in reply for reply in replies) == 32
