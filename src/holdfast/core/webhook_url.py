"""Which addresses a webhook may have, and how its secrets are written. Pure: nothing is looked up here.

A webhook's address comes from whoever submits a job, and the request is made from inside our own network. So every
address that is not of the public internet is refused, unless an operator allows it (`webhook_allow`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from holdfast.errors import InvalidOption

#: Told by jobs that only subscribers want to hear of: in the place of an address of their own.
ANY_SUBSCRIBER: Final = "*"

URL_LIMIT: Final = 1_000
SECRET_PREFIX: Final = "whsec_"
#: What the Standard Webhooks convention asks for, in bytes.
_SECRET_BYTES: Final = range(24, 65)

Address = IPv4Address | IPv6Address

#: The only part of IPv6 that is routed.
_IPV6_GLOBAL: Final = IPv6Network("2000::/3")
#: IPv4 in IPv6: what is behind them is judged as IPv4.
_NAT64: Final = IPv6Network("64:ff9b::/96")
#: Public by their numbers, but answered inside a cloud's own network, or not routed at all.
_NOT_PUBLIC: Final = (IPv4Network("168.63.129.16/32"), IPv4Network("192.88.99.0/24"), IPv4Network("192.0.0.0/24"))

#: RFC 1123, and underscores, which some internal names have.
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class AllowList:
    """What an operator allows beside the public internet: networks, and hosts by their exact names."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowList:
        """`10.0.0.0/8`, `127.0.0.1`, `hooks.internal`; raises `InvalidOption`."""
        networks: list[IPv4Network | IPv6Network] = []
        hosts: set[str] = set()
        for entry in entries:
            try:
                networks.append(ip_network(entry, strict=False))
            except ValueError:
                hosts.add(_host_name(entry.lower().rstrip("."), entry))
        return cls(tuple(networks), frozenset(hosts))

    def allow_host(self, host: str) -> bool:
        return host in self.hosts

    def allow_address(self, address: Address) -> bool:
        return any(found in network for found in (address, _unwrapped(address)) for network in self.networks)


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A checked address of a webhook."""

    url: str
    scheme: str
    #: In lower case, without a final dot; of an IPv6 address without brackets.
    host: str
    port: int
    #: Path and query, as they go on the wire.
    path: str

    @property
    def redacted(self) -> str:
        """For logs and errors: paths and queries of webhooks often hold a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return f"{self.scheme}://{host}" if self.port == usual else f"{self.scheme}://{host}:{self.port}"


def check_target(url: object, exceptions: AllowList) -> WebhookTarget:
    """The address, if it can be one of a webhook as far as that shows without a look-up; `InvalidOption` says why not.

    The message never repeats the address: it may hold a secret.
    """
    if not isinstance(url, str) or not url:
        raise InvalidOption("webhook must be an address such as https://example.org/hook")
    if len(url) > URL_LIMIT:
        raise InvalidOption(f"webhook: an address of {len(url)} characters, the limit is {URL_LIMIT}")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise InvalidOption(
            "webhook: an address has only ASCII characters and no blanks, backslashes or control characters; "
            "write others as %XX, a host's as xn--…"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidOption("webhook: host or port of the address cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise InvalidOption("webhook: an address begins with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise InvalidOption(
            "webhook: no user and password in the address; deliveries are signed, check the signature instead"
        )
    if port == 0 or parts.netloc.endswith(":"):
        raise InvalidOption("webhook: host or port of the address cannot be read")
    host = _checked_host(parts.hostname or "", bracketed="[" in parts.netloc)
    address = literal_address(host)
    if address is not None:
        check_address(host, address, exceptions)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(url, parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)


def literal_address(host: str) -> Address | None:
    """The address that a host is, if it is no name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def check_address(host: str, address: Address, exceptions: AllowList) -> None:
    """`InvalidOption` if a request to this host must not be made to this address."""
    if exceptions.allow_host(host) or exceptions.allow_address(address):
        return
    if not is_public(address):
        raise InvalidOption(
            f"webhook: {host} is not on the public internet; an operator can allow it by HOLDFAST_WEBHOOK_ALLOW"
        )


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet: one host, routed, and not a stand-in for another network."""
    address = _unwrapped(address)
    if isinstance(address, IPv6Address):
        if address not in _IPV6_GLOBAL or address.scope_id is not None:
            return False
        # Tunnels: they lead to the IPv4 address inside.
        inner = address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return False
    elif any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """`whsec_…`, several with blanks between them while one is being replaced; raises `InvalidOption`."""
    return tuple(_secret(part) for part in text.split())


def _secret(text: str) -> bytes:
    wrong = InvalidOption(
        f"a webhook's secret is {SECRET_PREFIX} and the base64 of {_SECRET_BYTES[0]} to {_SECRET_BYTES[-1]} random "
        "bytes; "
        "make one: python -c \"import base64,os; print('whsec_' + base64.b64encode(os.urandom(32)).decode())\""
    )
    if not text.startswith(SECRET_PREFIX):
        raise wrong
    try:
        secret = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        # Not chained: the exception may hold a piece of it.
        raise wrong from None
    if len(secret) not in _SECRET_BYTES:
        raise wrong
    return secret


def _unwrapped(address: Address) -> Address:
    """IPv4 written as IPv6 is IPv4."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _checked_host(host: str, *, bracketed: bool) -> str:
    host = host.lower()
    if bracketed:
        if not isinstance(literal_address(host), IPv6Address):
            raise InvalidOption("webhook: host or port of the address cannot be read")
        return host
    return _host_name(host.rstrip("."), host)


def _host_name(host: str, given: str) -> str:
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidOption(f"webhook: {given!r} is no host name and no address")
    # 0x7f.1 and 2130706433 are 127.0.0.1 to a resolver, and nothing that anybody means.
    if _NUMBER.fullmatch(labels[-1]) and literal_address(host) is None:
        raise InvalidOption(f"webhook: {given!r} is no host name and no address; write it as 192.0.2.1")
    return host
