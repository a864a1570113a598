"""The API behind uvicorn, as `holdfast serve` runs it.

The server writes no access log and installs no signal handlers. An operation can abort the connection of a client that
does not read.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.aio import stop_accepting
from holdfast.http.service import Service
from holdfast.http.sse import ABORT

#: Time for running requests to finish at shutdown.
_GRACE_S: Final = 10
_BACKLOG: Final = 2_048


class _Protocol(HttpToolsProtocol):
    """Lets an operation abort its connection, even if data is not yet sent."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self._abort}  # type: ignore[dict-item]

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpServer(uvicorn.Server):
    """One API on one socket, until `stop`."""

    def __init__(self, api: FastAPI, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                api,
                http=_Protocol,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._api = api
        self._socket = sock

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run_until_stopped(self) -> None:
        """Serve until `stop`; returns when all requests have finished, or after the grace time."""
        await self.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Accept no more requests and finish the running ones. A second call does not wait for them."""
        self.force_exit = self.should_exit
        self.should_exit = True
        # Streams never end by themselves, and requests with `?wait=` would outlast the grace time.
        service: Service | None = getattr(self._api.state, "service", None)
        if service is not None:
            service.end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, but serve connections that were just accepted.

        Uvicorn would leave them open.
        """
        await stop_accepting([self._socket])
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the caller handles signals."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without an explicit protocol asyncio does not recognise TCP and does not set TCP_NODELAY.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Connections made before the service is ready wait in the backlog.
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
