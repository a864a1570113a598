"""The few types of ASGI that this package needs, and an answer that is ready to be sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final = "application/json"
_NO_STORE: Final = (b"cache-control", b"no-store")
_NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


class Reply:
    """A whole answer. `value` is encoded as JSON unless it is bytes."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        value: Any,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
        content_type: str = JSON,
    ) -> None:
        self.body: bytes = value if isinstance(value, bytes) else _encode(value)
        self.status = status
        self.headers = headers or []
        self.content_type = content_type

    async def send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": [
                    (b"content-type", self.content_type.encode()),
                    (b"content-length", str(len(self.body)).encode()),
                    _NO_STORE,
                    _NO_SNIFF,
                    *self.headers,
                ],
            }
        )
        await send({"type": "http.response.body", "body": self.body})


def header(scope: Scope, name: bytes) -> str | None:
    """The one header of that name; several are joined as HTTP says."""
    found = [value for key, value in scope["headers"] if key == name]
    return ", ".join(value.decode("latin-1") for value in found) if found else None


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has left.

    For a task of the caller's own. ASGI promises an awaitable and no more: what a server returns from `receive` may
    look like a future and lack what `asyncio.gather` and others use (granian's does).
    """
    while (await receive())["type"] != "http.disconnect":
        pass
