"""Tokens (requirement H6), visible tenants, and checks that operations share.

A token is `hf_<id>_<secret>`. Its text is shown once, when it is created; the ledger keeps the SHA-256 of the secret,
which is 32 random bytes. A token that is missing, unknown, expired or revoked gets the same answer.

A token's name is the principal: two tokens with one name are the same principal. A token can therefore be replaced by
another, and having two of them does not give two votes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from holdfast.clock import Clock, SystemClock, to_datetime
from holdfast.core.principal import ALL_TENANTS, AuditEntry, Permission, Principal, Role
from holdfast.errors import Forbidden, InvalidOption, NotFound, Unauthorized
from holdfast.ledger.port.operators import TokenRow

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger


def visible_tenants(person: Principal) -> tuple[str, ...] | None:
    """The person's tenants; None is all of them."""
    return None if person.sees_all_tenants else tuple(sorted(person.tenants))


def require_verified(person: Principal, what: str) -> None:
    """Raise `Forbidden` for somebody whom no token proves: of two such people nobody knows that they are two."""
    if not person.verified:
        raise Forbidden(
            f"{what} takes two different people, and {person.name} has shown no token; "
            "set HOLDFAST_TOKEN to your own (`holdfast token create` makes one)"
        )


def require_reason(reason: str) -> None:
    """Raise `InvalidOption` where somebody has to say why, and does not."""
    if not reason.strip():
        raise InvalidOption("say why: a reason is needed, and kept")


#: A revoked token works for so long at most in a process that has just seen it.
CACHE_S: Final = 5.0
_CACHED: Final = 10_000

_PREFIX: Final = "hf"
_TEXT: Final = re.compile(r"hf_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
#: No colon: `local:` and the like are names that only holdfast gives.
_NAME: Final = re.compile(r"[\w.@+-]{1,100}")
_TENANT_LIMIT: Final = 200
_LONGEST: Final = timedelta(days=36_500)
#: Compared with where there is no token of that id, so that this takes as long.
_NO_HASH: Final = "0" * 64
_REFUSED: Final = "no valid token; it is missing, mistyped, expired or revoked: ask an admin for one"


class TokenOperations:
    """Makes, verifies, lists and revokes them."""

    def __init__(
        self, ledger: Ledger, clock: Clock | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._people = ledger.operators
        self._clock = clock or SystemClock()
        self._monotonic = monotonic
        #: By the hash of the whole text: until when we need not look again, and the token.
        self._seen: dict[bytes, tuple[float, TokenRow]] = {}

    async def create(
        self, by: Principal, *, name: str, role: Role, tenants: Sequence[str], expires_in: timedelta | None = None
    ) -> tuple[TokenRow, str]:
        """A new token and its text, which is not kept anywhere. Nobody gives away more tenants than their own."""
        by.require(Permission.ADMINISTER)
        self._check(by, name, tenants, expires_in)
        now, secret = self._now(), secrets.token_urlsafe(32)
        row = TokenRow(
            token_id=secrets.token_hex(8),
            name=name,
            role=role,
            tenants=tuple(sorted(set(tenants))),
            secret_hash=_hash(secret),
            created_by=by.name,
            created_at=now,
            expires_at=None if expires_in is None else now + expires_in,
        )
        await self._people.add_token(row, _action(by, row, "create", after=token_dict(row)))
        return row, f"{_PREFIX}_{row.token_id}_{secret}"

    async def verify(self, text: str) -> Principal:
        """Whose token it is. Raises `Unauthorized`, with the same words whatever is wrong with it."""
        parts = _TEXT.fullmatch(text)
        if parts is None:
            raise Unauthorized(_REFUSED)
        row = await self._known(text, *parts.groups())
        if row is None or row.revoked_at is not None or self._is_over(row):
            raise Unauthorized(_REFUSED)
        return Principal(name=row.name, role=row.role, tenants=frozenset(row.tenants))

    async def list(self, by: Principal) -> list[TokenRow]:
        """Tokens, oldest first, of no other tenants than the admin's own."""
        by.require(Permission.ADMINISTER)
        rows = [row for row in await self._people.tokens() if _sees(by, row)]
        return sorted(rows, key=lambda row: (row.created_at, row.token_id))

    async def revoke(self, by: Principal, token_id: str, *, reason: str = "") -> TokenRow:
        """Valid no longer: here at once, in other processes within `CACHE_S`. Raises `Unknown`, or `Conflict`."""
        by.require(Permission.ADMINISTER)
        row = await self._people.token(token_id)
        if row is None or not _sees(by, row):
            raise NotFound("token", token_id)
        await self._people.revoke_token(token_id, _action(by, row, "revoke", reason=reason, before=token_dict(row)))
        self._seen.clear()
        return row

    def state(self, row: TokenRow) -> str:
        """`valid`, `expired` or `revoked`."""
        return "revoked" if row.revoked_at is not None else "expired" if self._is_over(row) else "valid"

    async def _known(self, text: str, token_id: str, secret: str) -> TokenRow | None:
        key, now = hashlib.sha256(text.encode()).digest(), self._monotonic()
        until, row = self._seen.get(key, (0.0, None))
        if row is not None and now < until:
            return row
        self._seen.pop(key, None)
        found = await self._people.token(token_id)
        right = hmac.compare_digest(_hash(secret), _NO_HASH if found is None else found.secret_hash)
        if found is None or not right:
            return None
        if len(self._seen) >= _CACHED:
            self._seen.clear()
        self._seen[key] = (now + CACHE_S, found)
        return found

    def _check(self, by: Principal, name: str, tenants: Sequence[str], expires_in: timedelta | None) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidOption(
                f"a token's name is 1 to 100 letters, digits and . @ + - _ without blanks, not {name!r}"
            )
        if not tenants:
            raise InvalidOption("a token needs a tenant: name those that it is for, or say that it is for all")
        for tenant in tenants:
            if not tenant or not tenant.isprintable() or len(tenant.encode()) > _TENANT_LIMIT:
                raise InvalidOption(f"{tenant!r} is no name of a tenant")
            if not (by.sees_all_tenants if tenant == ALL_TENANTS else by.can_see(tenant)):
                raise Forbidden(f"{by.name} cannot give away tenant {tenant!r}, being no part of it")
        if expires_in is not None and not timedelta(0) < expires_in <= _LONGEST:
            raise InvalidOption("a token expires after more than 0 seconds, and within 100 years")

    def _is_over(self, row: TokenRow) -> bool:
        return row.expires_at is not None and row.expires_at <= self._now()

    def _now(self) -> datetime:
        return to_datetime(self._clock.now_ms())


def token_dict(row: TokenRow) -> dict[str, object]:
    """A token as the log and lists show it: without its hash."""
    return {
        "token_id": row.token_id,
        "name": row.name,
        "role": row.role.value,
        "tenants": list(row.tenants),
        "created_by": row.created_by,
        "created_at": row.created_at.isoformat(),
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(),
    }


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _sees(by: Principal, row: TokenRow) -> bool:
    return all(by.sees_all_tenants if tenant == ALL_TENANTS else by.can_see(tenant) for tenant in row.tenants)


def _action(
    by: Principal, row: TokenRow, verb: str, *, reason: str = "", before: object = None, after: object = None
) -> AuditEntry:
    # Of several tenants: for those to see who see all.
    tenant_id = row.tenants[0] if len(row.tenants) == 1 else ALL_TENANTS
    return AuditEntry(
        type=f"operator.token_{verb}",
        actor=by.name,
        tenant_id=tenant_id,
        target="token",
        target_id=row.token_id,
        reason=reason,
        before=before,
        after=after,
    )
