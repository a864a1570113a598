"""The ledger in the engine's file (embedded): its roles and `doctor` findings.

The engine's transaction writes jobs, events and dead letters; the other tables are in the same file, behind the same
writer. Roles are loaded on first use, because most programs on SQLite only submit and work, and need no SQLAlchemy.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from holdfast.clock import Clock
from holdfast.engine.port.reads import Finding
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.sqlite.connection import DatabaseFile

if TYPE_CHECKING:
    from holdfast.ledger.port.effects import EffectStore
    from holdfast.ledger.port.ledger import Projection, PruneCursors, Recovery
    from holdfast.ledger.port.messages import OutboxStore, TriggerStore
    from holdfast.ledger.port.operators import OperatorStore
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operators import PendingNotifications
    from holdfast.ledger.sqlite.store import SqliteLedgerStore


class EmbeddedLedger:
    """A ledger in the file of an engine, which creates and upgrades its tables."""

    #: Nothing to project: engine and ledger are one file, one transaction.
    projection: Projection | None = None

    def __init__(self, file: DatabaseFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock

    @cached_property
    def store(self) -> SqliteLedgerStore:
        from holdfast.engine.sqlite.schema import prepare_schema
        from holdfast.ledger.sqlite.store import SqliteLedgerStore

        return SqliteLedgerStore(self._file, prepare_schema)

    @cached_property
    def effects(self) -> EffectStore:
        from holdfast.ledger.sqlite.effects import SqliteEffectStore

        return SqliteEffectStore(self.store, self._clock)

    @cached_property
    def operators(self) -> OperatorStore:
        from holdfast.ledger.sqlite.transactions import SqliteOperatorStore

        return SqliteOperatorStore(self.store, self._clock)

    @cached_property
    def recovery(self) -> Recovery:
        from holdfast.ledger.queries.reconciliation import SqlRecovery

        return SqlRecovery(self.store.read_engine)

    @cached_property
    def queries(self) -> Queries:
        from holdfast.ledger.queries.jobs import Queries

        return Queries(self.store.read_engine)

    @cached_property
    def notifications(self) -> PendingNotifications:
        from holdfast.ledger.queries.operators import PendingNotifications
        from holdfast.ledger.sqlite.transactions import SqliteNotificationMarks

        return PendingNotifications(self.store.read_engine, SqliteNotificationMarks(self.store, self._clock))

    @cached_property
    def triggers(self) -> TriggerStore:
        from holdfast.ledger.sqlite.transactions import SqliteTriggerStore

        return SqliteTriggerStore(self.store, self._clock)

    @cached_property
    def outbox(self) -> OutboxStore:
        from holdfast.ledger.sqlite.outbox import SqliteOutboxStore

        return SqliteOutboxStore(self.store, self._clock)

    async def open(self) -> None:
        """Nothing to do: the engine opens the file, or the first write does."""

    async def close(self) -> None:
        """Close connections. Safe to call twice."""
        if "outbox" in self.__dict__:
            await self.outbox.close()
        if "store" in self.__dict__:
            await self.store.close()

    def clone(self) -> EmbeddedLedger:
        """Return a ledger on the same file, for another event loop."""
        return EmbeddedLedger(self._file, self._clock)

    async def prune(self, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
        """Nothing to do: the engine prunes its file, by the same setting."""
        return 0

    async def diagnose(self) -> list[Finding]:
        """Findings about the outbox; the engine reports faults of the file."""
        from holdfast.ledger.checks import outbox_findings

        fine = Finding("ledger", True, f"embedded in {self._file.path}: every move is in the engine's own commit")
        try:
            backlog, now_ms = await self.outbox.backlog(), await self.outbox.now_ms()
        except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
            cause, _, advice = str(exc).rpartition("; ")
            return [Finding("ledger", False, cause or str(exc), advice)]
        return [fine, *outbox_findings(backlog, now_ms)]
