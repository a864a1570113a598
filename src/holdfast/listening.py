"""A TCP server for as long as a block runs, with nothing left of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, Protocol

#: From the acceptance of a connection until its task has begun, asyncio takes so many turns of the loop. One that a
#: closed server is still about to begin is closed by nobody.
_TURNS: Final = 4

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Socket(Protocol):
    """What listens."""

    def fileno(self) -> int: ...


async def stop_accepting(sockets: Iterable[Socket]) -> None:
    """Before a server is closed: whoever has not been accepted yet never is, and all others are being served."""
    for sock in sockets:
        asyncio.get_running_loop().remove_reader(sock.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@asynccontextmanager
async def listening(serve: Serve, host: str, port: int = 0, *, limit: int = 2**16) -> AsyncIterator[int]:
    """Run `serve` for each connection until the block ends; gives the port (0 asks for a free one).

    A connection is closed when its `serve` returns; those that are still open at the end are cut.
    """
    connections: set[asyncio.Task[None]] = set()

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(reader, writer)
            writer.close()
        except asyncio.CancelledError:
            # The end of the block: nobody awaits this task, and asyncio takes its cancellation for an error.
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()
            connections.discard(task)

    server = await asyncio.start_server(begin, host, port, limit=limit)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        await stop_accepting(server.sockets)
        server.close()
        cut = list(connections)
        for connection in cut:
            connection.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        # A transport that is aborted closes its socket in the next turn.
        await asyncio.sleep(0)
