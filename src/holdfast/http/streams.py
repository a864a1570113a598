"""Server-sent events to one client, until it goes, or does not read any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from holdfast.http.asgi import Receive, Scope, Send, wait_disconnect

CONTENT_TYPE: Final = "text/event-stream"
#: A comment every so often keeps proxies from hanging up, and finds clients that are gone.
HEARTBEAT_S: Final = 15.0
HEARTBEAT: Final = b": still here\n\n"
#: What browsers wait before they come back, in milliseconds.
_OPENING: Final = b"retry: 2000\n\n"
#: A server that can cut a connection off says so here (`http.server`); any other closes it when it is flushed.
ABORT: Final = "holdfast.abort"


class Stream:
    """The sending end."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._task = asyncio.current_task()

    async def begin(self) -> None:
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send(_OPENING)

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def let_go(self) -> None:
        """Cut the client off, in the middle of a write that never ends if need be."""
        abort: Callable[[], None] | None = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()
        if self._task is not None:
            self._task.cancel()


@asynccontextmanager
async def until_gone(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Watch for the client's going away while the block runs."""

    async def watch() -> None:
        await wait_disconnect(receive)
        on_gone()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
