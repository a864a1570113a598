"""HOLDFAST_URL of a Redis: one server, Sentinel or Cluster.

    redis://[user:password@]host[:port][/db]
    redis+sentinel://[user:password@]host[:port],host[:port],…/service[/db][?sentinel_username=…&sentinel_password=…]
    redis+cluster://[user:password@]host[:port],host[:port],…

`rediss…://` (or `ssl=true`) is TLS, with `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_cert_reqs`. A mistake
is an `InvalidOption` that says what to write, and never repeats the URL: it may hold a password.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from holdfast.engine.redis.connection import Address
from holdfast.errors import InvalidOption

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_CLUSTER: Final = ("redis+cluster", "rediss+cluster")
_SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Who knows where the master is, what it is called, and how to talk to it once its place is known."""

    addresses: tuple[Address, ...]
    service: str
    master: Address


@dataclass(frozen=True, slots=True)
class Seeds:
    """Some nodes of a Cluster; the others are learned from them."""

    addresses: tuple[Address, ...]


def parse_url(url: str) -> Address | Sentinels | Seeds:
    """Where HOLDFAST_URL points to."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        # Not chained: the reason repeats what was given.
        raise InvalidOption(
            "HOLDFAST_URL cannot be read; IPv6 addresses go in [brackets], and special characters of a password are "
            "written as %XX"
        ) from None
    if parts.fragment:
        raise InvalidOption("HOLDFAST_URL: # is not allowed; in a password write it as %23")
    scheme = parts.scheme
    common = _common(parts, query)
    if scheme in _SENTINEL:
        found: Address | Sentinels | Seeds = _sentinels(parts, query, common)
    elif scheme in _CLUSTER:
        found = _seeds(parts, query, common)
    else:
        found = _single(parts, query, common)
    if query:
        raise InvalidOption(f"HOLDFAST_URL: unknown parameters {', '.join(sorted(query))}")
    return found


def is_cluster(url: str) -> bool:
    """Whether every queue's names carry a hash tag there."""
    return url.partition("://")[0] in _CLUSTER


def _common(parts: SplitResult, query: dict[str, str]) -> Address:
    """User, password and TLS, which are the same for all hosts."""
    credentials, at, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    wanted = query.pop("ssl", "").lower()
    if wanted not in ("", "true", "false"):
        raise InvalidOption("HOLDFAST_URL: ssl is true or false")
    tls = _tls(query) if parts.scheme.startswith("rediss") or wanted == "true" else None
    if tls is None and (given := [name for name in _TLS_OPTIONS if name in query]):
        secure = parts.scheme.replace("redis", "rediss", 1)
        raise InvalidOption(f"HOLDFAST_URL: {', '.join(given)} are for TLS; begin the URL with {secure}://")
    return Address(
        username=unquote(user) if at and user else None, password=unquote(password) if password else None, tls=tls
    )


def _single(parts: SplitResult, query: dict[str, str], common: Address) -> Address:
    hosts = _hosts(parts, _PORT) if parts.netloc.rpartition("@")[2] else [("127.0.0.1", _PORT)]
    if len(hosts) > 1:
        raise InvalidOption(
            f"HOLDFAST_URL: {parts.scheme}:// has one host; several are redis+sentinel://HOSTS/SERVICE or "
            "redis+cluster://HOSTS"
        )
    (host, port), *_ = hosts
    return replace(common, host=host, port=port, db=_db(query.pop("db", parts.path.strip("/"))))


def _sentinels(parts: SplitResult, query: dict[str, str], common: Address) -> Sentinels:
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise InvalidOption(
            f"HOLDFAST_URL: the name of the service that the sentinels watch is missing; write it after the hosts: "
            f"{parts.scheme}://HOST:{_SENTINEL_PORT},HOST:{_SENTINEL_PORT}/SERVICE"
        )
    user, password = query.pop("sentinel_username", None), query.pop("sentinel_password", None)
    if user and not password:
        raise InvalidOption("HOLDFAST_URL: sentinel_username needs a sentinel_password")
    sentinel = Address(username=user or None, password=password or None, tls=common.tls)
    return Sentinels(
        tuple(replace(sentinel, host=host, port=port) for host, port in _hosts(parts, _SENTINEL_PORT)),
        unquote(service),
        replace(common, db=_db(query.pop("db", db))),
    )


def _seeds(parts: SplitResult, query: dict[str, str], common: Address) -> Seeds:
    if _db(query.pop("db", parts.path.strip("/"))):
        raise InvalidOption("HOLDFAST_URL: a Redis Cluster has database 0 only; use a namespace to share it")
    return Seeds(tuple(replace(common, host=host, port=port) for host, port in _hosts(parts, _PORT)))


def _hosts(parts: SplitResult, usual_port: int) -> list[tuple[str, int]]:
    """`host:port,[::1]:port,host` of a URL."""
    hosts = []
    for place in parts.netloc.rpartition("@")[2].split(","):
        host, port = split_place(place)
        if not host:
            raise InvalidOption(f"HOLDFAST_URL: a host is missing in {parts.scheme}://HOST:PORT,HOST:PORT")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOption(f"HOLDFAST_URL: ports must be numbers from 1 to 65535 in {parts.scheme}://HOST:PORT")
        hosts.append((host, int(port) if port else usual_port))
    return hosts


def split_place(place: str) -> tuple[str, str]:
    """Host and port of `host:port`, `[host]:port`, or, as Redis writes IPv6, `a::b:port`."""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        return host, port.removeprefix(":")
    host, colon, port = place.rpartition(":")
    return (host, port) if colon else (place, "")


def _db(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise InvalidOption("HOLDFAST_URL: the database, last in the path, must be a number")
    return int(text or 0)


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.pop("ssl_ca_certs", None))
        certificate, key = query.pop("ssl_certfile", None), query.pop("ssl_keyfile", None)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as exc:
        raise InvalidOption(f"HOLDFAST_URL: a file that ssl_… names cannot be used: {exc}") from exc
    if query.pop("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
