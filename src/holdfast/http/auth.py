"""Who is at the door: a token's person, or, in dev mode on loopback, whoever sits at this machine.

In dev mode programs need no token. A browser does need to have come in by the one-time link: otherwise any page that is
open in it could use the API; and it is believed for pages of this very server only, since to browsers all ports of this
machine are one site. Whatever came from elsewhere, or through a proxy, is not from this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import deque
from http.cookies import CookieError, SimpleCookie
from typing import Final, Protocol

from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.errors import NotFound, Unauthorized
from holdfast.http.operation import Scope, header
from holdfast.http.problems import HttpError

_COOKIE: Final = "holdfast_dev"
#: In words that no redaction takes for a secret.
_NEEDED: Final = "no valid token came with this; send one as a bearer token (`holdfast token create` makes one)"
#: Used links, which are reported as such and not as invalid.
_USED_LINKS: Final = 100
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_BY_PROXY: Final = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")


class DevLinkUsed(HttpError):
    """A dev link that has signed a browser in."""

    status = 410
    code = "DEV_LINK_USED"

    def __init__(self) -> None:
        super().__init__("this link has been used; POST /dev makes another, or restart `holdfast serve --dev`")


class TokenVerifier(Protocol):
    """What a gate needs of the people's office."""

    async def verify(self, text: str) -> Principal: ...


class Authenticator:
    """Lets people in who have a token."""

    #: For what is open to everybody: sees nothing.
    nobody: Final = Principal(name="", role=Role.VIEWER, tenants=frozenset(), verified=False)

    def __init__(self, tokens: TokenVerifier) -> None:
        self._tokens = tokens

    async def authenticate(self, scope: Scope) -> Principal:
        """Who asks. Raises `Unauthorized`, with the same words for every cause."""
        given = header(scope, b"authorization")
        if given is None:
            return self._without_token(scope)
        scheme, _, text = given.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text.isascii() or not 0 < len(text) <= 500:
            raise Unauthorized(_NEEDED)
        try:
            return await self._tokens.verify(text)
        except Unauthorized:
            raise Unauthorized(_NEEDED) from None

    def _without_token(self, scope: Scope) -> Principal:
        raise Unauthorized(_NEEDED)


class DevAuthenticator(Authenticator):
    """Lets in whoever sits at this machine. Only for servers that listen on loopback."""

    _you: Final = Principal(name="dev", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}), verified=False)

    def __init__(self, tokens: TokenVerifier) -> None:
        super().__init__(tokens)
        self._key: str | None = secrets.token_urlsafe(24)
        self._used: deque[str] = deque(maxlen=_USED_LINKS)
        self._session = secrets.token_urlsafe(24)

    def link(self, base: str) -> str:
        """Opens the door to one browser, once."""
        return f"{base}/dev?key={self._key}"

    def renew(self) -> None:
        """Make another link. One that was not used is not valid any more."""
        self._key = secrets.token_urlsafe(24)

    def exchange(self, key: str) -> str:
        """The cookie that a browser gets for the link's key. Raises `DevLinkUsed` the second time, and `Unknown`."""
        if self._key is None or not _is_same(self._key, key):
            if any(_is_same(used, key) for used in self._used):
                raise DevLinkUsed
            raise NotFound("dev link", "given")
        self._used.append(self._key)
        self._key = None
        return f"{_COOKIE}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def _without_token(self, scope: Scope) -> Principal:
        # Another name for this address is how a page elsewhere gets at servers on loopback.
        host = (header(scope, b"host") or "").rpartition(":")
        name = host[0] if host[2].isdecimal() and host[0] else "".join(host)
        if name not in _LOOPBACK:
            raise Unauthorized("the dev server is asked by the names 127.0.0.1 and localhost only")
        if not _is_near(scope):
            raise Unauthorized("the dev server is for this machine, without a proxy in between; elsewhere use tokens")
        from_browser = header(scope, b"sec-fetch-site") is not None or header(scope, b"origin") is not None
        if from_browser and not (_is_own_page(scope) and self._has_session(scope)):
            raise Unauthorized("come in by the link that the dev server printed when it started")
        return self._you

    def _has_session(self, scope: Scope) -> bool:
        try:
            cookie = SimpleCookie(header(scope, b"cookie") or "").get(_COOKIE)
        except CookieError:
            return False
        return cookie is not None and _is_same(self._session, cookie.value)


def _is_same(secret: str, given: str) -> bool:
    return hmac.compare_digest(secret.encode(), given.encode())


def _is_near(scope: Scope) -> bool:
    """Whether the other end is on this machine, and speaks for itself."""
    client = scope.get("client")
    try:
        near = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return near and not any(header(scope, name) is not None for name in _BY_PROXY)


def _is_own_page(scope: Scope) -> bool:
    """Whether a browser asks for a page of this server, or for whoever typed the address."""
    if header(scope, b"sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    return header(scope, b"origin") in (None, f"{scope.get('scheme', 'http')}://{header(scope, b'host')}")
