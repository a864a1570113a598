"""Redis client of the engine: connections by purpose, scripts and error translation.

Each purpose has its own connection, opened on first use and again after a failure, so that a blocking wait never delays
a settle. Driver errors are translated here.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
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
    """Use of a connection: calls of one purpose do not wait for those of another."""

    SUBMIT = "submit"
    CLAIM = "claim"
    SETTLE = "settle"
    WAIT = "wait"
    LISTEN = "listen"
    OTHER = "other"


#: Fragments of Redis errors that mean unavailable, and what to do.
_UNAVAILABLE: Final[Mapping[str, str]] = {
    "OOM ": "Redis is full (maxmemory); free memory or raise the limit. Accepted jobs are kept and still run",
    "READONLY": "this Redis is a read-only replica; connect to the master",
    "LOADING": "Redis is still loading its data; retry soon",
    "MASTERDOWN": "this replica has lost its master",
    "CLUSTERDOWN": "the Redis Cluster is down",
    "TRYAGAIN": "the Redis Cluster is moving the queue's slot; retry soon",
    "BUSY ": "Redis is busy running another script",
    "MISCONF": "Redis cannot write to its disk and refuses writes; see its log",
    "NOREPLICAS": "Redis has too few replicas to accept writes (min-replicas-to-write)",
    "NOAUTH": "Redis requires a password; put it in the URL",
    "WRONGPASS": "Redis refuses this user name or password",
    "NOPERM": "the Redis user lacks permissions for holdfast's commands or keys",
    "invalid username-password": "Redis refuses this user name or password",
    "exhausted the last possible ID": "a program has written the highest possible id to a stream of the queue; "
    "delete the stream when it is empty, it is created again",
    "max number of clients": "Redis has no room for another connection (maxclients)",
}


#: Purposes whose connections read the epoch of the server.
_EPOCH_AWARE: Final = frozenset({Purpose.SUBMIT, Purpose.OTHER})
#: Scripts that receive the epoch, and the index of that argument; left alone if it is empty.
_EPOCH_ARGUMENT: Final[Mapping[str, int]] = {"submit": 6}

#: Files that scripts share, in this order; each may use what is before it.
_SHARED: Final = ("_prelude", "_lanes")
#: The names that a statement at the top level of a shared file defines.
_defines: Final = re.compile(r"local (?:function )?(\w+(?:, \w+)*)").match
_words: Final = re.compile(r"\w+").findall
_comments: Final = re.compile(r"(?m)^\s*--.*$")

#: The error of a full server, which refuses submissions only: leases are renewed.
_FULL: Final = "OOM "

#: Errors of a server that is no longer the master.
_DEMOTED: Final = ("READONLY", "MASTERDOWN")


class ScriptError(EngineRefused):
    """A command or script failed for a reason other than the health of the server."""

    @property
    def is_wrong_type(self) -> bool:
        """Whether a key has another type: another program has replaced it."""
        return "WRONGTYPE" in str(self)


class Redirected(ScriptError):
    """Another Cluster node has the slot (`MOVED`), or has the migrated key (`ASK`). Nothing was applied."""

    def __init__(self, text: str) -> None:
        super().__init__(f"this Redis is a node of a Cluster; start the URL with redis+cluster:// ({text})")
        kind, _, self.address = text.split(" ")[:3]
        self.is_ask = kind == "ASK"


class Unreachable(EngineUnavailable):
    """The server did not answer at all. Another call to it would wait as long again."""


class ConnectionLost(Unreachable):
    """The connection broke during a call. It is unknown whether the call was applied."""


class Script:
    """A Lua script: what it uses of the constants and the shared files, and the file itself."""

    def __init__(self, name: str) -> None:
        folder = files("holdfast.engine.redis") / "lua"
        own = (folder / f"{name}.lua").read_text()
        shared = [_constants(), *((folder / f"{part}.lua").read_text() for part in _SHARED)]
        self.name = name
        self.source = "\n".join([*_used_statements(own, shared), own]).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
        self._epoch_at = _EPOCH_ARGUMENT.get(name)

    def arguments_for(self, connection: PipelinedConnection, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments with the epoch of this connection filled in."""
        at = self._epoch_at
        if at is None or not arguments[at]:
            return arguments
        return [*arguments[:at], connection.epoch_id, *arguments[at + 1 :]]


