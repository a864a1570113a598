"""Tokens (requirement H6), the audit log, and checks that operations share.

A token is `hf_<id>_<secret>`. Its text is shown once, when it is created; the ledger keeps the SHA-256 of the secret,
which is 32 random bytes. A token that is missing, unknown, expired or revoked gets the same answer.

A token's name is the principal: two tokens with one name are the same principal. A token can therefore be replaced by
another, and having two of them does not give two votes. Names are compared in their folded form (`core.principal`). A
new name that differs from an existing one only by that, or mixes scripts with similar characters, is refused.
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
from holdfast.core.principal import ALL_TENANTS, AuditEntry, Permission, Principal, Role, fold_name, mixed_scripts
from holdfast.errors import Forbidden, InvalidOption, NameNotDistinct, NoLedger, NotFound, Unauthorized
from holdfast.ledger.port.operators import TokenRow

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger, LedgerReadPort
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operator_filters import AuditFilter, AuditPage


def require_verified(principal: Principal, what: str) -> None:
    """Raise `Forbidden` for an unverified principal: two of them may be the same user."""
    if not principal.verified:
        raise Forbidden(
            f"{what} needs two different principals, and {principal.name} is not verified by a token; "
            "set HOLDFAST_TOKEN to your own (create one with `holdfast token create`)"
        )


def require_reason(reason: str) -> None:
    """Raise `InvalidOption` for an empty reason."""
    if not reason.strip():
        raise InvalidOption("a reason is required; pass --reason or `reason`")


#: How long a process may still accept a revoked token that it has just verified.
CACHE_S: Final = 2.0
_CACHED: Final = 10_000

_PREFIX: Final = "hf"
_TEXT: Final = re.compile(r"hf_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
#: No colon: names like `local:…` are reserved for holdfast.
_NAME: Final = re.compile(r"[\w.@+-]{1,100}")
_TENANT_LIMIT: Final = 200
_LONGEST: Final = timedelta(days=36_500)
#: Stands for the hash of a token that does not exist, so that the check takes the same time.
_NO_HASH: Final = "0" * 64
_REFUSED: Final = "no valid token (missing, malformed, expired or revoked); ask an admin for one"


class TokenOperations:
    """Creates, verifies, lists and revokes tokens."""

    def __init__(
        self, ledger: Ledger, clock: Clock | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._operators = ledger.operators
        self._clock = clock or SystemClock()
        self._monotonic = monotonic
        #: Hash of the whole text → until when the entry is valid, and the token.
        self._cache: dict[bytes, tuple[float, TokenRow]] = {}

    async def create(
        self, by: Principal, *, name: str, role: Role, tenants: Sequence[str], expires_in: timedelta | None = None
    ) -> tuple[TokenRow, str]:
        """Create a token; return it and its text, which is not stored.

        Only the caller's own tenants can be granted. Raises `NameNotDistinct`.
        """
        by.require(Permission.ADMINISTER)
        self._check(by, name, tenants, expires_in)
        await self._check_distinct(name)
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
        await self._operators.add_token(row, _audit_entry(by, row, "create", after=token_dict(row)))
        return row, f"{_PREFIX}_{row.token_id}_{secret}"

    async def verify(self, text: str) -> Principal:
        """Return the token's principal. Raises `Unauthorized`, with the same message for every cause."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise Unauthorized(_REFUSED)
        row = await self._lookup(text, *match.groups())
        if row is None or not self._is_valid(row):
            raise Unauthorized(_REFUSED)
        return _principal(row)

    async def find_valid(self, token_ids: Sequence[str]) -> dict[str, Principal]:
        """Return the principals of these tokens, as they are now; invalid tokens are left out."""
        rows = await self._operators.tokens(token_ids)
        return {row.token_id: _principal(row) for row in rows if self._is_valid(row)}

    async def list(self, by: Principal) -> list[TokenRow]:
        """List tokens whose tenants the caller can see, oldest first."""
        by.require(Permission.ADMINISTER)
        rows = [row for row in await self._operators.tokens() if _can_see_token(by, row)]
        return sorted(rows, key=lambda row: (row.created_at, row.token_id))

    async def revoke(self, by: Principal, token_id: str, *, reason: str = "") -> TokenRow:
        """Revoke a token, here at once, in other processes within `CACHE_S`. Raises `NotFound` or `Conflict`."""
        by.require(Permission.ADMINISTER)
        row = await self._operators.token(token_id)
        if row is None or not _can_see_token(by, row):
            raise NotFound("token", token_id)
        await self._operators.revoke_token(
            token_id, _audit_entry(by, row, "revoke", reason=reason, before=token_dict(row))
        )
        self._cache.clear()
        return row

    def state(self, row: TokenRow) -> str:
        """`valid`, `expired` or `revoked`."""
        return "revoked" if row.revoked_at is not None else "expired" if self._is_expired(row) else "valid"

    async def _lookup(self, text: str, token_id: str, secret: str) -> TokenRow | None:
        key, now = hashlib.sha256(text.encode()).digest(), self._monotonic()
        cached_until, row = self._cache.get(key, (0.0, None))
        if row is not None and now < cached_until:
            return row
        self._cache.pop(key, None)
        found = await self._operators.token(token_id)
        matches = hmac.compare_digest(_hash(secret), _NO_HASH if found is None else found.secret_hash)
        if found is None or not matches:
            return None
        if len(self._cache) >= _CACHED:
            self._cache.clear()
        self._cache[key] = (now + CACHE_S, found)
        return found

    def _check(self, by: Principal, name: str, tenants: Sequence[str], expires_in: timedelta | None) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidOption(
                f"{name!r} is not a token name; use 1 to 100 letters, digits and . @ + - _ without blanks"
            )
        if not tenants:
            raise InvalidOption("a token needs a tenant; pass --tenant NAME or --all-tenants")
        for tenant in tenants:
            if not tenant or not tenant.isprintable() or len(tenant.encode()) > _TENANT_LIMIT:
                raise InvalidOption(f"{tenant!r} is not a tenant name")
            if not (by.sees_all_tenants if tenant == ALL_TENANTS else by.can_see(tenant)):
                raise Forbidden(f"{by.name} cannot grant tenant {tenant!r} without belonging to it")
        if expires_in is not None and not timedelta(0) < expires_in <= _LONGEST:
            raise InvalidOption("expires_in must be more than 0 s and at most 100 years")

    async def _check_distinct(self, name: str) -> None:
        if scripts := mixed_scripts(name):
            raise NameNotDistinct(
                f"{name!r} mixes characters of {' and '.join(each.title() for each in scripts)} that look alike; "
                "use one script"
            )
        # Also of revoked tokens, which are in the audit log. The message does not reveal other tenants' names.
        if any(row.name != name and fold_name(row.name) == fold_name(name) for row in await self._operators.tokens()):
            raise NameNotDistinct(
                f"{name!r} differs from the name of another token only in case or form; "
                "use exactly that name for the same principal, or a different name"
            )

    def _is_valid(self, row: TokenRow) -> bool:
        return row.revoked_at is None and not self._is_expired(row)

    def _is_expired(self, row: TokenRow) -> bool:
        return row.expires_at is not None and row.expires_at <= self._now()

    def _now(self) -> datetime:
        return to_datetime(self._clock.now_ms())


