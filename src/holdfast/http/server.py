"""The API behind uvicorn, as `holdfast serve` runs it.

The server writes no access log and installs no signal handlers. Its connections are bounded (`http.protocol`).
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from holdfast.aio import stop_accepting
from holdfast.http.protocol import BoundedProtocol, ConnectionLimits
from holdfast.http.service import Service

#: Time for running requests to finish at shutdown.
_GRACE_S: Final = 10
_BACKLOG: Final = 2_048
#: Descriptors kept for stores, files and workers, as a share of those that the process may open.
_RESERVED_SHARE: Final = 0.25


class HttpServer(uvicorn.Server):
    """One API on one socket, until `stop`."""

    def __init__(self, api: FastAPI, sock: socket.socket, limits: ConnectionLimits | None = None) -> None:
        limits = limits or ConnectionLimits(connections=_most_connections())
        # Uvicorn only calls it.
        protocol: Any = partial(BoundedProtocol, limits=limits)
        super().__init__(
            uvicorn.Config(
                api,
                http=protocol,
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


def _most_connections() -> int:
    """How many connections leave descriptors for the rest of the process."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return ConnectionLimits().connections
    return max(1, int(descriptors * (1 - _RESERVED_SHARE)))
