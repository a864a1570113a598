"""Checks of webhook URLs and addresses, and the format of webhook secrets. Pure: resolves no names.

The submitter of a job chooses its webhook's URL, and the request is made from inside the operator's network. So every
address that is not on the public internet is refused, unless the operator allows it (`webhook_allow`).
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

#: Stored instead of a URL in jobs without their own URL that have subscribers.
ANY_SUBSCRIBER: Final = "*"

URL_LIMIT: Final = 1_000
SECRET_PREFIX: Final = "whsec_"
#: Length that the Standard Webhooks convention requires.
_SECRET_BYTES: Final = range(24, 65)

Address = IPv4Address | IPv6Address

#: The only part of IPv6 that is routed.
_IPV6_GLOBAL: Final = IPv6Network("2000::/3")
#: IPv4 in IPv6: the embedded address is checked as IPv4.
_NAT64: Final = IPv6Network("64:ff9b::/96")
#: Global by number, but answered inside a cloud's network, or not routed at all.
_NOT_PUBLIC: Final = (IPv4Network("168.63.129.16/32"), IPv4Network("192.88.99.0/24"), IPv4Network("192.0.0.0/24"))

#: RFC 1123, plus underscores, which some internal names have.
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class AllowList:
    """What an operator allows besides the public internet: networks, and hosts by exact name."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowList:
        """Parse entries like `10.0.0.0/8`, `127.0.0.1` and `hooks.internal`. Raises `InvalidOption`."""
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
        return any(candidate in network for candidate in (address, _unwrap(address)) for network in self.networks)


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A checked webhook URL."""

    url: str
    scheme: str
    #: In lower case, without a final dot; an IPv6 address without brackets.
    host: str
    port: int
    #: Path and query, as sent.
    path: str

    @property
    def redacted(self) -> str:
        """For logs and errors: without path and query, which often contain a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        return f"{self.scheme}://{host}" if self.port == default else f"{self.scheme}://{host}:{self.port}"


def check_target(url: object, exceptions: AllowList) -> WebhookTarget:
    """Check a webhook's URL, without resolving its host. Raises `InvalidOption`.

    The message never repeats the URL: it may contain a secret.
    """
    if not isinstance(url, str) or not url:
        raise InvalidOption("webhook must be a URL like https://example.org/hook")
    if len(url) > URL_LIMIT:
        raise InvalidOption(f"webhook: the URL has {len(url)} characters, the limit is {URL_LIMIT}")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise InvalidOption(
            "webhook: the URL may contain only ASCII characters and no spaces, backslashes or control characters; "
            "write others as %XX, in the host name as xn--…"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidOption("webhook: the URL has an invalid host or port") from None
    if parts.scheme not in ("http", "https"):
        raise InvalidOption("webhook: the URL must begin with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise InvalidOption(
            "webhook: the URL must not contain a user and password; deliveries are signed, check the signature instead"
        )
    if port == 0 or parts.netloc.endswith(":"):
        raise InvalidOption("webhook: the URL has an invalid host or port")
    host = _check_host(parts.hostname or "", bracketed="[" in parts.netloc)
    address = literal_address(host)
    if address is not None:
        check_address(host, address, exceptions)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(url, parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)


def literal_address(host: str) -> Address | None:
    """The host as an IP address, or None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def check_address(host: str, address: Address, exceptions: AllowList) -> None:
    """Raise `InvalidOption` if requests to this host must not go to this address."""
    if exceptions.allow_host(host) or exceptions.allow_address(address):
        return
    if not is_public(address):
        raise InvalidOption(
            f"webhook: {host} is not on the public internet; an operator can allow it with HOLDFAST_WEBHOOK_ALLOW"
        )


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet.

    It must be a single host, routed, and not a tunnel into another network.
    """
    address = _unwrap(address)
    if isinstance(address, IPv6Address):
        if address not in _IPV6_GLOBAL or address.scope_id is not None:
            return False
        # Tunnels lead to the embedded IPv4 address.
        inner = address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return False
    elif any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """Parse `whsec_…` secrets, separated by spaces (several during a rotation). Raises `InvalidOption`."""
    return tuple(_secret(part) for part in text.split())


def _secret(text: str) -> bytes:
    wrong = InvalidOption(
        f"a webhook secret must be {SECRET_PREFIX} and the base64 of {_SECRET_BYTES[0]} to {_SECRET_BYTES[-1]} random "
        "bytes; "
        "create one with: python -c \"import base64,os; print('whsec_' + base64.b64encode(os.urandom(32)).decode())\""
    )
    if not text.startswith(SECRET_PREFIX):
        raise wrong
    try:
        secret = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        # Not chained: the exception may contain part of the secret.
        raise wrong from None
    if len(secret) not in _SECRET_BYTES:
        raise wrong
    return secret


def _unwrap(address: Address) -> Address:
    """The IPv4 address that an IPv6 address embeds, or the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _check_host(host: str, *, bracketed: bool) -> str:
    host = host.lower()
    if bracketed:
        if not isinstance(literal_address(host), IPv6Address):
            raise InvalidOption("webhook: the URL has an invalid host or port")
        return host
    return _host_name(host.rstrip("."), host)


def _host_name(host: str, given: str) -> str:
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidOption(f"webhook: {given!r} is neither a host name nor an IP address")
    # 0x7f.1 and 2130706433 are 127.0.0.1 to a resolver, and have no legitimate use.
    if _NUMBER.fullmatch(labels[-1]) and literal_address(host) is None:
        raise InvalidOption(
            f"webhook: {given!r} is neither a host name nor an IP address; write an address like 192.0.2.1"
        )
    return host
