"""A small HTTP server for `/metrics`, on the event loop of a worker, upkeep or triggers: those have no other door."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from holdfast.errors import InvalidOption
from holdfast.listening import listening

_log: Final = logging.getLogger("holdfast.metrics")

_HEAD_LIMIT: Final = 16 * 1024
_PATIENCE_S: Final = 10.0

#: The text, and its content type.
Exposition = Callable[[], Awaitable[tuple[bytes, str]]]
Ready = Callable[[], bool]


@asynccontextmanager
async def serving(host: str, port: int, exposition: Exposition, ready: Ready | None = None) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port (0 asks for a free one). `InvalidOption` if it cannot be had.

    With `ready`, `/readyz` answers 200 or 503.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await _reply(head, exposition, ready))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as exc:
            _log.debug("a scrape came to nothing: %r", exc)
        except Exception:  # noqa: BLE001 - top of a connection
            _log.exception("a scrape failed in an unexpected way")

    async with AsyncExitStack() as door:
        try:
            bound = await door.enter_async_context(listening(answer, host, port, limit=_HEAD_LIMIT))
        except OSError as exc:
            raise InvalidOption(
                f"metrics cannot be served on {host}:{port}: {exc.strerror or exc}; choose another"
            ) from exc
        _log.info("metrics on http://%s:%d/metrics", host, bound)
        yield bound


async def _reply(head: bytes, exposition: Exposition, ready: Ready | None) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path == b"/readyz" and ready is not None and method in (b"GET", b"HEAD"):
        status, word = ("200 OK", b"ready\n") if ready() else ("503 Service Unavailable", b"not ready\n")
        return _response(status, "text/plain; charset=utf-8", word, send=method == b"GET")
    if path != b"/metrics":
        return _response("404 Not Found", "text/plain; charset=utf-8", b"only /metrics is here\n")
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", "text/plain; charset=utf-8", b"metrics are read with GET\n")
    body, content_type = await exposition()
    return _response("200 OK", content_type, body, send=method == b"GET")


def _response(status: str, content_type: str, body: bytes, *, send: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if send else b"")
