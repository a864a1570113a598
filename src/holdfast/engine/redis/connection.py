"""One connection to Redis, thin: commands packed in C, replies in order, nothing else.

Measured five times cheaper per command than a general client, which is what submit, claim and settle
need. A server that accepts but does not answer is noticed by a watchdog, since a stopped process keeps
its sockets open.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import hiredis

#: The incarnation of a server that does not tell it.
UNTOLD: Final = b"1"

#: What it says then: its user may not ask, or there is no such question.
_NOT_TOLD: Final = ("NOPERM", "ERR unknown command")

#: A reply that is due this long after its deadline ends the connection.
_WATCH_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Address:
    """Where and how to connect."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None


class NoReply(ConnectionError):
    """The server holds the connection but says nothing."""


class Connection(asyncio.Protocol):
    """Pipelined calls over one socket. Any failure fails all calls under way with `ConnectionError`."""

    def __init__(self, reply_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply_timeout_s = reply_timeout_s
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        #: What the server calls it, if it was asked.
        self.id: int | None = None
        #: Whose memory it speaks to, if it was asked.
        self.incarnation = b""

    @classmethod
    async def connect(cls, address: Address, connect_timeout_s: float, reply_timeout_s: float) -> Connection:
        """Connect, authenticate and select, or raise `OSError` / `hiredis.ReplyError`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(connect_timeout_s):
            if address.path:
                opening = loop.create_unix_connection(lambda: cls(reply_timeout_s), address.path)
            else:
                server_name = address.host if address.tls else None
                opening = loop.create_connection(
                    lambda: cls(reply_timeout_s),
                    address.host,
                    address.port,
                    ssl=address.tls,
                    server_hostname=server_name,
                )
            _, connection = await opening
            try:
                await connection._greet(address)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _greet(self, address: Address) -> None:
        if address.password is not None:
            user = (address.username,) if address.username else ()
            await self.call(b"AUTH", *user, address.password)
        if address.db:
            await self.call(b"SELECT", address.db)

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def busy(self) -> bool:
        """Whether a reply is awaited."""
        return bool(self._waiting)

    def call(self, *command: Any, blocks_s: float = 0.0) -> asyncio.Future[Any]:
        """Send a command; the future gets its reply. `blocks_s`: how long the server itself may take."""
        future = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            future.set_exception(ConnectionError("the connection is closed"))
            return future
        self._waiting.append((future, self._loop.time() + self._reply_timeout_s + blocks_s))
        self._transport.write(hiredis.pack_command(command))
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_INTERVAL_S, self._check_deadline)
        return future

    async def identify(self) -> None:
        """Ask the server for this connection's id; one that may not be told has none."""
        try:
            self.id = await self.call(b"CLIENT", b"ID")
        except hiredis.ReplyError:
            self.id = None

    async def learn(self) -> None:
        """Ask whose memory this is. Another one after every restart and every fail-over, the same until then: a server
        that starts or is promoted takes a new replication id. No replica has an answer of its own."""
        try:
            info: bytes = await self.call(b"INFO", b"replication")
        except hiredis.ReplyError as exc:
            if not str(exc).startswith(_NOT_TOLD):
                raise
            self.incarnation = UNTOLD
            return
        said = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        self.incarnation = said.get(b"master_replid", UNTOLD) if said.get(b"role") == b"master" else b"replica"

    def close(self) -> None:
        """Close now; calls under way fail."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._deliver(reply)
        except hiredis.ProtocolError as exc:
            self._fail(ConnectionError(f"the server does not speak Redis: {exc}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError(f"the connection was lost: {exc or 'closed by the server'}"))
        self.close()
        self._transport = None

    def _deliver(self, reply: Any) -> None:
        future, _ = self._waiting.popleft()
        if future.done():
            return
        if isinstance(reply, hiredis.ReplyError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _fail(self, error: ConnectionError) -> None:
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                # Nobody may be listening any more, and that is fine: the error is the connection's.
                future.exception()

    def _check_deadline(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        if self._loop.time() > self._waiting[0][1]:
            self._fail(NoReply(f"no reply within {self._reply_timeout_s:g} s"))
            self.close()
            return
        self._watch = self._loop.call_later(_WATCH_INTERVAL_S, self._check_deadline)


class Subscription(Connection):
    """A connection in subscriber mode: the channel of each message goes to a callback."""

    on_message: Callable[[bytes], None]

    def post(self, *command: Any) -> None:
        """Unsubscribe; nobody waits for that."""
        if self._transport is not None:
            self._transport.write(hiredis.pack_command(command))

    def _deliver(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == b"message":
            self.on_message(reply[1])
        elif not (isinstance(reply, list) and reply[0] == b"unsubscribe"):
            super()._deliver(reply)
