"""Redis client of the engine: connections by purpose, scripts and error translation.

Each purpose has its own connection, opened on first use and again after a failure, so that a blocking wait never delays
a settle. Driver errors are translated (`errors`).

A server is silent while one of its connections is (`connection`). `run_unless_silent` abandons work on a silent server,
for callers that have other servers to serve. Clients of several servers find out which of them is the master now, and
drop the connections to the others (`sentinel`, `cluster`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

import hiredis

from holdfast.engine.redis.net.connection import (
    ConnectionObserver,
    NoReply,
    PipelinedConnection,
    PubSubConnection,
    RedisAddress,
)
from holdfast.engine.redis.net.errors import (
    DEMOTED,
    DOUBTFUL,
    FULL,
    ConnectionLost,
    ScriptError,
    Unreachable,
    translate,
)
from holdfast.engine.redis.net.script import Script
from holdfast.errors import EngineUnavailable

T = TypeVar("T")


class Purpose(StrEnum):
    """Use of a connection: calls of one purpose do not wait for those of another."""

    SUBMIT = "submit"
    CLAIM = "claim"
    SETTLE = "settle"
    WAIT = "wait"
    LISTEN = "listen"
    OTHER = "other"


_SILENT: Final = "Redis keeps the connection open but does not reply"


class RedisClient(ConnectionObserver):
    """Connections to one Redis, one per purpose."""

    #: Longest blocking call. Silence is detected only after it, so it is short where another server may take over.
    max_block_ms: int = 3_600_000

    def __init__(
        self,
        address: RedisAddress,
        connect_timeout_s: float,
        reply_timeout_s: float,
        *,
        unblocks: bool = False,
    ) -> None:
        self.address = address
        #: Whether to unblock and keep connections of cancelled blocking calls, which are frequent on a Cluster.
        self._unblocks = unblocks
        self._connect_timeout_s = connect_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._connections: dict[Purpose, PipelinedConnection] = {}
        self._opening: dict[Purpose, asyncio.Lock] = {}
        #: Connections for blocking calls: idle, and in use.
        self._spare: list[PipelinedConnection] = []
        self._in_use: set[PipelinedConnection] = set()
        #: All open connections.
        self._open_connections: set[PipelinedConnection] = set()
        #: Work that is abandoned when the server becomes silent, and connections being opened.
        self._abandoned_on_silence: set[asyncio.Timeout] = set()
        self._attempts: set[asyncio.Timeout] = set()
        #: Called while the server is silent.
        self.report_silence: Callable[[], None] = lambda: None
        #: Number of connections being opened.
        self._pending = 0
        self._closed = False
        #: A reply this late counts as an interruption.
        self.late_s = math.inf
        #: Whether scripts get the epoch of the server, because there is a ledger.
        self.sends_epoch = False
        self._interruptions = 0

    async def connect(self, purpose: Purpose) -> PipelinedConnection:
        """The connection of the purpose, reopened if it is not usable."""
        connection = self._connections.get(purpose)
        if connection is not None and connection.usable:
            return connection
        async with self._opening.setdefault(purpose, asyncio.Lock()):
            connection = self._connections.get(purpose)
            if connection is None or not connection.usable:
                connection = await self._open(PipelinedConnection, reads_epoch=self.sends_epoch)
                self._connections[purpose] = connection
                # Upkeep always has this one: the server, or the way to it, was lost before it was opened again.
                self._interruptions += purpose is Purpose.OTHER
            return connection

    async def epoch(self, purpose: Purpose, key: bytes) -> bytes:
        """Read the current epoch of the server that has this key."""
        connection = await self.connect(purpose)
        await self._read_epoch(connection)
        return connection.epoch_id

    async def subscription(self, on_message: Callable[[bytes], None]) -> PubSubConnection:
        """Open a separate connection that calls back with the channel of each message."""
        connection = await self._open(PubSubConnection)
        assert isinstance(connection, PubSubConnection)
        connection.on_message = on_message
        return connection

    async def call(self, purpose: Purpose, *command: Any, blocks_s: float = 0.0) -> Any:
        """Send one command. Driver errors are translated."""
        connection = self._connections.get(purpose)
        if connection is None or not connection.usable:
            connection = await self.connect(purpose)
        try:
            return await connection.call(*command, blocks_s=blocks_s)
        except (OSError, hiredis.ReplyError) as exc:
            raise self._on_error(connection, exc) from exc

    async def run(self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Run one script. Loads it if the server does not have it."""
        connection = self._connections.get(purpose)
        if connection is None or not connection.usable:
            connection = await self.connect(purpose)
        arguments = self._with_epoch(connection, script, arguments)
        try:
            return await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
        except hiredis.ReplyError as exc:
            if not str(exc).startswith("NOSCRIPT"):
                raise self._on_error(connection, exc) from exc
        except OSError as exc:
            raise self._on_error(connection, exc) from exc
        await self.call(purpose, b"SCRIPT", b"LOAD", script.source)
        return await self.call(purpose, b"EVALSHA", script.sha, len(keys), *keys, *arguments)

    async def call_dedicated(self, *command: Any, blocks_s: float) -> Any:
        """Send one blocking command on a connection that no other call uses meanwhile."""
        while self._spare and not self._spare[-1].usable:
            self._spare.pop()
        connection = self._spare.pop() if self._spare else await self._open(PipelinedConnection)
        self._in_use.add(connection)
        try:
            if self._unblocks and connection.id is None:
                await connection.identify()
            reply = await connection.call(*command, blocks_s=blocks_s)
        except (OSError, hiredis.ReplyError) as exc:
            self._in_use.discard(connection)
            connection.close()
            raise translate(exc) from exc
        except BaseException:
            self._unblock(connection)
            raise
        self._in_use.discard(connection)
        self._spare.append(connection)
        return reply

    def _unblock(self, connection: PipelinedConnection) -> None:
        """Unblock a cancelled call on the server, so that its connection can be reused.

        Closes the connection if that is not possible.
        """
        others = (self._connections.get(purpose) for purpose in (Purpose.OTHER, Purpose.CLAIM))
        other = next((each for each in others if each is not None and each.usable), None)
        if other is None or connection.id is None:
            self._in_use.discard(connection)
            connection.close()
            return

        def on_reply(answer: asyncio.Future[Any]) -> None:
            self._in_use.discard(connection)
            # 0: the call was not blocked (yet).
            if answer.cancelled() or answer.exception() or answer.result() != 1:
                connection.close()
            else:
                self._spare.append(connection)

        other.call(b"CLIENT", b"UNBLOCK", connection.id).add_done_callback(on_reply)

    async def read(
        self, purpose: Purpose | None, head: Sequence[Any], streams: Mapping[bytes, Any], blocks_s: float
    ) -> list[Any]:
        """XREAD or XREADGROUP, which may block. Without a purpose, uses a dedicated connection."""
        command = (*head, b"STREAMS", *streams, *streams.values())
        if purpose is None:
            return await self.call_dedicated(*command, blocks_s=blocks_s) or []
        try:
            return await self.call(purpose, *command, blocks_s=blocks_s) or []
        except ScriptError:
            raise
        except BaseException:
            # The server still blocks on this call; the next one must not wait behind it.
            self.drop(purpose)
            raise

    async def run_after_read(
        self,
        purpose: Purpose,
        read: Sequence[Any],
        blocks_s: float,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
    ) -> tuple[bool, Any]:
        """Pipeline a script behind a blocking read: Redis runs it as soon as the read ends.

        The script runs whatever the result of the read is. Returns whether the read succeeded, and the reply of the
        script; None if the script must be loaded first.
        """
        connection = await self.connect(purpose)
        arguments = self._with_epoch(connection, script, arguments)
        waited = connection.call(*read, blocks_s=blocks_s)
        waited.add_done_callback(_retrieve_exception)
        try:
            reply = await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments, blocks_s=blocks_s)
            return waited.exception() is None, reply
        except hiredis.ReplyError as exc:
            if str(exc).startswith("NOSCRIPT"):
                return waited.exception() is None, None
            raise self._on_error(connection, exc) from exc
        except OSError as exc:
            raise self._on_error(connection, exc) from exc
        except BaseException:
            # The server still holds both calls, whose results are not needed.
            self.drop(purpose)
            raise

    async def run_asking(
        self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        """Run one script on a slot that is being migrated to this node."""
        arguments = self._with_epoch(await self.connect(purpose), script, arguments)
        return await self.call_asking(purpose, b"EVAL", script.source, len(keys), *keys, *arguments)

    async def call_asking(self, purpose: Purpose, *command: Any) -> Any:
        """Send one command on a slot that is being migrated to this node."""
        connection = await self.connect(purpose)
        # Pipelined: ASKING applies to the next command only.
        connection.call(b"ASKING")
        try:
            return await connection.call(*command)
        except (OSError, hiredis.ReplyError) as exc:
            raise self._on_error(connection, exc) from exc

    @property
    def idle(self) -> bool:
        """Whether no call is in flight and no connection is being opened."""
        opening = self._pending or any(lock.locked() for lock in self._opening.values())
        return not opening and not self._in_use and not any(each.busy for each in self._connections.values())

    async def time_ms(self, key: bytes | None = None) -> int:
        """Clock of the server that has this key; without a key, of any server."""
        seconds, microseconds = await self.call(Purpose.OTHER, b"TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def node_of(self, key: bytes) -> RedisClient | None:
        """The client of the server that has this key; None if it is not known yet."""
        return self

    def contact(self, key: bytes) -> object:
        """A value that changes when the server of this key does, or when it could not serve calls."""
        return self, self._interruptions

    async def masters(self) -> list[RedisClient]:
        """Clients of all masters."""
        return [self]

    def drop(self, purpose: Purpose) -> None:
        """Close the connection of a purpose. The next call opens another."""
        connection = self._connections.pop(purpose, None)
        if connection is not None:
            connection.close()

    def drop_all(self) -> None:
        """Close all connections. The next call opens another."""
        for connection in tuple(self._open_connections):
            connection.close()

    def abandon(self) -> None:
        """Close all connections, also those being opened: another server has taken over."""
        self.drop_all()
        _expire(self._attempts)

    def drop_subscriptions(self) -> None:
        """Close subscriptions. Subscribers open others, if possible on another node."""
        for connection in tuple(self._open_connections):
            if isinstance(connection, PubSubConnection):
                connection.close()

    @property
    def silent(self) -> bool:
        """Whether the server does not reply at present."""
        return any(connection.silent for connection in self._open_connections)

    async def run_unless_silent(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work on this server; raises `Unreachable` if the server is silent, or as soon as it becomes silent."""
        if self.silent:
            raise Unreachable(_SILENT)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._abandoned_on_silence.add(limit)
                try:
                    return await work()
                finally:
                    self._abandoned_on_silence.discard(limit)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise Unreachable(_SILENT) from exc

    def close(self) -> None:
        """Close all connections, also those being opened. Opens none before `reopen`."""
        self._closed = True
        self.drop_all()
        self._connections.clear()
        self._spare.clear()

    def reopen(self) -> None:
        """Allow connections again after `close`."""
        self._closed = False

    # Called by connections --------------------------------------------------------------------------

    def on_opened(self, connection: PipelinedConnection) -> None:
        self._open_connections.add(connection)

    def on_silence(self) -> None:
        _expire(self._abandoned_on_silence)
        self.report_silence()

    def on_closed(self, connection: PipelinedConnection) -> None:
        self._open_connections.discard(connection)

    # Private ---------------------------------------------------------------------------------------

    async def _open(self, kind: type[PipelinedConnection], *, reads_epoch: bool = False) -> PipelinedConnection:
        self._require_open()
        self._pending += 1
        attempt = asyncio.timeout(None)
        try:
            async with attempt:
                self._attempts.add(attempt)
                connection = await self._reach(kind)
                try:
                    if reads_epoch:
                        await self._read_epoch(connection)
                    self._require_open()
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError as exc:
            if not attempt.expired():
                raise
            raise ConnectionLost("another server took over during the connection attempt") from exc
        finally:
            self._attempts.discard(attempt)
            self._pending -= 1
        connection.late_s, connection.on_late = self.late_s, self._on_interruption
        return connection

    def _require_open(self) -> None:
        if self._closed:
            raise Unreachable("the engine is closed")

    async def _reach(self, kind: type[PipelinedConnection]) -> PipelinedConnection:
        """Open a connection to the server; subclasses find its address first."""
        return await self._connect(kind, self.address)

    def _with_epoch(self, connection: PipelinedConnection, script: Script, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments of the script, with the epoch of this connection if the script needs it."""
        if not script.needs_epoch:
            return arguments
        return [*arguments, connection.epoch_id if self.sends_epoch else b""]

    async def _read_epoch(self, connection: PipelinedConnection) -> None:
        try:
            await connection.read_epoch()
        except (OSError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    async def _connect(self, kind: type[PipelinedConnection], address: RedisAddress) -> PipelinedConnection:
        try:
            return await kind.connect(address, self._connect_timeout_s, self._reply_timeout_s, self)
        except (OSError, TimeoutError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    def _on_interruption(self) -> None:
        self._interruptions += 1

    def _on_error(self, connection: PipelinedConnection, exc: Exception) -> EngineUnavailable:
        error = translate(exc)
        if not isinstance(error, ScriptError) and FULL not in str(exc):
            self._on_interruption()
        if isinstance(exc, OSError):
            if isinstance(exc, ConnectionError) and not isinstance(exc, NoReply):
                error = ConnectionLost(str(error))
            connection.close()
        elif any(word in str(exc) for word in DEMOTED):
            # The server is now a replica: drop all connections, also those for reads, to find the master again.
            self._drop_server(connection.address)
        elif any(word in str(exc) for word in DOUBTFUL):
            self.on_doubt()
        return error

    def _drop_server(self, address: RedisAddress) -> None:
        for connection in tuple(self._open_connections):
            if connection.address == address:
                connection.close()

    def on_doubt(self) -> None:
        """Called when a server refuses calls as one does that is no longer the master."""


def _expire(limits: set[asyncio.Timeout]) -> None:
    now = asyncio.get_running_loop().time()
    while limits:
        limits.pop().reschedule(now)


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
