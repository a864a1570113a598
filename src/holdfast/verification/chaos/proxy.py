"""A TCP proxy between a client and its server that misbehaves on request.

It can delay replies, stall all traffic, cut connections, refuse new ones, and drop a reply *after* the server has
done the work. The last fault breaks every operation that cannot be repeated safely.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from holdfast.aio import serve_tcp

_CHUNK: Final = 64 * 1024
#: A server that sends nothing for this long has answered every request.
_SILENCE_S: Final = 0.05


class Proxy:
    """`async with Proxy(port) as proxy:` and connect to `proxy.port`."""

    def __init__(self, target_port: int, target_host: str = "127.0.0.1") -> None:
        self._target = (target_host, target_port)
        self._listening = serve_tcp(self._accept, "127.0.0.1")
        self._port: int | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._doomed: list[bytes] = []
        #: Delay of every reply.
        self.delay_s = 0.0
        #: Whether new connections are closed immediately.
        self.refuse = False
        #: Replies dropped so far.
        self.lost = 0

    @property
    def port(self) -> int:
        assert self._port is not None, "the proxy has not been started"
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def flows(self) -> bool:
        """Whether data passes: false while stalled."""
        return self._flowing.is_set()

    def lose_reply(self, to: bytes = b"") -> None:
        """Pass the next request that contains `to` to the server, then drop its reply and cut the connection."""
        self._doomed.append(to)

    def spare(self) -> None:
        """Withdraw all pending `lose_reply` calls."""
        self._doomed.clear()

    def stall(self) -> None:
        """Stop all traffic in both directions; connections stay open."""
        self._flowing.clear()

    def flow(self) -> None:
        """End a stall."""
        self._flowing.set()

    async def cut(self) -> None:
        """Close all connections on both sides, as a broken link would."""
        cut = list(self._connections)
        for connection in cut:
            connection.cancel()
        await asyncio.gather(*cut, return_exceptions=True)

    def clear(self) -> None:
        """End every fault: no delay, no stall, no refusal, no reply to drop."""
        self.spare()
        self.delay_s = 0.0
        self.refuse = False
        self.flow()

    async def __aenter__(self) -> Self:
        self._port = await self._listening.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._listening.__aexit__(kind, error, at)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not self.refuse:
                await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            # Cut on purpose, or closed by the other side: both end only this connection.
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        link = _ProxiedConnection(self, reader, writer, server_reader, server_writer)
        pumps = [asyncio.create_task(link.requests()), asyncio.create_task(link.replies())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before the first await: a cut may cancel this task while the connection closes.
            server_writer.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _take_doomed(self, request: bytes) -> bool:
        for pattern in self._doomed:
            if pattern in request:
                self._doomed.remove(pattern)
                return True
        return False


class _ProxiedConnection:
    """One client connection and its connection to the server."""

    def __init__(
        self,
        proxy: Proxy,
        client_reader: asyncio.StreamReader,
        client_writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client = (client_reader, client_writer)
        self._server = (server_reader, server_writer)
        self._doomed = False

    async def requests(self) -> None:
        while data := await self._client[0].read(_CHUNK):
            await self._proxy._flowing.wait()
            self._doomed = self._doomed or self._proxy._take_doomed(data)
            self._server[1].write(data)
            await self._server[1].drain()

    async def replies(self) -> None:
        while data := await self._server[0].read(_CHUNK):
            await self._proxy._flowing.wait()
            if self._doomed:
                await self._lose()
                return
            if self._proxy.delay_s:
                await asyncio.sleep(self._proxy.delay_s)
            self._client[1].write(data)
            await self._client[1].drain()

    async def _lose(self) -> None:
        """Drop replies until the server sends nothing more.

        The first reply may answer an earlier request. Cutting the connection at once could keep the server from
        handling the request whose reply is to be dropped.
        """
        self._proxy.lost += 1
        with suppress(TimeoutError):
            while await asyncio.wait_for(self._server[0].read(_CHUNK), _SILENCE_S):
                pass
