"""One attempt to deliver a webhook: a signed POST to a checked address.

Protects against server-side request forgery (SSRF): all addresses of the host are checked, and the connection goes to
one of them, so that a name that changes between check and use (DNS rebinding) has no effect. Redirects are not
followed, proxies of the environment are not used, only the status of the response is kept, and one timeout covers the
whole attempt. A name that does not resolve and one with a forbidden address fail alike, so that submitters cannot find
out which names exist in the operator's network; only the log has the cause.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

import httpcore

from holdfast._version import __version__
from holdfast.core.webhook_url import Address, AllowList, WebhookTarget, check_address, check_target
from holdfast.errors import Fatal, InvalidOption
from holdfast.settings import Settings
from holdfast.webhooks.signature import sign

#: Host and port → addresses.
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]

_log: Final = logging.getLogger("holdfast.webhooks")

#: Shortest duration of an attempt without an allowed address: a lookup that finds a name is faster than one that fails.
_REFUSAL_S: Final = 1.0
#: Limits for reading the response body, so that receivers do not see the connection close during a small one.
_ANSWER_BYTES: Final = 16 * 1024
_ANSWER_S: Final = 1.0
_GONE: Final = 410


class DeliveryFailed(Exception):
    """The receiver did not accept the delivery or could not be reached; it is retried."""


class _NoAllowedAddress(Exception):
    """The host does not resolve, or has a forbidden address. The message is for the operator's log only."""


async def resolve_host(host: str, port: int) -> Sequence[Address]:
    """Resolve a host with the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))


class WebhookSender:
    """Sends deliveries. Used on one event loop."""

    def __init__(self, settings: Settings, resolve: Resolve = resolve_host) -> None:
        self._settings = settings
        self._exceptions = settings.webhook_allow_list
        self._resolve = resolve
        self._tls: ssl.SSLContext | None = None

    async def send(self, url: str, webhook_id: str, body: bytes, trace: Mapping[str, str] | None = None) -> int:
        """Send a delivery and return the receiver's status.

        Raises `DeliveryFailed` if it should be retried, `Fatal` if a retry cannot succeed. Both show no more of
        the address than its host. `trace`: headers with the W3C trace context.
        """
        try:
            target = check_target(url, self._exceptions)
            secrets = self._settings.webhook_secrets(url)
            if not secrets:
                raise InvalidOption("webhook: no secret is set; set HOLDFAST_WEBHOOK_SECRET")
        except InvalidOption as exc:
            raise Fatal(str(exc)) from None
        headers = {
            "host": _host_header(target),
            "content-type": "application/json",
            "user-agent": f"holdfast/{__version__}",
            "connection": "close",
            **(trace or {}),
            **sign(secrets, webhook_id, int(time.time()), body),
        }
        status = await self._post(target, headers, body)
        if status == _GONE:
            raise Fatal(f"{target.redacted} answered 410: the receiver has removed the webhook")
        if not 200 <= status < 300:
            raise DeliveryFailed(f"{target.redacted} answered {status}")
        return status

    async def _post(self, target: WebhookTarget, headers: dict[str, str], body: bytes) -> int:
        limit_s = self._settings.webhook_timeout_s
        backend = _CheckedBackend(target.host, self._exceptions, self._resolve)
        refused_at = time.monotonic() + _REFUSAL_S
        try:
            async with asyncio.timeout(limit_s):
                async with httpcore.AsyncConnectionPool(
                    ssl_context=self._context() if target.scheme == "https" else None,
                    max_connections=1,
                    max_keepalive_connections=0,
                    network_backend=backend,
                ) as pool:
                    return await _exchange(pool, target, headers, body)
        except _NoAllowedAddress as exc:
            cause = str(exc)
        except TimeoutError:
            if backend.resolved:
                raise DeliveryFailed(f"{target.redacted} did not respond within {limit_s:g} s") from None
            cause = f"the lookup took more than {limit_s:g} s"
        except (httpcore.NetworkError, httpcore.TimeoutException, OSError) as exc:
            raise DeliveryFailed(f"{target.redacted} is unreachable: {exc!s:.200}") from None
        except httpcore.ProtocolError as exc:
            raise DeliveryFailed(f"{target.redacted} sent an invalid HTTP response: {exc}") from None
        _log.warning("webhook to %s not sent: %s", target.redacted, cause)
        await asyncio.sleep(refused_at - time.monotonic())
        raise DeliveryFailed(
            f"{target.redacted} has no address on the public internet; an operator can allow an internal one with "
            "HOLDFAST_WEBHOOK_ALLOW"
        )

    def _context(self) -> ssl.SSLContext:
        # Cached: loading the system's certificates is slow.
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


async def _exchange(
    pool: httpcore.AsyncConnectionPool, target: WebhookTarget, headers: dict[str, str], body: bytes
) -> int:
    url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    async with pool.stream("POST", url, headers=list(headers.items()), content=body) as response:
        status: int = response.status
        # The status decides about the delivery; errors in the body do not matter.
        with suppress(TimeoutError, httpcore.ProtocolError, httpcore.NetworkError, httpcore.TimeoutException):
            async with asyncio.timeout(_ANSWER_S):
                await _drain(response)
        return status


async def _drain(response: httpcore.Response) -> None:
    received = 0
    async for part in response.aiter_stream():
        received += len(part)
        if received >= _ANSWER_BYTES:
            return


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to addresses of one host, which it resolves and checks itself."""

    def __init__(self, host: str, exceptions: AllowList, resolve: Resolve) -> None:
        self._host = host
        self._exceptions = exceptions
        self._resolve = resolve
        self._backend = httpcore.AnyIOBackend()
        #: Whether the host has addresses, all of them allowed.
        self.resolved = False

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first reachable address.

        Raises `_NoAllowedAddress` if the host has no address, or one that is not allowed.
        """
        try:
            addresses = await self._find_addresses(host, port)
        except (OSError, InvalidOption) as exc:
            raise _NoAllowedAddress(str(exc)) from None
        self.resolved = True
        failure = httpcore.ConnectError("the host name has no address")
        for address in addresses:
            try:
                return await self._backend.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except httpcore.ConnectError as exc:
                failure = exc
        raise failure

    async def _find_addresses(self, host: str, port: int) -> Sequence[Address]:
        if host != self._host:
            raise InvalidOption(f"webhook: unexpected connection to {host}")
        addresses = await self._resolve(host, port)
        if not addresses:
            raise OSError("the host name has no address")
        # Check all: a public receiver has no reason to mix allowed and refused addresses.
        for address in addresses:
            check_address(host, address, self._exceptions)
        return addresses


def _host_header(target: WebhookTarget) -> str:
    return target.redacted.partition("://")[2]
