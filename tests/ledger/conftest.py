"""A ledger on each kind of store: PostgreSQL, its own SQLite file, the embedded engine's file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.ledger.sqlite.ledger import SqliteLedger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile
from tests.ledger.projection_rig import open_ledger

AnyLedger = PostgresLedger | SqliteLedger | EmbeddedLedger


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    """A ledger with its own store, for what an embedded one does not do."""
    ledger = open_ledger(ledger_url)
    await ledger.open()
    yield ledger
    await ledger.close()


@pytest.fixture(params=["postgres", "sqlite", "embedded"])
async def any_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyLedger]:
    """An empty ledger with all its tables."""
    ledger: AnyLedger
    match request.param:
        case "postgres":
            ledger = PostgresLedger(PostgresStore(request.getfixturevalue("postgres_url")))
        case "sqlite":
            ledger = SqliteLedger(
                SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger), SystemClock()
            )
        case _:
            ledger = EmbeddedLedger(DatabaseFile(str(tmp_path / "holdfast.db")), SystemClock())
    await ledger.store.open()
    yield ledger
    await ledger.close()
