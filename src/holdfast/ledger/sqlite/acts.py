"""Acts on SQLite, in a file of the ledger's own or in the engine's: one operation of its writer each, so that nothing
else writes meanwhile. Times are the given clock's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Executable
from sqlalchemy.dialects.sqlite import dialect

from holdfast.clock import Clock
from holdfast.engine.sqlite.transaction import Transaction
from holdfast.errors import HoldfastError
from holdfast.ledger.acts.running import Acts
from holdfast.ledger.acts.steps import NOW, Act, Ask
from holdfast.ledger.columns import Instant
from holdfast.ledger.text import clean

T = TypeVar("T")

_DIALECT: Final = dialect()


class Store(Protocol):
    """The file's writer."""

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T: ...


class SqliteActs(Acts):
    """Runs them."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def _run(self, act: Act[T]) -> T:
        result: T | HoldfastError = await self._store.write(self._perform, act)
        return _told(result)

    async def _look(self, act: Act[T]) -> T:
        # Lazy: it begins no transaction.
        result: T | HoldfastError = await self._store.write(self._perform, act, lazy=True)
        return _told(result)

    def _perform(self, transaction: Transaction, act: Act[T]) -> T | HoldfastError:
        """In the writer's thread."""
        answer: Any = None
        while True:
            try:
                wanted = act.send(answer)
            except StopIteration as end:
                result: T | HoldfastError = end.value
                return result
            answer = self._now() if wanted is NOW else _rows(transaction, wanted)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)


def _told(result: T | HoldfastError) -> T:
    if isinstance(result, HoldfastError):
        raise result
    return result


def _rows(transaction: Transaction, wanted: Executable | Ask) -> list[dict[str, Any]]:
    compiled = wanted.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})  # type: ignore[union-attr]
    cursor = transaction.execute(compiled.string, [_value(compiled.params[name]) for name in compiled.positiontup])
    if cursor.description is None:
        return []
    instants = {column.name for column in wanted.exported_columns if isinstance(column.type, Instant)}  # type: ignore[union-attr]
    names = [column[0] for column in cursor.description]
    return [{name: _read(name, value, instants) for name, value in zip(names, row, strict=True)} for row in cursor]


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    return clean(value) if isinstance(value, str) else value


def _read(name: str, value: Any, instants: set[str]) -> Any:
    return datetime.fromtimestamp(value / 1000, UTC) if value is not None and name in instants else value
