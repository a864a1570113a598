"""What a person may see and do, as the ledger's questions want it."""

from __future__ import annotations

from holdfast.core.person import Person
from holdfast.errors import Forbidden, InvalidOption


def scope(person: Person) -> tuple[str, ...] | None:
    """The person's tenants; None is all of them."""
    return None if person.sees_all else tuple(sorted(person.tenants))


def check_proven(person: Person, what: str) -> None:
    """Raise `Forbidden` for somebody whom no token proves: of two such people nobody knows that they are two."""
    if not person.proven:
        raise Forbidden(
            f"{what} takes two different people, and {person.name} has shown no token; "
            "set HOLDFAST_TOKEN to your own (`holdfast token create` makes one)"
        )


def check_reason(reason: str) -> None:
    """Raise `InvalidOption` where somebody has to say why, and does not."""
    if not reason.strip():
        raise InvalidOption("say why: a reason is needed, and kept")
