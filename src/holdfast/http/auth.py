"""Authentication: bearer tokens, or the local user in dev mode on loopback.

In dev mode programs need no token. A browser must have signed in with the one-time link, otherwise any page open in it
could use the API. Its requests are accepted only from pages of this server (`Sec-Fetch-Site`, `Origin`, `Referer`),
because browsers treat all ports of a host as one site. Requests from other machines or through a proxy are refused.
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
#: Worded so that redaction does not mask parts of it.
_NEEDED: Final = "no valid token; send one as a bearer token (create one with `holdfast token create`)"
#: Number of used links kept, so that they are reported as used, not as unknown.
_USED_LINKS: Final = 100
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_BROWSER_HEADERS: Final = (b"sec-fetch-site", b"origin", b"referer")
_PROXY_HEADERS: Final = (
    b"forwarded",
    b"via",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-real-ip",
)


class DevLinkUsed(HttpError):
    """A dev link that has already signed a browser in."""

    status = 410
    code = "DEV_LINK_USED"

    def __init__(self) -> None:
        super().__init__("this link has been used; create another with POST /dev, or restart `holdfast serve --dev`")


def bearer_token(scope: Scope) -> str | None:
    """The token of a request, empty if it cannot be one; None if there is none."""
    given = header(scope, b"authorization")
    if given is None:
        return None
    scheme, _, text = given.partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


class TokenVerifier(Protocol):
    """Verifies token texts."""

    async def verify(self, text: str) -> Principal: ...


class Authenticator:
    """Authenticates requests by bearer token."""

    #: Principal of operations that need no token; sees no tenant.
    anonymous: Final = Principal(name="", role=Role.VIEWER, tenants=frozenset(), verified=False)

    def __init__(self, tokens: TokenVerifier) -> None:
        self._tokens = tokens

    async def authenticate(self, scope: Scope) -> Principal:
        """Return the principal of a request. Raises `Unauthorized`, with the same text for every cause."""
        text = bearer_token(scope)
        if text is None:
            return self._without_token(scope)
        if not text.isascii() or not 0 < len(text) <= 500:
            raise Unauthorized(_NEEDED)
        try:
            return await self._tokens.verify(text)
        except Unauthorized:
            raise Unauthorized(_NEEDED) from None

    def _without_token(self, scope: Scope) -> Principal:
        raise Unauthorized(_NEEDED)


class DevAuthenticator(Authenticator):
    """Also accepts requests from this machine without a token. Only for servers that listen on loopback."""

    _local_user: Final = Principal(name="dev", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}), verified=False)

    def __init__(self, tokens: TokenVerifier) -> None:
        super().__init__(tokens)
        self._key: str | None = secrets.token_urlsafe(24)
        self._used: deque[str] = deque(maxlen=_USED_LINKS)
        self._session = secrets.token_urlsafe(24)

    def link(self, base: str) -> str:
        """Link that signs in one browser, once."""
        return f"{base}/dev?key={self._key}"

    def renew(self) -> None:
        """Create another link. The previous one becomes invalid."""
        self._key = secrets.token_urlsafe(24)

    def exchange(self, key: str) -> str:
        """Return the session cookie for a link's key.

        Raises `DevLinkUsed` on a second use, `NotFound` for an unknown key.
        """
        if self._key is None or not _is_same(self._key, key):
            if any(_is_same(used, key) for used in self._used):
                raise DevLinkUsed
            raise NotFound("dev link", "given")
        self._used.append(self._key)
        self._key = None
        return f"{_COOKIE}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def _without_token(self, scope: Scope) -> Principal:
        # DNS rebinding: a page of another site reaches servers on loopback under its own host name.
        host = (header(scope, b"host") or "").rpartition(":")
        name = host[0] if host[2].isdecimal() and host[0] else "".join(host)
        if name not in _LOOPBACK:
            raise Unauthorized("the dev server accepts only the host names 127.0.0.1, localhost and [::1]")
        if not _is_local(scope):
            raise Unauthorized("the dev server accepts only direct requests from this machine; use a token")
        if _is_from_browser(scope) and not (_is_own_page(scope) and self._has_session(scope)):
            raise Unauthorized("this browser is not signed in; open the link that the dev server printed at start")
        return self._local_user

    def _has_session(self, scope: Scope) -> bool:
        try:
            cookie = SimpleCookie(header(scope, b"cookie") or "").get(_COOKIE)
        except CookieError:
            return False
        return cookie is not None and _is_same(self._session, cookie.value)


def _is_same(secret: str, given: str) -> bool:
    return hmac.compare_digest(secret.encode(), given.encode())


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine and no proxy forwarded the request."""
    client = scope.get("client")
    try:
        is_loopback_client = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
    return is_loopback_client and not any(header(scope, name) is not None for name in _PROXY_HEADERS)


def _is_from_browser(scope: Scope) -> bool:
    """Whether the request has a header that browsers add.

    A browser without `Sec-Fetch-Site` that omits `Origin` still sends the `Referer` of the page.
    """
    return any(header(scope, name) is not None for name in _BROWSER_HEADERS)


def _is_own_page(scope: Scope) -> bool:
    """Whether a page of this server made the request, or the user entered the address."""
    if header(scope, b"sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    own = f"{scope.get('scheme', 'http')}://{header(scope, b'host')}"
    referer = header(scope, b"referer")
    return header(scope, b"origin") in (None, own) and (referer is None or f"{referer}/".startswith(f"{own}/"))
