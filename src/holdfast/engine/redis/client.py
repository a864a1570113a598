"""Connections, scripts and errors: what lies between the engine's verbs and the socket.

Each purpose has a connection of its own, opened when first needed and again after a failure, so that a
blocking wait never stands before a settle. Driver errors are translated here, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

from holdfast.core.states import MOVES
from holdfast.engine.port import MAX_TENANTS
from holdfast.engine.redis.connection import Address, Connection, NoReply, Subscription
from holdfast.errors import EngineRefused, EngineUnavailable, InvalidOption


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


class ScriptError(EngineRefused):
    """A command or script failed for a reason that is not the server's state of health."""


class ConnectionLost(EngineUnavailable):
    """The connection broke while a call was on its way; nobody knows whether it was applied."""


class Script:
    """One Lua file, with the common parts and the state table before it."""

    def __init__(self, name: str) -> None:
        folder = files("holdfast.engine.redis") / "lua"
        parts = [(folder / f"{part}.lua").read_text() for part in ("_common", "_lanes", name)]
        self.name = name
        self.source = "\n".join([_constants(), *parts]).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class Client:
    """A small set of connections to one Redis."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[Address]],
        connect_timeout_s: float,
        reply_timeout_s: float,
    ) -> None:
        self._locate = locate
        self._connect_timeout_s = connect_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._connections: dict[Purpose, Connection] = {}
        self._opening: dict[Purpose, asyncio.Lock] = {}
        #: For calls that block: at rest, and in use.
        self._spare: list[Connection] = []
        self._lent: set[Connection] = set()

    async def connect(self, purpose: Purpose) -> Connection:
        """The purpose's connection, opened anew if it is not usable."""
        connection = self._connections.get(purpose)
        if connection is not None and connection.usable:
            return connection
        async with self._opening.setdefault(purpose, asyncio.Lock()):
            connection = self._connections.get(purpose)
            if connection is None or not connection.usable:
                connection = await self._open(Connection)
                self._connections[purpose] = connection
            return connection

    async def subscription(self, on_message: Callable[[bytes], None]) -> Subscription:
        """A connection of its own that tells the callback on which channel something was said."""
        connection = await self._open(Subscription)
        assert isinstance(connection, Subscription)
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
        try:
            return await connection.call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
        except hiredis.ReplyError as exc:
            if not str(exc).startswith("NOSCRIPT"):
                raise self._failed(purpose, exc) from exc
        except OSError as exc:
            raise self._failed(purpose, exc) from exc
        await self.call(purpose, b"SCRIPT", b"LOAD", script.source)
        return await self.call(purpose, b"EVALSHA", script.sha, len(keys), *keys, *arguments)

    async def call_apart(self, *command: Any, blocks_s: float) -> Any:
        """One command that blocks, on a connection that nobody else uses meanwhile."""
        while self._spare and not self._spare[-1].usable:
            self._spare.pop()
        connection = self._spare.pop() if self._spare else await self._open(Connection)
        self._lent.add(connection)
        try:
            reply = await connection.call(*command, blocks_s=blocks_s)
        except (OSError, hiredis.ReplyError) as exc:
            connection.close()
            raise translate(exc) from exc
        except BaseException:
            # The server still holds this call.
            connection.close()
            raise
        finally:
            self._lent.discard(connection)
        self._spare.append(connection)
        return reply

    def drop(self, purpose: Purpose) -> None:
        """Close one purpose's connection; the next call opens another."""
        connection = self._connections.pop(purpose, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._connections.values(), *self._spare, *self._lent):
            connection.close()
        self._connections.clear()
        self._spare.clear()

    async def _open(self, kind: type[Connection]) -> Connection:
        try:
            address = await self._locate()
            return await kind.connect(address, self._connect_timeout_s, self._reply_timeout_s)
        except (OSError, TimeoutError, hiredis.ReplyError) as exc:
            raise translate(exc) from exc

    def _failed(self, purpose: Purpose, exc: Exception) -> EngineUnavailable:
        error = translate(exc)
        if isinstance(exc, ConnectionError) and not isinstance(exc, NoReply):
            error = ConnectionLost(str(error))
        if isinstance(exc, OSError) or "READONLY" in str(exc):
            # A replica stays one: ask again where the master is.
            self.drop(purpose)
        return error


def translate(exc: Exception) -> EngineUnavailable:
    """What the caller should know and do."""
    text = str(exc)
    if isinstance(exc, hiredis.ReplyError):
        for word, advice in _NOT_NOW.items():
            if word in text:
                return EngineUnavailable(f"{advice} (Redis says: {text})")
        return ScriptError(f"Redis refused a command: {text}")
    if isinstance(exc, TimeoutError):
        return EngineUnavailable("Redis did not accept a connection in time; is it running and reachable?")
    return EngineUnavailable(f"Redis cannot be reached: {text or type(exc).__name__}; is it running at HOLDFAST_URL?")


def parse_url(url: str) -> Address:
    """`redis://user:password@host:port/db`, or `rediss://…?ssl_ca_certs=…` for TLS."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    try:
        port = parts.port or 6379
        db = int(query.pop("db", parts.path.strip("/") or "0"))
    except ValueError as exc:
        raise InvalidOption(f"HOLDFAST_URL: port and database must be numbers in {parts.scheme}://…") from exc
    tls = _tls(query) if parts.scheme == "rediss" else None
    if query:
        raise InvalidOption(f"HOLDFAST_URL: unknown parameters {', '.join(sorted(query))}")
    return Address(
        host=parts.hostname or "127.0.0.1",
        port=port,
        db=db,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=tls,
    )


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=query.pop("ssl_ca_certs", None))
    certificate = query.pop("ssl_certfile", None)
    if certificate:
        context.load_cert_chain(certificate, query.pop("ssl_keyfile", None))
    if query.pop("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _constants() -> str:
    """The transition table and the number of lanes as Lua, so that scripts never type them again."""
    moves = (
        f"{state} = {{ {', '.join(f'{target} = true' for target in sorted(targets))} }}"
        for state, targets in MOVES.items()
        if state is not None
    )
    return f"local MOVES = {{ {', '.join(moves)} }}\nlocal LANES = {MAX_TENANTS}"
