"""A person, or a program, that asks holdfast to do something: who it is, and what it may (requirement H6).

A `Person` comes from a token (`holdfast.people.tokens`), from the command line of somebody who holds the stores anyway,
or from dev mode on loopback; never from an argument.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from holdfast.errors import Forbidden

#: In a token's tenants: all of them, those to come included.
ALL_TENANTS: Final = "*"


class Role(StrEnum):
    """What a token may do. Nobody but an admin has all rights."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    ADMIN = "admin"


class Right(StrEnum):
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


RIGHTS: Final[dict[Role, frozenset[Right]]] = {
    Role.VIEWER: frozenset({Right.READ}),
    Role.OPERATOR: frozenset({Right.READ, Right.SUBMIT, Right.OPERATE}),
    Role.APPROVER: frozenset({Right.READ, Right.APPROVE}),
    Role.ADMIN: frozenset(Right),
}


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    name: str
    role: Role
    #: Names of tenants, or `ALL_TENANTS`.
    tenants: frozenset[str]
    #: A token says so. Without one (a local command line) nobody knows that two people are two.
    proven: bool = True

    @property
    def sees_all(self) -> bool:
        """Whether this person is of every tenant."""
        return ALL_TENANTS in self.tenants

    def sees(self, tenant_id: str) -> bool:
        """Whether a tenant's things exist for this person."""
        return self.sees_all or tenant_id in self.tenants

    def may(self, right: Right) -> bool:
        return right in RIGHTS[self.role]

    def check(self, right: Right) -> None:
        """Raise `Forbidden` unless the role allows it."""
        if not self.may(right):
            raise Forbidden(f"{self.name} is {self.role}, which may not {right}; ask an admin for another token")

    def check_all_tenants(self, what: str) -> None:
        """Raise `Forbidden` unless this person is of every tenant: what touches all is not for one."""
        if not self.sees_all:
            raise Forbidden(f"{what} touches every tenant, and {self.name} is not of all of them")