class RedisClient:
    """Connections to one Redis, one per purpose."""

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
        #: Number of connections being opened.
        self._pending = 0
        self._closed = False
        #: A reply this late counts as an interruption.
        self.late_s = math.inf
        self._interruptions = 0

    async def connect(self, purpose: Purpose) -> PipelinedConnection:
        """The connection of the purpose, reopened if it is not usable."""
        connection = self._connections.get(purpose)
        if connection is not None and connection.usable:
            return connection
        async with self._opening.setdefault(purpose, asyncio.Lock()):
            connection = self._connections.get(purpose)
            if connection is None or not connection.usable:
                connection = await self._open(PipelinedConnection, epoch_aware=purpose in _EPOCH_AWARE)
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
            raise self._on_error(purpose, exc) from exc

    async def run(self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Run one script. Loads it if the server does not have it."""
        connection = self._connections.get(purpose)
        if connection is None or not connection.usable:
            connection = await self.connect(purpose)
        arguments = script.arguments_for(connection, arguments)
        try:
            return await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
        except hiredis.ReplyError as exc:
            if not str(exc).startswith("NOSCRIPT"):
                raise self._on_error(purpose, exc) from exc
        except OSError as exc:
            raise self._on_error(purpose, exc) from exc
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
        waited = connection.call(*read, blocks_s=blocks_s)
        waited.add_done_callback(_retrieve_exception)
        try:
            reply = await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments, blocks_s=blocks_s)
            return waited.exception() is None, reply
        except hiredis.ReplyError as exc:
            if str(exc).startswith("NOSCRIPT"):
                return waited.exception() is None, None
            raise self._on_error(purpose, exc) from exc
        except OSError as exc:
            raise self._on_error(purpose, exc) from exc
        except BaseException:
            # The server still holds both calls, whose results are not needed.
            self.drop(purpose)
            raise

    async def run_asking(
        self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        """Run one script on a slot that is being migrated to this node."""
        arguments = script.arguments_for(await self.connect(purpose), arguments)
        return await self.call_asking(purpose, b"EVAL", script.source, len(keys), *keys, *arguments)

    async def call_asking(self, purpose: Purpose, *command: Any) -> Any:
        """Send one command on a slot that is being migrated to this node."""
        connection = await self.connect(purpose)
        # Pipelined: ASKING applies to the next command only.
        connection.call(b"ASKING")
        try:
            return await connection.call(*command)
        except (OSError, hiredis.ReplyError) as exc:
            raise self._on_error(purpose, exc) from exc

    @property
    def idle(self) -> bool:
        """Whether no call is in flight and no connection is being opened."""
        opening = self._pending or any(lock.locked() for lock in self._opening.values())
        return not opening and not self._in_use and not any(each.busy for each in self._connections.values())

    async def time_ms(self, key: bytes | None = None) -> int:
        """Clock of the server that has this key; without a key, of any server."""
        seconds, microseconds = await self.call(Purpose.OTHER, b"TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def node_of(self, key: bytes) -> object:
        """An object that identifies the server of this key, as far as known."""
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
        for connection in (*self._connections.values(), *self._spare, *self._in_use):
            connection.close()
        self._connections.clear()
        self._spare.clear()

    def close(self) -> None:
        """Close all connections, also those being opened. Opens none before `reopen`."""
        self._closed = True
        self.drop_all()

    def reopen(self) -> None:
        """Allow connections again after `close`."""
        self._closed = False

    async def _open(self, kind: type[PipelinedConnection], *, epoch_aware: bool = False) -> PipelinedConnection:
        self._require_open()
        self._pending += 1
        try:
            connection = await self._reach(kind)
            try:
                if epoch_aware:
                    await self._read_epoch(connection)
                self._require_open()
            except BaseException:
                connection.close()
                raise
            connection.late_s, connection.on_late = self.late_s, self._on_interruption
        finally:
            self._pending -= 1
        return connection

    def _require_open(self) -> None:
        if self._closed:
            raise Unreachable("the engine is closed")

    async def _reach(self, kind: type[PipelinedConnection]) -> PipelinedConnection:
        """Open a connection to the server; subclasses find its address first."""
        return await self._connect(kind, self.address)

    async def _read_epoch(self, connection: PipelinedConnection) -> None:
        try:
            await connection.read_epoch()
        except (OSError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    async def _connect(self, kind: type[PipelinedConnection], address: RedisAddress) -> PipelinedConnection:
        try:
            return await kind.connect(address, self._connect_timeout_s, self._reply_timeout_s)
        except (OSError, TimeoutError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    def _on_interruption(self) -> None:
        self._interruptions += 1

    def _on_error(self, purpose: Purpose, exc: Exception) -> EngineUnavailable:
        error = translate(exc)
        if not isinstance(error, ScriptError) and _FULL not in str(exc):
            self._on_interruption()
        if isinstance(exc, ConnectionError) and not isinstance(exc, NoReply):
            error = ConnectionLost(str(error))
        if isinstance(exc, OSError):
            self.drop(purpose)
        elif any(word in str(exc) for word in _DEMOTED):
            # The server is now a replica: drop all connections, also those for reads, to find the master again.
            self.drop_all()
        return error


def translate(exc: Exception) -> EngineUnavailable:
    """Convert a driver error."""
    text = str(exc)
    if isinstance(exc, hiredis.ReplyError):
        if text.startswith(("MOVED ", "ASK ")):
            return Redirected(text)
        for word, advice in _UNAVAILABLE.items():
            if word in text:
                return EngineUnavailable(f"{advice} (Redis says: {text})")
        return ScriptError(f"Redis refused a command: {text}")
    if isinstance(exc, TimeoutError):
        return Unreachable("Redis did not accept a connection in time; check that it runs and is reachable")
    return Unreachable(f"cannot reach Redis: {text or type(exc).__name__}; check that it runs at HOLDFAST_URL")


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def _used_statements(own: str, shared: Sequence[str]) -> list[str]:
    """The statements of shared files that a script uses, directly or through others.

    Redis runs all of a script for each call: every function and table that it does not need takes time.
    """
    statements: list[str] = []
    for line in filter(None, _comments.sub("", "\n".join(shared)).splitlines()):
        if line.startswith("local "):
            statements.append(line)
        else:
            statements[-1] += f"\n{line}"
    words, used = set(_words(_comments.sub("", own))), []
    for statement in reversed(statements):
        names = _defines(statement)
        assert names is not None
        if words.intersection(_words(names[1])):
            words.update(_words(statement))
            used.append(statement)
    return used[::-1]


def _constants() -> str:
    """The transition table and the number of lanes as Lua, so that scripts do not repeat them."""
    moves = (
        f"{state} = {{ {', '.join(f'{target} = true' for target in sorted(targets))} }}"
        for state, targets in MOVES.items()
        if state is not None
    )
    return f"local MOVES = {{ {', '.join(moves)} }}\nlocal LANES = {MAX_TENANTS}"
