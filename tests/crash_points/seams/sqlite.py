"""The last place that a call to SQLite passes: the writer's transaction, a reader's question, a query of SQLAlchemy."""

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
            _named(work, *arguments),
            lambda: original(self, work, *arguments, unavailable=unavailable, **more),
            lambda: unavailable("the disk does not answer"),
            _nothing,
            leaves=True,
        )

    return perform


def reading_through(seam: Seam) -> Callable[..., Any]:
    original = ReaderThread.run

    async def ask(self: ReaderThread, question: Callable[..., Any]) -> Any:
        return await seam.through(
            f"read {_named(question)}",
            lambda: original(self, question),
            lambda: EngineUnavailable("the disk does not answer"),
            _nothing,
            leaves=False,
        )

    return ask


@contextmanager
def queries_through(seam: Seam) -> Iterator[None]:
    """SQLAlchemy's, on a thread of its driver: they only read, so that before and after are one."""

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if connection.dialect.name != "sqlite" or seam.off:
            return
        way = None if seam.dead else seam.way_of(f"query {statement_name(statement)}", leaves=False)
        if way is Way.AFTER:
            seam.die()
        elif seam.dead or way is not None:
            raise LedgerUnavailable("the disk does not answer")

    event.listen(SqlEngine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(SqlEngine, "before_cursor_execute", before)


def _named(work: Callable[..., Any], *arguments: Any) -> str:
    """What a step is called: its function, the act that it runs, or the statement that a lambda closes over."""
    if arguments and inspect.isgenerator(arguments[0]):
        return arguments[0].__name__
    name = getattr(work, "__qualname__", type(work).__qualname__)
    if "<lambda>" in name:
        given = inspect.getclosurevars(work).nonlocals.get("name")
        if isinstance(given, str):
            return given
    return name.replace("<locals>.", "")


def _nothing() -> None:
    """A file has no connection that could be cut."""
