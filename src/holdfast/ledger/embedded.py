"""The embedded ledger: the engine's own file. The engine's transaction writes jobs, events and dead letters; the other
tables are in the same file, behind the same writer.

Light to make: most programs on SQLite only submit and work, and never ask. SQLAlchemy is loaded by the first who does.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from holdfast.clock import Clock
from holdfast.engine.port import Finding
from holdfast.engine.sqlite.store import Place
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch

if TYPE_CHECKING:
    from holdfast.ledger.outbox_store import OutboxStore
    from holdfast.ledger.people import People
    from holdfast.ledger.port import Effects, Projection, Recovery
    from holdfast.ledger.queries import Queries
    from holdfast.ledger.retention import Marks
    from holdfast.ledger.sqlite.store import SqliteStore
    from holdfast.ledger.telling import Telling
    from holdfast.ledger.trigger_book import TriggerBook


class EmbeddedLedger:
    """On the file of an engine, which makes and keeps its tables."""

    #: Nothing to project: engine and ledger are one file, one transaction.
    projection: Projection | None = None

    def __init__(self, place: Place, clock: Clock) -> None:
        self._place = place
        self._clock = clock

    @cached_property
    def store(self) -> SqliteStore:
        from holdfast.engine.sqlite.connection import prepare_schema
        from holdfast.ledger.sqlite.store import SqliteStore

        return SqliteStore(self._place, prepare_schema)

    @cached_property
    def effects(self) -> Effects:
        from holdfast.ledger.sqlite.effects import SqliteEffects

        return SqliteEffects(self.store, self._clock)

    @cached_property
    def people(self) -> People:
        from holdfast.ledger.sqlite.people import SqlitePeople

        return SqlitePeople(self.store, self._clock)

    @cached_property
    def recovery(self) -> Recovery:
        from holdfast.ledger.recovery import SqlRecovery

        return SqlRecovery(self.store.readers)

    @cached_property
    def queries(self) -> Queries:
        from holdfast.ledger.queries import Queries

        return Queries(self.store.readers)

    @cached_property
    def telling(self) -> Telling:
        from holdfast.ledger.sqlite.telling import SqliteMarks
        from holdfast.ledger.telling import Telling

        return Telling(self.store.readers, SqliteMarks(self.store, self._clock))

    @cached_property
    def triggers(self) -> TriggerBook:
        from holdfast.ledger.sqlite.triggers import SqliteTriggers

        return SqliteTriggers(self.store, self._clock)

    @cached_property
    def outbox(self) -> OutboxStore:
        from holdfast.ledger.sqlite.outbox import SqliteOutbox

        return SqliteOutbox(self.store, self._clock)

    async def open(self) -> None:
        """The engine has opened the file, or the first write here does."""

    async def close(self) -> None:
        """Give connections back. Safe to call twice."""
        if "outbox" in self.__dict__:
            await self.outbox.close()
        if "store" in self.__dict__:
            await self.store.close()

    def sibling(self) -> EmbeddedLedger:
        """For another event loop."""
        return EmbeddedLedger(self._place, self._clock)

    async def prune(self, keep_ms: int, limit: int, marks: Marks | None = None) -> int:
        """Nothing: the engine prunes its file, by the same setting."""
        return 0

    async def diagnose(self) -> list[Finding]:
        """What is wrong with the file the engine says."""
        from holdfast.ledger.diagnosis import of_outbox

        fine = Finding("ledger", True, f"embedded in {self._place.path}: every move is in the engine's own commit")
        try:
            backlog, now_ms = await self.outbox.backlog(), await self.outbox.now_ms()
        except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
            said, _, advice = str(exc).rpartition("; ")
            return [Finding("ledger", False, said or str(exc), advice)]
        return [fine, *of_outbox(backlog, now_ms)]
