"""The ledger in its own SQLite file: its roles, owner check and `doctor` findings.

`owner_check` refuses a file of another namespace; the tables are checked where the file is opened.
`ledger.sqlite.embedded` has the ledger in the engine's file.
"""

from __future__ import annotations

from sqlalchemy import func, select

from holdfast.clock import Clock
from holdfast.core.publishing import EventPublishing
from holdfast.engine.port.reads import Finding
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger.checks import READ_OWNER, check_owner, engine_changed, outbox_findings
from holdfast.ledger.port.effects import EffectStore
from holdfast.ledger.port.ledger import Projection, PruneCursors, Recovery
from holdfast.ledger.port.messages import OutboxStore, TriggerStore
from holdfast.ledger.port.operators import OperatorStore
from holdfast.ledger.queries.jobs import Queries
from holdfast.ledger.queries.operators import PendingNotifications
from holdfast.ledger.queries.reconciliation import SqlRecovery
from holdfast.ledger.sqlite import retention
from holdfast.ledger.sqlite.effects import SqliteEffectStore
from holdfast.ledger.sqlite.outbox import SqliteOutboxStore
from holdfast.ledger.sqlite.projection import SqliteProjection
from holdfast.ledger.sqlite.store import Guard, SqliteLedgerStore
from holdfast.ledger.sqlite.transactions import SqliteNotificationMarks, SqliteOperatorStore, SqliteTriggerStore
from holdfast.schema import anomalies
from holdfast.schema.columns import HEAD
from holdfast.sqlite.connection import describe_shared_files
from holdfast.sqlite.transaction import Transaction

_CLAIM = "INSERT INTO ledger_owner (id, namespace, engine, since) VALUES (1, ?, ?, ?)"
_NOTE = "UPDATE ledger_owner SET engine = ?"


def owner_check(namespace: str, clock: Clock, engine: str = "") -> Guard:
    """Return a check that raises `InvalidOption` for another namespace's ledger.

    It logs a warning if the ledger was last used with another engine.
    """

    def check(transaction: Transaction, where: str) -> None:
        row = transaction.execute(READ_OWNER).fetchone()
        if row is None:
            transaction.execute(_CLAIM, (namespace, engine, clock.now_ms()))
            return
        check_owner(where, row[0], namespace)
        if engine_changed(where, row[1], engine):
            transaction.execute(_NOTE, (engine,))

    return check


async def examine(store: SqliteLedgerStore, outbox: OutboxStore) -> list[Finding]:
    """Check the ledger. An unusable file is a finding, not an error."""
    try:
        await store.open()
        async with store.read_engine.connect() as connection:
            odd = (await connection.execute(select(func.count()).select_from(anomalies))).scalar_one()
        backlog, now_ms = await outbox.backlog(), await outbox.now_ms()
    except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
        cause, _, advice = str(exc).rpartition("; ")
        return [Finding("ledger", False, cause or str(exc), advice)]
    findings = [Finding("ledger", True, f"{store.name}, schema {HEAD}")]
    if odd:
        found = f"{odd} events did not fit their job's history"
        findings.append(
            Finding("ledger anomalies", False, found, "`holdfast verify --ledger` lists them", warning=True)
        )
    return findings + outbox_findings(backlog, now_ms)


class SqliteLedger:
    """A ledger in its own SQLite file."""

    def __init__(self, store: SqliteLedgerStore, clock: Clock, publishing: EventPublishing | None = None) -> None:
        self.store = store
        self._clock = clock
        self._publishing = publishing
        self.projection: Projection = SqliteProjection(store, clock, publishing)
        self.effects: EffectStore = SqliteEffectStore(store, clock)
        self.operators: OperatorStore = SqliteOperatorStore(store, clock)
        self.notifications = PendingNotifications(store.read_engine, SqliteNotificationMarks(store, clock))
        self.triggers: TriggerStore = SqliteTriggerStore(store, clock)
        self.outbox: OutboxStore = SqliteOutboxStore(store, clock)
        self.recovery: Recovery = SqlRecovery(store.read_engine)
        self.queries = Queries(store.read_engine)

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.projection.close()
        await self.outbox.close()
        await self.store.close()

    def clone(self) -> SqliteLedger:
        return SqliteLedger(self.store.sibling(), self._clock, self._publishing)

    async def prune(self, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
        return await self.store.write(retention.prune, self._clock.now_ms(), keep_ms, limit, marks)

    async def diagnose(self) -> list[Finding]:
        findings = await examine(self.store, self.outbox)
        if problem := describe_shared_files(self.store.path):
            findings.append(Finding("permissions", False, *problem, warning=True))
        return findings
