"""Whose ledger it is: a ledger belongs to one namespace, which the first one to open it writes down.

Two engines in one ledger would mix their jobs, and each would restore the other's.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import InvalidOption

READ_OWNER: Final = "SELECT namespace FROM ledger_owner"
#: The default namespace has no name.
_DEFAULT: Final = "(the default one)"


def check_owner(where: str, found: str, namespace: str) -> None:
    """Raises `InvalidOption` for somebody else's ledger."""
    if found != namespace:
        raise InvalidOption(
            f"the ledger {where} belongs to namespace {found or _DEFAULT}, this is {namespace or _DEFAULT}; "
            "set HOLDFAST_NAMESPACE to that, or give this one a ledger of its own"
        )
