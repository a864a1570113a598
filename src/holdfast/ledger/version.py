"""Which schema a ledger has, and which one this release wants. Looked at without Alembic, which is slow to load."""

from __future__ import annotations

from typing import Final

from holdfast.errors import SchemaMismatch

#: The newest migration. Versions are four digits, so that they sort.
HEAD: Final = "0001"
#: Not Alembic's usual name: the ledger may share a database with an application that has migrations of its own.
TABLE: Final = "holdfast_version"
READ_VERSION: Final = f"SELECT version_num FROM {TABLE}"  # noqa: S608 - a constant


def check_version(where: str, found: str | None) -> None:
    """Raises `SchemaMismatch` unless it is the one that this release wants."""
    if found != HEAD:
        raise SchemaMismatch(where, found, HEAD)
