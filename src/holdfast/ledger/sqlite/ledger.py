"""The ledger in a SQLite file of its own: its roles, put together."""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.engine.port import Finding
from holdfast.ledger.outbox_store import OutboxStore
from holdfast.ledger.people import People
from holdfast.ledger.port import Effects, Projection, Recovery
from holdfast.ledger.publishing import Publishing
from holdfast.ledger.queries import Queries
from holdfast.ledger.recovery import SqlRecovery
from holdfast.ledger.retention import Marks
from holdfast.ledger.sqlite import diagnosis, retention
from holdfast.ledger.sqlite.effects import SqliteEffects
from holdfast.ledger.sqlite.outbox import SqliteOutbox
from holdfast.ledger.sqlite.people import SqlitePeople
from holdfast.ledger.sqlite.projection import SqliteProjection
from holdfast.ledger.sqlite.store import SqliteStore
from holdfast.ledger.sqlite.telling import SqliteMarks
from holdfast.ledger.sqlite.triggers import SqliteTriggers
from holdfast.ledger.telling import Telling
from holdfast.ledger.trigger_book import TriggerBook


class SqliteLedger:
    """A ledger in a SQLite file of its own."""

    def __init__(self, store: SqliteStore, clock: Clock, publishing: Publishing | None = None) -> None:
        self.store = store
        self._clock = clock
        self._publishing = publishing
        self.projection: Projection = SqliteProjection(store, clock, publishing)
        self.effects: Effects = SqliteEffects(store, clock)
        self.people: People = SqlitePeople(store, clock)
        self.telling = Telling(store.readers, SqliteMarks(store, clock))
        self.triggers: TriggerBook = SqliteTriggers(store, clock)
        self.outbox: OutboxStore = SqliteOutbox(store, clock)
        self.recovery: Recovery = SqlRecovery(store.readers)
        self.queries = Queries(store.readers)

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.projection.close()
        await self.outbox.close()
        await self.store.close()

    def sibling(self) -> SqliteLedger:
        return SqliteLedger(self.store.sibling(), self._clock, self._publishing)

    async def prune(self, keep_ms: int, limit: int, marks: Marks | None = None) -> int:
        return await self.store.write(retention.prune, self._clock.now_ms(), keep_ms, limit, marks)

    async def diagnose(self) -> list[Finding]:
        return await diagnosis.examine(self.store, self.outbox)
