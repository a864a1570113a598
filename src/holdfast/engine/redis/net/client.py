"""Connections, scripts and errors: what lies between the engine's verbs and the socket.

Each purpose has a connection of its own, opened when first needed and again after a failure, so that a
blocking wait never stands before a settle. Driver errors are translated here, once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any, Final

import hiredis

from holdfast.core.states import MOVES
from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.engine.redis.net.connection import NoReply, PipelinedConnection, PubSubConnection, RedisAddress
from holdfast.errors import EngineRefused, EngineUnavailable


class Purpose(StrEnum):
    """What a connection is for: calls of one purpose must not wait for those of another."""

    SUBMIT = "submit"
    CLAIM = "claim"
    SETTLE = "settle"
    WAIT = "wait"
    LISTEN = "listen"
    OTHER = "other"


#: Words in Redis's errors that mean "not now", and what to do about them.
_NOT_NOW: Final[Mapping[str, str]] = {
    "OOM ": "Redis is full (maxmemory); free memory or raise the limit. Accepted jobs are safe and still drain",
    "READONLY": "this Redis is a read-only replica; connect to the master",
    "LOADING": "Redis is still loading its data; it will answer soon",
    "MASTERDOWN": "this replica has lost its master",
    "CLUSTERDOWN": "the Redis Cluster is down",
    "TRYAGAIN": "the Redis Cluster is moving the queue's slot; it will answer soon",
    "BUSY ": "Redis is busy running another script",
    "MISCONF": "Redis cannot write to its disk and refuses writes; see its log",
    "NOREPLICAS": "Redis has too few replicas to accept writes (min-replicas-to-write)",
    "NOAUTH": "Redis wants a password; put it in the URL",
    "WRONGPASS": "Redis refuses this user name or password",
    "NOPERM": "the Redis user lacks permissions for holdfast's commands or keys",
    "invalid username-password": "Redis refuses this user name or password",
    "max number of clients": "Redis has no room for another connection (maxclients)",
}


#: Connections that know whose memory they speak to.
_LEARNED: Final = frozenset({Purpose.SUBMIT, Purpose.OTHER})
#: Scripts that are told so, and in which argument, where that is not empty.
_TOLD: Final[Mapping[str, int]] = {"submit": 6}

#: Said by a server that is no master any more.
_DEMOTED: Final = ("READONLY", "MASTERDOWN")


class ScriptError(EngineRefused):
    """A command or script failed for a reason that is not the server's state of health."""


class Redirected(ScriptError):
    """Another node of a Cluster has the slot (`MOVED`), or has what this one has not (`ASK`). Nothing was applied."""

    def __init__(self, text: str) -> None:
        super().__init__(f"this Redis is a node of a Cluster; begin the URL with redis+cluster:// ({text})")
        word, _, self.place = text.split(" ")[:3]
        self.asks = word == "ASK"


class Unreachable(EngineUnavailable):
    """The server did not answer at all: whoever asks it something else waits as long again."""


class ConnectionLost(Unreachable):
    """The connection broke while a call was on its way; nobody knows whether it was applied."""


