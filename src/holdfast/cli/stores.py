"""Engine and ledger together, for commands that look at both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.command import Connection
from holdfast.cli.lookup import find_job
from holdfast.core.job import JobView
from holdfast.engine.factory import sqlite_path
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption, UnknownJob, UsageError
from holdfast.ledger.factory import build_ledger
from holdfast.settings import Settings

if TYPE_CHECKING:
    # Its queries load SQLAlchemy, which a look at Redis alone does not need.
    from holdfast.ledger.queries import Queries


@dataclass(frozen=True, slots=True)
class Stores:
    """Both, open; `queries` is None if there is no ledger."""

    settings: Settings
    engine: Engine
    queries: Queries | None

    def remembered(self) -> Queries:
        """The ledger's queries. Raises `InvalidOption` if there is no ledger."""
        if self.queries is None:
            raise InvalidOption(
                "there is no ledger: Redis keeps none; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db"
            )
        return self.queries

    async def live(self, job_id: str, queue: str | None) -> JobView | None:
        """The job as the engine has it, if it does."""
        try:
            return await find_job(self.engine, job_id, queue)
        except UnknownJob:
            return None


@asynccontextmanager
async def stores(at: Connection) -> AsyncIterator[Stores]:
    """Engine and ledger of this command line. A look makes neither."""
    settings = at.settings()
    async with at.engine() as engine:
        ledger = build_ledger(settings, engine)
        if ledger is None:
            yield Stores(settings, engine, None)
            return
        must_be_there(settings)
        await ledger.open()
        try:
            yield Stores(settings, engine, ledger.queries)
        finally:
            await ledger.close()


def must_be_there(settings: Settings) -> None:
    """Raise `UsageError` for a ledger file that nobody has made yet."""
    url = settings.ledger or ""
    if url.startswith("sqlite:") and not Path(sqlite_path(url)).exists():
        raise UsageError(f"there is no ledger {Path(sqlite_path(url)).absolute()} yet; no worker has written to it")
