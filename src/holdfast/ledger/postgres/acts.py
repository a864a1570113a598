"""Acts on PostgreSQL: asyncpg in one transaction; rows that two could race for are locked. Times are the server's."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from sqlalchemy import Executable
from sqlalchemy.dialects.postgresql.asyncpg import dialect

from holdfast.errors import HoldfastError
from holdfast.ledger.acts.running import Acts
from holdfast.ledger.acts.steps import NOW, Act, Ask
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.text import clean

T = TypeVar("T")

_DIALECT: Final = dialect()  # type: ignore[no-untyped-call]


class PostgresActs(Acts):
    """Runs them."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def _run(self, act: Act[T]) -> T:
        async def work(connection: Connection) -> T | HoldfastError:
            answer: Any = None
            while True:
                try:
                    wanted = act.send(answer)
                except StopIteration as end:
                    result: T | HoldfastError = end.value
                    return result
                answer = await _answer(connection, wanted)

        result = await self._store.transact(work)
        if isinstance(result, HoldfastError):
            raise result
        return result


async def _answer(connection: Connection, wanted: Executable | Ask) -> Any:
    if wanted is NOW:
        return await connection.fetchval("SELECT clock_timestamp()")
    compiled = wanted.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})  # type: ignore[attr-defined]
    values = (compiled.params[name] for name in compiled.positiontup)
    return await connection.fetch(compiled.string, *(clean(v) if isinstance(v, str) else v for v in values))