class Script:
    """One Lua file, with the common parts and the state table before it."""

    def __init__(self, name: str) -> None:
        folder = files("holdfast.engine.redis") / "lua"
        parts = [(folder / f"{part}.lua").read_text() for part in ("_common", "_lanes", name)]
        self.name = name
        self.source = "\n".join([_constants(), *parts]).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
        self._told_at = _TOLD.get(name)

    def arguments_for(self, connection: PipelinedConnection, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments for this very connection."""
        at = self._told_at
        if at is None or not arguments[at]:
            return arguments
        return [*arguments[:at], connection.incarnation, *arguments[at + 1 :]]


class RedisClient:
    """A small set of connections to one Redis."""

    def __init__(
        self,
        address: RedisAddress,
        connect_timeout_s: float,
        reply_timeout_s: float,
        *,
        unblocks: bool = False,
    ) -> None:
        self.address = address
        #: Whether calls that block are given up so often that their connections are worth keeping.
        self._unblocks = unblocks
        self._connect_timeout_s = connect_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._connections: dict[Purpose, PipelinedConnection] = {}
        self._opening: dict[Purpose, asyncio.Lock] = {}
        #: For calls that block: at rest, and in use.
        self._spare: list[PipelinedConnection] = []
        self._lent: set[PipelinedConnection] = set()
        #: Connections that are being opened.
        self._pending = 0
        self._closed = False

    async def connect(self, purpose: Purpose) -> PipelinedConnection:
        """The purpose's connection, opened anew if it is not usable."""
        connection = self._connections.get(purpose)
        if connection is not None and connection.usable:
            return connection
        async with self._opening.setdefault(purpose, asyncio.Lock()):
            connection = self._connections.get(purpose)
            if connection is None or not connection.usable:
                connection = await self._open(PipelinedConnection, learned=purpose in _LEARNED)
                self._connections[purpose] = connection
            return connection

    async def epoch(self, purpose: Purpose, key: bytes) -> bytes:
        """Whose memory the server has that has this key, asked anew."""
        connection = await self.connect(purpose)
        await self._learn(connection)
        return connection.incarnation

    async def subscription(self, on_message: Callable[[bytes], None]) -> PubSubConnection:
        """A connection of its own that tells the callback on which channel something was said."""
        connection = await self._open(PubSubConnection)
        assert isinstance(connection, PubSubConnection)
        connection.on_message = on_message
        return connection

    async def call(self, purpose: Purpose, *command: Any, blocks_s: float = 0.0) -> Any:
        """One command; driver errors become holdfast's."""
        connection = self._connections.get(purpose)
        if connection is None or not connection.usable:
            connection = await self.connect(purpose)
        try:
            return await connection.call(*command, blocks_s=blocks_s)
        except (OSError, hiredis.ReplyError) as exc:
            raise self._failed(purpose, exc) from exc

    async def run(self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """One script; loaded when the server does not know it."""
        connection = self._connections.get(purpose)
        if connection is None or not connection.usable:
            connection = await self.connect(purpose)
        arguments = script.arguments_for(connection, arguments)
        try:
            return await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
        except hiredis.ReplyError as exc:
            if not str(exc).startswith("NOSCRIPT"):
                raise self._failed(purpose, exc) from exc
        except OSError as exc:
            raise self._failed(purpose, exc) from exc
        await self.call(purpose, b"SCRIPT", b"LOAD", script.source)
        return await self.call(purpose, b"EVALSHA", script.sha, len(keys), *keys, *arguments)

    async def call_dedicated(self, *command: Any, blocks_s: float) -> Any:
        """One command that blocks, on a connection that nobody else uses meanwhile."""
        while self._spare and not self._spare[-1].usable:
            self._spare.pop()
        connection = self._spare.pop() if self._spare else await self._open(PipelinedConnection)
        self._lent.add(connection)
        try:
            if self._unblocks and connection.id is None:
                await connection.identify()
            reply = await connection.call(*command, blocks_s=blocks_s)
        except (OSError, hiredis.ReplyError) as exc:
            self._lent.discard(connection)
            connection.close()
            raise translate(exc) from exc
        except BaseException:
            self._give_up(connection)
            raise
        self._lent.discard(connection)
        self._spare.append(connection)
        return reply

    def _give_up(self, connection: PipelinedConnection) -> None:
        """The server still holds this connection's call: it is told to let go, or the connection is closed."""
        messengers = (self._connections.get(purpose) for purpose in (Purpose.OTHER, Purpose.CLAIM))
        messenger = next((each for each in messengers if each is not None and each.usable), None)
        if messenger is None or connection.id is None:
            self._lent.discard(connection)
            connection.close()
            return

        def told(answer: asyncio.Future[Any]) -> None:
            self._lent.discard(connection)
            # 0: it was not blocked, or not yet.
            if answer.cancelled() or answer.exception() or answer.result() != 1:
                connection.close()
            else:
                self._spare.append(connection)

        messenger.call(b"CLIENT", b"UNBLOCK", connection.id).add_done_callback(told)

    async def read(
        self, purpose: Purpose | None, head: Sequence[Any], streams: Mapping[bytes, Any], blocks_s: float
    ) -> list[Any]:
        """XREAD or XREADGROUP, which may block; without a purpose, on a connection that nobody else uses meanwhile."""
        command = (*head, b"STREAMS", *streams, *streams.values())
        if purpose is None:
            return await self.call_dedicated(*command, blocks_s=blocks_s) or []
        try:
            return await self.call(purpose, *command, blocks_s=blocks_s) or []
        except ScriptError:
            raise
        except BaseException:
            # The server still holds this call; the next one must not stand behind it.
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
        """A script that stands behind a blocking read on the same connection: Redis runs it the moment the read is
        over, whatever came of that. Whether the read was carried out, and the script's reply; None if Redis has to be
        given the script first."""
        connection = await self.connect(purpose)
        waited = connection.call(*read, blocks_s=blocks_s)
        waited.add_done_callback(_look_at)
        try:
            reply = await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments, blocks_s=blocks_s)
            return waited.exception() is None, reply
        except hiredis.ReplyError as exc:
            if str(exc).startswith("NOSCRIPT"):
                return waited.exception() is None, None
            raise self._failed(purpose, exc) from exc
        except OSError as exc:
            raise self._failed(purpose, exc) from exc
        except BaseException:
            # The server still holds both; neither is wanted any more.
            self.drop(purpose)
            raise

    async def run_asking(
        self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        """One script on a slot that is on its way to this node."""
        told = script.arguments_for(await self.connect(purpose), arguments)
        return await self.call_asking(purpose, b"EVAL", script.source, len(keys), *keys, *told)

    async def call_asking(self, purpose: Purpose, *command: Any) -> Any:
        """One command on a slot that is on its way to this node."""
        connection = await self.connect(purpose)
        # One behind the other: the first speaks for the next command only.
        connection.call(b"ASKING")
        try:
            return await connection.call(*command)
        except (OSError, hiredis.ReplyError) as exc:
            raise self._failed(purpose, exc) from exc

    @property
    def idle(self) -> bool:
        """Whether no call is under way, and no connection is being opened for one."""
        opening = self._pending or any(lock.locked() for lock in self._opening.values())
        return not opening and not self._lent and not any(each.busy for each in self._connections.values())

    async def time_ms(self, key: bytes | None = None) -> int:
        """The clock of the server that has this key; without one, of any."""
        seconds, microseconds = await self.call(Purpose.OTHER, b"TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def node_of(self, key: bytes) -> object:
        """Tells the server that has this key, as far as is known, from others."""
        return self

    async def masters(self) -> list[RedisClient]:
        """All servers that have keys."""
        return [self]

    def drop(self, purpose: Purpose) -> None:
        """Close one purpose's connection; the next call opens another."""
        connection = self._connections.pop(purpose, None)
        if connection is not None:
            connection.close()

    def drop_all(self) -> None:
        """Close all connections; the next call opens another."""
        for connection in (*self._connections.values(), *self._spare, *self._lent):
            connection.close()
        self._connections.clear()
        self._spare.clear()

    def close(self) -> None:
        """Close all connections, also those that are being opened, and open none before `reopen`."""
        self._closed = True
        self.drop_all()

    def reopen(self) -> None:
        """As new."""
        self._closed = False

    async def _open(self, kind: type[PipelinedConnection], *, learned: bool = False) -> PipelinedConnection:
        self._must_be_open()
        self._pending += 1
        try:
            connection = await self._reach(kind)
            try:
                if learned:
                    await self._learn(connection)
                self._must_be_open()
            except BaseException:
                connection.close()
                raise
        finally:
            self._pending -= 1
        return connection

    def _must_be_open(self) -> None:
        if self._closed:
            raise Unreachable("the engine is closed")

    async def _reach(self, kind: type[PipelinedConnection]) -> PipelinedConnection:
        """A connection to the server, wherever that is."""
        return await self._connect(kind, self.address)

    async def _learn(self, connection: PipelinedConnection) -> None:
        try:
            await connection.read_epoch()
        except (OSError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    async def _connect(self, kind: type[PipelinedConnection], address: RedisAddress) -> PipelinedConnection:
        try:
            return await kind.connect(address, self._connect_timeout_s, self._reply_timeout_s)
        except (OSError, TimeoutError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    def _failed(self, purpose: Purpose, exc: Exception) -> EngineUnavailable:
        error = translate(exc)
        if isinstance(exc, ConnectionError) and not isinstance(exc, NoReply):
            error = ConnectionLost(str(error))
        if isinstance(exc, OSError):
            self.drop(purpose)
        elif any(word in str(exc) for word in _DEMOTED):
            # A replica stays one, for whoever only reads, too: ask again where the master is.
            self.drop_all()
        return error


def translate(exc: Exception) -> EngineUnavailable:
    """What the caller should know and do."""
    text = str(exc)
    if isinstance(exc, hiredis.ReplyError):
        if text.startswith(("MOVED ", "ASK ")):
            return Redirected(text)
        for word, advice in _NOT_NOW.items():
            if word in text:
                return EngineUnavailable(f"{advice} (Redis says: {text})")
        return ScriptError(f"Redis refused a command: {text}")
    if isinstance(exc, TimeoutError):
        return Unreachable("Redis did not accept a connection in time; is it running and reachable?")
    return Unreachable(f"Redis cannot be reached: {text or type(exc).__name__}; is it running at HOLDFAST_URL?")


def _look_at(future: asyncio.Future[Any]) -> None:
    """Nobody wants its result, nor its error."""
    if not future.cancelled():
        future.exception()


def _constants() -> str:
    """The transition table and the number of lanes as Lua, so that scripts never type them again."""
    moves = (
        f"{state} = {{ {', '.join(f'{target} = true' for target in sorted(targets))} }}"
        for state, targets in MOVES.items()
        if state is not None
    )
    return f"local MOVES = {{ {', '.join(moves)} }}\nlocal LANES = {MAX_TENANTS}"
