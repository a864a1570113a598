"""Column types, tenant helpers and the schema version, for PostgreSQL and SQLite.

Most indexes lead with the tenant, so a query over all tenants is one query per tenant; `tenants_of` finds them.
`check_version` compares a ledger's schema with the one this release needs, without Alembic, which is slow to load.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import BigInteger, Column, ColumnElement, DateTime, Dialect, MetaData, Select, Table, Text, func, select
from sqlalchemy.types import TypeDecorator, TypeEngine

from holdfast.core.job import DEFAULT_TENANT
from holdfast.errors import SchemaMismatch


class InstantColumn(TypeDecorator[datetime]):
    """An aware datetime: `timestamptz`, or milliseconds where the store has no such type."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(BigInteger() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return round(value.timestamp() * 1000)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        found: datetime | None = value
        return found if value is None or dialect.name != "sqlite" else datetime.fromtimestamp(value / 1000, UTC)


#: Compared byte by byte: cheaper in an index than a language's collation, and every store sorts the same way.
NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
#: Keys and trace ids up to this length are indexed. Submissions have no longer ones; foreign messages may.
INDEXED_BYTES: Final = 1_000

metadata: Final = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pk",
        "ck": "%(table_name)s_%(constraint_name)s",
        "ix": "%(table_name)s_%(constraint_name)s",
        "uq": "%(table_name)s_%(constraint_name)s",
    }
)


def tenant() -> Column[str]:
    """The first column of every business table."""
    return Column("tenant_id", NAME, nullable=False, server_default=DEFAULT_TENANT)


def tenants_of(table: Table, *conditions: ColumnElement[bool]) -> Select[Any]:
    """Select all tenants that have a matching row.

    Steps from tenant to tenant in the index, because a table has many rows and few tenants.
    """
    column = table.c.tenant_id
    first = select(func.min(column).label("tenant_id")).where(*conditions).cte("tenants", recursive=True)
    after = select(func.min(column)).where(column > first.c.tenant_id, *conditions).scalar_subquery()
    walk = first.union_all(select(after).where(first.c.tenant_id.is_not(None)))
    return select(walk.c.tenant_id).where(walk.c.tenant_id.is_not(None))


#: The newest migration. Versions are four digits, so that they sort.
HEAD: Final = "0004"
#: Not Alembic's default name: the ledger may share a database with an application that has its own migrations.
TABLE: Final = "holdfast_version"
READ_VERSION: Final = f"SELECT version_num FROM {TABLE}"  # noqa: S608 - a constant


def check_version(where: str, found: str | None) -> None:
    """Raise `SchemaMismatch` unless the version is the one this release needs."""
    if found != HEAD:
        raise SchemaMismatch(where, found, HEAD)
