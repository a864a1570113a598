"""Principals, their roles and permissions, and audit entries (requirement H6).

A `Principal` comes from a token (`holdfast.operations.access`), from the command line of a user who has access to
the stores anyway, or from dev mode on loopback; never from an argument.
"""

from __future__ import annotations

import unicodedata
from enum import StrEnum
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT
from holdfast.errors import Forbidden

#: In a token's tenants: all of them, including those created later.
ALL_TENANTS: Final = "*"
#: Scripts with characters that look alike: a name may have characters of one of them, besides other scripts.
_SIMILAR_SCRIPTS: Final = frozenset({"LATIN", "CYRILLIC", "GREEK"})


def fold_name(name: str) -> str:
    """Return what identifies a principal: the name trimmed, in NFKC, without case.

    Where two principals are required, names with the same folded form are one principal.
    """
    folded = unicodedata.normalize("NFKC", name.strip()).casefold()
    # Case folding may leave another form.
    return unicodedata.normalize("NFKC", folded)


def mixed_scripts(name: str) -> list[str]:
    """Scripts with similar characters in a name, if there are several.

    A script is the first word of a character's name in Unicode. A name in one script that resembles a
    name in another is not detected.
    """
    characters = (character for character in unicodedata.normalize("NFKC", name) if character.isalpha())
    found = _SIMILAR_SCRIPTS & {unicodedata.name(character, "").partition(" ")[0] for character in characters}
    return sorted(found) if len(found) > 1 else []


class Role(StrEnum):
    """What a token may do. Only an admin has all permissions."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    ADMIN = "admin"


class Permission(StrEnum):
    """One thing that a role may or may not do."""

    #: Read jobs, queues, dead letters and approvals of the token's tenants.
    READ = "read"
    #: Submit jobs.
    SUBMIT = "submit"
    #: Cancel, resume, retry, replay, discard; with all tenants also pause and limit queues.
    OPERATE = "operate"
    #: Vote on approval requests.
    APPROVE = "approve"
    #: Create and revoke tokens.
    ADMINISTER = "administer"


PERMISSIONS: Final[dict[Role, frozenset[Permission]]] = {
    Role.VIEWER: frozenset({Permission.READ}),
    Role.OPERATOR: frozenset({Permission.READ, Permission.SUBMIT, Permission.OPERATE}),
    Role.APPROVER: frozenset({Permission.READ, Permission.APPROVE}),
    Role.ADMIN: frozenset(Permission),
}


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The user or program that makes a request."""

    name: str
    role: Role
    #: Names of tenants, or `ALL_TENANTS`.
    tenants: frozenset[str]
    #: Proved by a token. Without one (a local command line), different names may be one user.
    verified: bool = True

    @property
    def sees_all_tenants(self) -> bool:
        return ALL_TENANTS in self.tenants

    @property
    def visible_tenants(self) -> tuple[str, ...] | None:
        """The principal's tenants; None means all."""
        return None if self.sees_all_tenants else tuple(sorted(self.tenants))

    def can_see(self, tenant_id: str) -> bool:
        return self.sees_all_tenants or tenant_id in self.tenants

    def can(self, permission: Permission) -> bool:
        return permission in PERMISSIONS[self.role]

    def require(self, permission: Permission) -> None:
        """Raise `Forbidden` unless the role has the permission."""
        if not self.can(permission):
            raise Forbidden(
                f"{self.name} has role {self.role}, which may not {permission}; ask an admin for another token"
            )

    def require_all_tenants(self, what: str) -> None:
        """Raise `Forbidden` unless the principal has all tenants, for actions that affect every tenant."""
        if not self.sees_all_tenants:
            raise Forbidden(f"{what} affects every tenant, but {self.name} does not have all tenants")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit log: who did what to which target, why, and the values before and after."""

    #: `operator.…`, `alert.…`; empty: the action is not logged.
    type: str
    actor: str
    #: `job`, `queue`, `dlq`, `approval`, `token`, …
    target: str
    target_id: str
    tenant_id: str = DEFAULT_TENANT
    queue: str = ""
    reason: str = ""
    #: Plain JSON.
    before: Any = None
    after: Any = None
