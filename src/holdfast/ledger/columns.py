"""What the ledger's tables are made of, on PostgreSQL and SQLite alike."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import BigInteger, Column, DateTime, Dialect, MetaData, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

from holdfast.core.job import DEFAULT_TENANT


class Instant(TypeDecorator[datetime]):
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


#: Compared byte by byte: cheaper in an index than a language's collation, and every store sorts alike.
NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
#: Keys and trace ids that can be looked up: as long as holdfast itself accepts.
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
