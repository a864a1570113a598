"""Pipelined connections to one Redis server, and parsing of `HOLDFAST_URL`.

A connection packs commands in C and returns replies in order. It was measured at a fifth of the cost per command of a
general client, which matters for submit, claim and settle. A timer detects a server that accepts commands but does not
answer, because a stopped process keeps its sockets open: after `SILENT_S` the connection counts as silent and reports
it to its observer, after the reply timeout its calls fail.

URLs of a single server, Sentinel and Cluster:

    redis://[user:password@]host[:port][/db]
    redis+sentinel://[user:password@]host[:port],host[:port],…/service[/db][?sentinel_username=…&sentinel_password=…]
    redis+cluster://[user:password@]host[:port],host[:port],…

`rediss…://` (or `ssl=true`) is TLS, with `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_cert_reqs`. An invalid
URL raises `InvalidOption` that says what to write. The message never repeats the URL, which may contain a password.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import hiredis

from holdfast.errors import InvalidOption

#: Epoch of a server that does not report one.
UNKNOWN_EPOCH: Final = b"1"

#: Errors of such a server: no permission for INFO, or no such command.
_NO_EPOCH: Final = ("NOPERM", "ERR unknown command")

#: A connection whose oldest call has waited this long, and that has received nothing meanwhile, is silent.
SILENT_S: Final = 0.25
#: Longest interval of the check for overdue replies: the connection ends at most this long after a deadline.
_WATCH_INTERVAL_S: Final = 0.5
#: Shortest interval of that check.
_MIN_WATCH_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Address, credentials and TLS of a server."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None


class NoReply(ConnectionError):
    """The server keeps the connection open but does not reply."""


class ConnectionObserver(Protocol):
    """Receives what happens to connections."""

    def on_opened(self, connection: PipelinedConnection) -> None:
        """Called before the first command is sent."""
        ...

    def on_silence(self) -> None:
        """Called at intervals while a connection is silent."""
        ...

    def on_closed(self, connection: PipelinedConnection) -> None: ...


class PipelinedConnection(asyncio.Protocol):
    """Pipelined calls over one socket. Any failure fails all calls in flight with `ConnectionError`."""

    def __init__(
        self, address: RedisAddress, reply_timeout_s: float, observer: ConnectionObserver | None = None
    ) -> None:
        self.address = address
        #: Whether a reply is late. Set by the timer and not derived from the clock: after a callback that blocked the
        #: loop, replies wait in the socket, and asyncio reads those before it calls timers.
        self.silent = False
        self._loop = asyncio.get_running_loop()
        self._reply_timeout_s = reply_timeout_s
        self._observer = observer
        self._reader = hiredis.Reader()
        #: Calls in flight, and when their replies are due.
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._received_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        #: How late a reply is reported, and the callback for it.
        self.late_s = math.inf
        self.on_late: Callable[[], None] = _ignore
        #: Client id on the server, after `identify`.
        self.id: int | None = None
        #: Epoch of the server, after `read_epoch`.
        self.epoch_id = b""

    @classmethod
    async def connect(
        cls,
        address: RedisAddress,
        connect_timeout_s: float,
        reply_timeout_s: float,
        observer: ConnectionObserver | None = None,
    ) -> PipelinedConnection:
        """Connect, authenticate and select, or raise `OSError` / `hiredis.ReplyError`."""
        loop = asyncio.get_running_loop()

        def make() -> PipelinedConnection:
            return cls(address, reply_timeout_s, observer)

        async with asyncio.timeout(connect_timeout_s):
            if address.path:
                opening = loop.create_unix_connection(make, address.path)
            else:
                server_name = address.host if address.tls else None
                opening = loop.create_connection(
                    make,
                    address.host,
                    address.port,
                    ssl=address.tls,
                    server_hostname=server_name,
                )
            _, connection = await opening
            try:
                await connection._authenticate(address)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _authenticate(self, address: RedisAddress) -> None:
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
        self._waiting.append((future, self._loop.time() + blocks_s))
        self._transport.write(hiredis.pack_command(command))
        if self._watch is None:
            self._watch = self._loop.call_later(SILENT_S, self._check_replies)
        return future

    async def identify(self) -> None:
        """Read the client id from the server; it stays None without permission."""
        try:
            self.id = await self.call(b"CLIENT", b"ID")
        except hiredis.ReplyError:
            self.id = None

    async def read_epoch(self) -> None:
        """Read the epoch, which is the replication id of the master.

        It changes with every restart and fail-over: a server that starts or is promoted takes a new replication id. A
        replica has no epoch.
        """
        try:
            info: bytes = await self.call(b"INFO", b"replication")
        except hiredis.ReplyError as exc:
            if not str(exc).startswith(_NO_EPOCH):
                raise
            self.epoch_id = UNKNOWN_EPOCH
            return
        fields = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        self.epoch_id = fields.get(b"master_replid", UNKNOWN_EPOCH) if fields.get(b"role") == b"master" else b"replica"

    def close(self) -> None:
        """Close immediately. Calls in flight fail."""
        self.silent = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if self._observer is not None:
            self._observer.on_opened(self)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        self.silent = False
        if self._waiting and self._received_at > self._waiting[0][1] + self.late_s:
            self.on_late()
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
        if self._observer is not None:
            self._observer.on_closed(self)

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
                # Retrieved, so that asyncio does not log it if the caller no longer waits.
                future.exception()

    def _check_replies(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        now, due_at = self._loop.time(), self._waiting[0][1]
        if now > due_at + self._reply_timeout_s:
            self._fail(NoReply(f"no reply within {self._reply_timeout_s:g} s"))
            self.close()
            return
        silent_at = max(due_at, self._received_at) + SILENT_S
        next_s = min(max(silent_at - now, _MIN_WATCH_S), _WATCH_INTERVAL_S)
        if now >= silent_at and self._observer is not None:
            self.silent, next_s = True, _WATCH_INTERVAL_S
            self._observer.on_silence()
        self._watch = self._loop.call_later(next_s, self._check_replies)


def _ignore() -> None:
    pass


class PubSubConnection(PipelinedConnection):
    """A connection in subscriber mode. Calls back with the channel of each message."""

    on_message: Callable[[bytes], None]

    def send_nowait(self, *command: Any) -> None:
        """Send an unsubscribe without waiting for the reply."""
        if self._transport is not None:
            self._transport.write(hiredis.pack_command(command))

    def _deliver(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == b"message":
            self.on_message(reply[1])
        elif not (isinstance(reply, list) and reply[0] == b"unsubscribe"):
            super()._deliver(reply)


_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_CLUSTER: Final = ("redis+cluster", "rediss+cluster")
_SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


@dataclass(frozen=True, slots=True)
class SentinelAddresses:
    """Addresses of sentinels, name of the service, and credentials of the master."""

    addresses: tuple[RedisAddress, ...]
    service: str
    master: RedisAddress


@dataclass(frozen=True, slots=True)
class ClusterSeeds:
    """Some nodes of a Cluster, from which the others are discovered."""

    addresses: tuple[RedisAddress, ...]


def parse_url(url: str) -> RedisAddress | SentinelAddresses | ClusterSeeds:
    """Parse `HOLDFAST_URL`."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        # Not chained: the original error quotes the URL.
        raise InvalidOption(
            "HOLDFAST_URL is not valid; put IPv6 addresses in [brackets], and write special characters of a password "
            "as %XX"
        ) from None
    if parts.fragment:
        raise InvalidOption("HOLDFAST_URL: # is not allowed; write it as %23 in a password")
    scheme = parts.scheme
    common = _common(parts, query)
    if scheme in _SENTINEL:
        found: RedisAddress | SentinelAddresses | ClusterSeeds = _sentinels(parts, query, common)
    elif scheme in _CLUSTER:
        found = _seeds(parts, query, common)
    else:
        found = _single(parts, query, common)
    if query:
        raise InvalidOption(f"HOLDFAST_URL: unknown parameters {', '.join(sorted(query))}")
    return found


