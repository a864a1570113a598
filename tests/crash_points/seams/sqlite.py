"""The injection points for SQLite: the writer's transaction, a reader's query, a query of SQLAlchemy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine as SqlEngine
from sqlalchemy import event

from holdfast.errors import EngineUnavailable, LedgerUnavailable, Unavailable
from holdfast.sqlite.connection import ReaderThread
from holdfast.sqlite.writer import Writer
from tests.crash_points.seams.postgres import statement_name
from tests.crash_points.seams.seam import Seam, Way


def writing_through(seam: Seam) -> Callable[..., Any]:
    original = Writer.perform

    async def perform(
        self: Writer,
        work: Callable[..., Any],
        *arguments: Any,
        unavailable: type[Unavailable] = EngineUnavailable,
        **more: Any,
    ) -> Any:
        return await seam.through(
            _step_name(work, *arguments),
            lambda: original(self, work, *arguments, unavailable=unavailable, **more),
            lambda: unavailable("the disk does not answer"),
            _keep_connection,
            changes=True,
        )

    return perform


def reading_through(seam: Seam) -> Callable[..., Any]:
    original = ReaderThread.run

    async def run(self: ReaderThread, query: Callable[..., Any]) -> Any:
        return await seam.through(
            f"read {_step_name(query)}",
            lambda: original(self, query),
            lambda: EngineUnavailable("the disk does not answer"),
            _keep_connection,
            changes=False,
        )

    return run


@contextmanager
def queries_through(seam: Seam) -> Iterator[None]:
    """Put the seam before SQLAlchemy's queries, on its driver's thread. They only read."""

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if connection.dialect.name != "sqlite" or seam.disabled:
            return
        way = None if seam.crashed else seam.way_of(f"query {statement_name(statement)}", changes=False)
        if way is Way.AFTER:
            seam.crash()
        elif seam.crashed or way is not None:
            raise LedgerUnavailable("the disk does not answer")

    event.listen(SqlEngine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(SqlEngine, "before_cursor_execute", before)


def _step_name(work: Callable[..., Any], *arguments: Any) -> str:
    """Name a transaction: its function, the generator that it runs, or the `name` that a lambda closes over."""
    if arguments and inspect.isgenerator(arguments[0]):
        return arguments[0].__name__
    name = getattr(work, "__qualname__", type(work).__qualname__)
    if "<lambda>" in name:
        closure_name = inspect.getclosurevars(work).nonlocals.get("name")
        if isinstance(closure_name, str):
            return closure_name
    return name.replace("<locals>.", "")


def _keep_connection() -> None:
    """Do nothing: a file has no connection to cut."""
