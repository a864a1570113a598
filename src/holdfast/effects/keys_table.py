"""The table of effect keys in the user's own database, for `ctx.transaction`.

Importing this module does not load SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy.schema import CreateIndex, CreateTable


HOW_TO: Final = (
    "the database has no table idempotency_keys; create it with `holdfast effects create-table --database URL`, "
    "or with `await holdfast.effects.create_keys_table(database)`"
)


async def create_keys_table(database: Any) -> None:
    """Create the table `idempotency_keys` if it does not exist. Can be repeated.

    `database` is an `AsyncEngine`, an `AsyncConnection` (which you commit), or an asyncpg pool or connection.
    """
    # Imported here: importing holdfast must not load SQLAlchemy.
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    if isinstance(database, AsyncEngine):
        async with database.begin() as connection:
            await create_keys_table(connection)
    elif isinstance(database, AsyncConnection):
        for statement in _statements():
            await database.execute(statement)
    elif type(database).__module__.partition(".")[0] == "asyncpg":
        for statement in _statements():
            await database.execute(str(statement.compile(dialect=postgresql.dialect())))  # type: ignore[no-untyped-call]
    else:
        raise UsageError(f"create_keys_table takes an AsyncEngine, an AsyncConnection or asyncpg, not {database!r}")


def _statements() -> list[CreateTable | CreateIndex]:
    from sqlalchemy.schema import CreateIndex, CreateTable

    from holdfast.schema import idempotency_keys

    indexes = sorted(idempotency_keys.indexes, key=lambda index: str(index.name))
    return [
        CreateTable(idempotency_keys, if_not_exists=True),
        *(CreateIndex(index, if_not_exists=True) for index in indexes),
    ]