def is_cluster(url: str) -> bool:
    """Whether the URL is of a Cluster, where key names have a hash tag."""
    return url.partition("://")[0] in _CLUSTER


def _common(parts: SplitResult, query: dict[str, str]) -> RedisAddress:
    """User, password and TLS, which are the same for all hosts."""
    credentials, at, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    use_ssl = query.pop("ssl", "").lower()
    if use_ssl not in ("", "true", "false"):
        raise InvalidOption("HOLDFAST_URL: ssl must be true or false")
    tls = _tls(query) if parts.scheme.startswith("rediss") or use_ssl == "true" else None
    if tls is None and (given := [name for name in _TLS_OPTIONS if name in query]):
        secure = parts.scheme.replace("redis", "rediss", 1)
        raise InvalidOption(f"HOLDFAST_URL: {', '.join(given)} require TLS; start the URL with {secure}://")
    return RedisAddress(
        username=unquote(user) if at and user else None, password=unquote(password) if password else None, tls=tls
    )


def _single(parts: SplitResult, query: dict[str, str], common: RedisAddress) -> RedisAddress:
    hosts = _hosts(parts, _PORT) if parts.netloc.rpartition("@")[2] else [("127.0.0.1", _PORT)]
    if len(hosts) > 1:
        raise InvalidOption(
            f"HOLDFAST_URL: {parts.scheme}:// accepts one host; for several use redis+sentinel://HOSTS/SERVICE or "
            "redis+cluster://HOSTS"
        )
    (host, port), *_ = hosts
    return replace(common, host=host, port=port, db=_db(query.pop("db", parts.path.strip("/"))))


