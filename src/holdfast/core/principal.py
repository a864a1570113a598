"""A person, or a program, that asks holdfast to do something: who it is, and what it may (requirement H6).

A `Person` comes from a token (`holdfast.operations.access`), from the command line of a user who has access to
the stores anyway, or from dev mode on loopback; never from an argument.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT
from holdfast.errors import Forbidden

#: In a token's tenants: all of them, those to come included.
ALL_TENANTS: Final = "*"


class Role(StrEnum):
    """What a token may do. Nobody but an admin has all rights."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    ADMIN = "admin"


class Permission(StrEnum):
    """One thing that a role may or may not do."""

    #: See jobs, queues, dead letters, approvals of one's tenants.
    READ = "read"
    #: Hand in jobs.
    SUBMIT = "submit"
    #: Cancel, resume, retry, replay, discard; with all tenants also pause and limit queues.
    OPERATE = "operate"
    #: Answer approvals.
    APPROVE = "approve"
    #: Make and revoke tokens.
    ADMINISTER = "administer"


PERMISSIONS: Final[dict[Role, frozenset[Permission]]] = {
    Role.VIEWER: frozenset({Permission.READ}),
    Role.OPERATOR: frozenset({Permission.READ, Permission.SUBMIT, Permission.OPERATE}),
    Role.APPROVER: frozenset({Permission.READ, Permission.APPROVE}),
    Role.ADMIN: frozenset(Permission),
}


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    name: str
    role: Role
    #: Names of tenants, or `ALL_TENANTS`.
    tenants: frozenset[str]
    #: A token says so. Without one (a local command line) nobody knows that two people are two.
    verified: bool = True

    @property
    def sees_all_tenants(self) -> bool:
        """Whether this person is of every tenant."""
        return ALL_TENANTS in self.tenants

    def can_see(self, tenant_id: str) -> bool:
        """Whether a tenant's things exist for this person."""
        return self.sees_all_tenants or tenant_id in self.tenants

    def can(self, right: Permission) -> bool:
        return right in PERMISSIONS[self.role]

    def require(self, right: Permission) -> None:
        """Raise `Forbidden` unless the role allows it."""
        if not self.can(right):
            raise Forbidden(f"{self.name} is {self.role}, which may not {right}; ask an admin for another token")

    def require_all_tenants(self, what: str) -> None:
        """Raise `Forbidden` unless this person is of every tenant: what touches all is not for one."""
        if not self.sees_all_tenants:
            raise Forbidden(f"{what} touches every tenant, and {self.name} is not of all of them")


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
