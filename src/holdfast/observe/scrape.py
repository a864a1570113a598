"""A small HTTP server for `/metrics`, `/livez` and `/readyz`, on the event loop of a worker, upkeep or triggers.

A loop that is blocked answers none of them, so that a liveness probe fails by its own timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

import msgspec

from holdfast.errors import InvalidOption
from holdfast.listening import listening

_log: Final = logging.getLogger("holdfast.metrics")

_HEAD_LIMIT: Final = 16 * 1024
_PATIENCE_S: Final = 10.0
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"

#: The text, and its content type.
Exposition = Callable[[], Awaitable[tuple[bytes, str]]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The process answers."""

    status: str


class Readiness(Protocol):
    """Whether the process can do its work, and what else is to be known, as JSON."""

    @property
    def ready(self) -> bool: ...


AskReadiness = Callable[[], Awaitable[Readiness]]


@asynccontextmanager
async def serving(
    host: str, port: int, exposition: Exposition, readiness: AskReadiness | None = None
) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port (0 asks for a free one). `InvalidOption` if it cannot be had.

    With `readiness`, `/readyz` answers 200 or 503.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await _reply(head, exposition, readiness))
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


async def _reply(head: bytes, exposition: Exposition, readiness: AskReadiness | None) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path not in (b"/metrics", b"/livez", b"/readyz") or (path == b"/readyz" and readiness is None):
        here = b"only /metrics, /livez and /readyz are here\n" if readiness else b"only /metrics and /livez are here\n"
        return _response("404 Not Found", _TEXT, here)
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", _TEXT, b"only GET and HEAD are allowed\n")
    status, content_type = "200 OK", _JSON
    if path == b"/livez":
        body = msgspec.json.encode(Health(status="ok"))
    elif path == b"/readyz" and readiness is not None:
        found = await readiness()
        body = msgspec.json.encode(found)
        status = status if found.ready else "503 Service Unavailable"
    else:
        body, content_type = await exposition()
    return _response(status, content_type, body, send=method == b"GET")


def _response(status: str, content_type: str, body: bytes, *, send: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if send else b"")