def _sentinels(parts: SplitResult, query: dict[str, str], common: RedisAddress) -> SentinelAddresses:
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise InvalidOption(
            f"HOLDFAST_URL: the service name is missing; write it after the hosts: "
            f"{parts.scheme}://HOST:{_SENTINEL_PORT},HOST:{_SENTINEL_PORT}/SERVICE"
        )
    user, password = query.pop("sentinel_username", None), query.pop("sentinel_password", None)
    if user and not password:
        raise InvalidOption("HOLDFAST_URL: sentinel_username requires sentinel_password")
    sentinel = RedisAddress(username=user or None, password=password or None, tls=common.tls)
    return SentinelAddresses(
        tuple(replace(sentinel, host=host, port=port) for host, port in _hosts(parts, _SENTINEL_PORT)),
        unquote(service),
        replace(common, db=_db(query.pop("db", db))),
    )


def _seeds(parts: SplitResult, query: dict[str, str], common: RedisAddress) -> ClusterSeeds:
    if _db(query.pop("db", parts.path.strip("/"))):
        raise InvalidOption("HOLDFAST_URL: a Redis Cluster has only database 0; use a namespace to share it")
    return ClusterSeeds(tuple(replace(common, host=host, port=port) for host, port in _hosts(parts, _PORT)))


def _hosts(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """The hosts of a URL: `host:port,[::1]:port,host`."""
    hosts = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        host, port = split_host_port(address)
        if not host:
            raise InvalidOption(f"HOLDFAST_URL: a host is missing in {parts.scheme}://HOST:PORT,HOST:PORT")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOption(f"HOLDFAST_URL: ports must be numbers from 1 to 65535 in {parts.scheme}://HOST:PORT")
        hosts.append((host, int(port) if port else default_port))
    return hosts


def split_host_port(address: str) -> tuple[str, str]:
    """Split `host:port`, `[host]:port`, or IPv6 as Redis writes it, `a::b:port`."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        return host, port.removeprefix(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else (address, "")


def _db(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise InvalidOption("HOLDFAST_URL: the database (end of the path) must be a number")
    return int(text or 0)


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.pop("ssl_ca_certs", None))
        certificate, key = query.pop("ssl_certfile", None), query.pop("ssl_keyfile", None)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as exc:
        raise InvalidOption(f"HOLDFAST_URL: cannot use a file of ssl_…: {exc}") from exc
    if query.pop("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
