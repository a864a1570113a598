"""The ledger in a PostgreSQL database: its roles, put together."""

from __future__ import annotations

from holdfast.engine.port import Finding
from holdfast.ledger.outbox_store import OutboxStore
from holdfast.ledger.people import People
from holdfast.ledger.port import Effects, Projection, Recovery
from holdfast.ledger.postgres import diagnosis, retention
from holdfast.ledger.postgres.effects import PostgresEffects
from holdfast.ledger.postgres.outbox import PostgresOutbox
from holdfast.ledger.postgres.people import PostgresPeople
from holdfast.ledger.postgres.projection import PostgresProjection
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.postgres.telling import PostgresMarks
from holdfast.ledger.postgres.triggers import PostgresTriggers
from holdfast.ledger.publishing import Publishing
from holdfast.ledger.queries import Queries
from holdfast.ledger.recovery import SqlRecovery
from holdfast.ledger.retention import Marks
from holdfast.ledger.telling import Telling
from holdfast.ledger.trigger_book import TriggerBook


class PostgresLedger:
    """A ledger in a PostgreSQL database."""

    def __init__(self, store: PostgresStore, publishing: Publishing | None = None) -> None:
        self.store = store
        self._publishing = publishing
        self.projection: Projection = PostgresProjection(store, publishing)
        self.effects: Effects = PostgresEffects(store)
        self.people: People = PostgresPeople(store)
        self.telling = Telling(store.readers, PostgresMarks(store))
        self.triggers: TriggerBook = PostgresTriggers(store)
        self.outbox: OutboxStore = PostgresOutbox(store)
        self.recovery: Recovery = SqlRecovery(store.readers)
        self.queries = Queries(store.readers)

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.projection.close()
        await self.outbox.close()
        await self.store.close()

    def sibling(self) -> PostgresLedger:
        return PostgresLedger(self.store.sibling(), self._publishing)

    async def prune(self, keep_ms: int, limit: int, marks: Marks | None = None) -> int:
        return await retention.prune(self.store, keep_ms, limit, marks)

    async def diagnose(self) -> list[Finding]:
        return await diagnosis.examine(self.store, self.outbox)
