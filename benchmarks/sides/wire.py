"""Redis with next to nothing in between: commands packed in C, written to a raw transport, replies in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import hiredis

Command = tuple[bytes | str | int, ...]


class Wire(asyncio.Protocol):
    """One connection. `send` may be called again before the first answer is there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._transport: asyncio.WriteTransport | None = None
        #: For each `send`: replies still to come, those that came, who waits.
        self._waiting: deque[tuple[int, list[Any], asyncio.Future[list[Any]]]] = deque()

    @classmethod
    async def connect(cls, url: str) -> Wire:
        """A connection to the server that the URL names."""
        at = urlsplit(url)
        host, port = at.hostname or "127.0.0.1", at.port or 6379
        _, wire = await asyncio.get_running_loop().create_connection(cls, host, port)
        return wire

    def send(self, commands: Iterable[Command]) -> asyncio.Future[list[Any]]:
        """Write some commands at once; the replies to all of them."""
        packed = [_pack(command) for command in commands]
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiting.append((len(packed), [], future))
        assert self._transport is not None
        self._transport.write(b"".join(packed))
        return future

    async def call(self, *command: bytes | str | int) -> Any:
        """One command."""
        return (await self.send([command]))[0]

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        # False is the reader's word for "nothing complete yet"; a nil reply is None.
        while (reply := self._reader.gets()) is not False:
            expected, replies, future = self._waiting[0]
            replies.append(reply)
            if len(replies) == expected:
                self._waiting.popleft()
                if not future.done():
                    _finish(future, replies)

    def connection_lost(self, exc: Exception | None) -> None:
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(exc or ConnectionResetError("Redis hung up"))


def _pack(command: Command) -> bytes:
    # The stub of `pack_command` allows only tuples of one.
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


def _finish(future: asyncio.Future[list[Any]], replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            future.set_exception(reply)
            return
    future.set_result(replies)