def token_id_of(text: str) -> str:
    """Id in the text of a token; empty if it is not one."""
    match = _TEXT.fullmatch(text)
    return match[1] if match else ""


def _principal(row: TokenRow) -> Principal:
    return Principal(name=row.name, role=row.role, tenants=frozenset(row.tenants))


def token_dict(row: TokenRow) -> dict[str, object]:
    """Return a token for audit log and lists, without its hash."""
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


def _can_see_token(by: Principal, row: TokenRow) -> bool:
    return all(by.sees_all_tenants if tenant == ALL_TENANTS else by.can_see(tenant) for tenant in row.tenants)


def _audit_entry(
    by: Principal, row: TokenRow, verb: str, *, reason: str = "", before: object = None, after: object = None
) -> AuditEntry:
    # With several tenants: visible only to principals that see all tenants.
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


class AuditOperations:
    """Reads the audit log."""

    def __init__(self, ledger: LedgerReadPort | None) -> None:
        self._ledger = ledger

    async def list(
        self, principal: Principal, filters: AuditFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> AuditPage:
        """Return a page of the audit log, newest first; entries about a whole queue need all tenants."""
        principal.require(Permission.READ)
        from holdfast.ledger.queries.operator_filters import AuditFilter

        restricted = (filters or AuditFilter()).limited_to(principal.visible_tenants)
        return await self._queries().audit_log(restricted, limit, cursor)

    def _queries(self) -> Queries:
        if self._ledger is None:
            raise NoLedger("the audit log")
        return self._ledger.queries
