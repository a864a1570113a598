"""One attempt to deliver a webhook: a signed POST to an address that has been checked.

Safe against being used to reach what only we can reach (SSRF): every address that the host has is checked, and the
connection is made to the very address that was checked, so that a name that changes its mind between check and use (DNS
rebinding) gains nothing. Redirects are not followed, the environment's proxies are not used, nothing of the answer but
its status is kept, and all of it has one time limit.
"""

from __future__ import annotations

import asyncio
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

#: Of an answer that is read for politeness: the receiver sees its small answer taken.
_ANSWER_BYTES: Final = 16 * 1024
_ANSWER_S: Final = 1.0
_GONE: Final = 410


class DeliveryFailed(Exception):
    """The receiver did not take it, or could not be reached; it is tried again."""


async def resolve_host(host: str, port: int) -> Sequence[Address]:
    """The system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))


class WebhookSender:
    """Sends. Used on one event loop."""

    def __init__(self, settings: Settings, resolve: Resolve = resolve_host) -> None:
        self._settings = settings
        self._exceptions = settings.webhook_allow_list
        self._resolve = resolve
        self._tls: ssl.SSLContext | None = None

    async def send(self, url: str, webhook_id: str, body: bytes, trace: Mapping[str, str] | None = None) -> int:
        """The receiver's status, if it took it. Raises `DeliveryFailed` to be tried again, `Fatal` if that is in vain.

        Neither shows more of the address than its host. `trace`: headers with the W3C trace context.
        """
        try:
            target = check_target(url, self._exceptions)
            secrets = self._settings.webhook_secrets(url)
            if not secrets:
                raise InvalidOption("webhook: no secret is set any more; set HOLDFAST_WEBHOOK_SECRET")
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
            raise Fatal(f"{target.redacted} answers 410: the webhook is not wanted any more")
        if not 200 <= status < 300:
            raise DeliveryFailed(f"{target.redacted} answers {status}")
        return status

    async def _post(self, target: WebhookTarget, headers: dict[str, str], body: bytes) -> int:
        limit_s = self._settings.webhook_timeout_s
        backend = _CheckedBackend(target.host, self._exceptions, self._resolve)
        try:
            async with asyncio.timeout(limit_s):
                async with httpcore.AsyncConnectionPool(
                    ssl_context=self._context() if target.scheme == "https" else None,
                    max_connections=1,
                    max_keepalive_connections=0,
                    network_backend=backend,
                ) as pool:
                    return await _exchange(pool, target, headers, body)
        except TimeoutError:
            raise DeliveryFailed(f"{target.redacted} has not answered within {limit_s:g} s") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, OSError) as exc:
            raise DeliveryFailed(f"{target.redacted} cannot be reached: {exc!s:.200}") from None
        except InvalidOption as exc:
            raise Fatal(str(exc)) from None
        except httpcore.ProtocolError as exc:
            raise DeliveryFailed(f"{target.redacted} does not speak HTTP: {exc}") from None

    def _context(self) -> ssl.SSLContext:
        # Reads the system's certificates, which takes a while: once.
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


async def _exchange(
    pool: httpcore.AsyncConnectionPool, target: WebhookTarget, headers: dict[str, str], body: bytes
) -> int:
    url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    async with pool.stream("POST", url, headers=list(headers.items()), content=body) as response:
        status: int = response.status
        # It has said what it makes of the delivery; how it goes on changes nothing about that.
        with suppress(TimeoutError, httpcore.ProtocolError, httpcore.NetworkError, httpcore.TimeoutException):
            async with asyncio.timeout(_ANSWER_S):
                await _take(response)
        return status


async def _take(response: httpcore.Response) -> None:
    taken = 0
    async for part in response.aiter_stream():
        taken += len(part)
        if taken >= _ANSWER_BYTES:
            return


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that it has looked up and checked itself, and to no other host."""

    def __init__(self, host: str, exceptions: AllowList, resolve: Resolve) -> None:
        self._host = host
        self._exceptions = exceptions
        self._resolve = resolve
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """To the first address that answers; `InvalidOption` if any of the host's addresses is not allowed."""
        if host != self._host:
            raise InvalidOption(f"webhook: a connection to {host} was not asked for")
        addresses = await self._resolve(host, port)
        # All of them: one that is refused beside one that is not is no mishap of a public receiver.
        for address in addresses:
            check_address(host, address, self._exceptions)
        failure: httpcore.ConnectError | None = None
        for address in addresses:
            try:
                return await self._backend.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except httpcore.ConnectError as exc:
                failure = exc
        raise failure or httpcore.ConnectError("its name has no address")


def _host_header(target: WebhookTarget) -> str:
    return target.redacted.partition("://")[2]
