"""The ledger on PostgreSQL: its roles, its owner check and its `doctor` findings.

`owner_check` runs before a database is used: the schema version must be the one this release needs, and the ledger must
not belong to another namespace. `diagnose` reports an unreachable or unusable ledger as a finding and does not raise.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import asyncpg

from holdfast.core.publishing import EventPublishing
from holdfast.engine.port.reads import Finding
from holdfast.errors import HoldfastError, InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger.checks import READ_OWNER, check_owner, engine_changed, outbox_findings
from holdfast.ledger.port.effects import EffectStore
from holdfast.ledger.port.ledger import Projection, PruneCursors, Recovery
from holdfast.ledger.port.messages import OutboxStore, TriggerStore
from holdfast.ledger.port.operators import OperatorStore
from holdfast.ledger.postgres import retention
from holdfast.ledger.postgres.effects import PostgresEffectStore
from holdfast.ledger.postgres.outbox import PostgresOutboxStore
from holdfast.ledger.postgres.projection import PostgresProjection
from holdfast.ledger.postgres.store import PostgresStore, StoreCheck
from holdfast.ledger.postgres.transactions import PostgresNotificationMarks, PostgresOperatorStore, PostgresTriggerStore
from holdfast.ledger.queries.jobs import Queries
from holdfast.ledger.queries.operators import PendingNotifications
from holdfast.ledger.queries.reconciliation import SqlRecovery
from holdfast.schema.columns import HEAD, READ_VERSION, check_version

_CLAIM = "INSERT INTO ledger_owner (id, namespace, engine, since) VALUES (1, $1, $2, now()) ON CONFLICT DO NOTHING"
_NOTE = "UPDATE ledger_owner SET engine = $1"


def owner_check(namespace: str, engine: str = "") -> StoreCheck:
    """Return a check that raises `SchemaMismatch` or `InvalidOption`.

    It logs a warning if the ledger was last used with another engine.
    """

    async def check(connection: asyncpg.Connection, where: str) -> None:
        try:
            version = await connection.fetchval(READ_VERSION)
        except asyncpg.UndefinedTableError:
            version = None
        check_version(where, version)
        owner = await connection.fetchrow(READ_OWNER)
        if owner is None:
            await connection.execute(_CLAIM, namespace, engine)
            owner = await connection.fetchrow(READ_OWNER)
            assert owner is not None
        check_owner(where, owner["namespace"], namespace)
        if engine_changed(where, owner["engine"], engine):
            # A process that only reads may use a standby.
            with suppress(asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientPrivilegeError):
                await connection.execute(_NOTE, engine)

    return check


_STATE: Final = """
SELECT current_setting('server_version') AS version,
       current_setting('transaction_read_only') = 'on' OR pg_is_in_recovery() AS read_only,
       current_setting('fsync') = 'on' AS fsync,
       current_setting('synchronous_commit') AS commits,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int AS most,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS used
"""
_OLDEST: Final = """
SELECT (SELECT count(*) FROM anomalies WHERE at > now() - interval '1 day') AS odd,
       (SELECT count(*) FROM dlq_items WHERE acked_at IS NULL) AS unacked
"""


async def diagnose(store: PostgresStore, outbox: OutboxStore) -> list[Finding]:
    """Check the ledger. An unreachable or unusable ledger is a finding, not an error."""
    try:
        (state,) = await store.fetch(_STATE)
        (work,) = await store.fetch(_OLDEST)
        backlog, now_ms = await outbox.backlog(), await outbox.now_ms()
    except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
        return [_unusable(exc)]
    findings = [Finding("ledger", True, f"{store.name}, PostgreSQL {state['version']}, schema {HEAD}")]
    if state["read_only"]:
        advice = "point HOLDFAST_LEDGER at the primary, or end its read-only mode"
        findings.append(Finding("ledger writes", False, "the ledger is read-only", advice))
    if not state["fsync"] or state["commits"] == "off":
        advice = "set fsync = on and synchronous_commit = on in PostgreSQL"
        found = (
            f"fsync is {'on' if state['fsync'] else 'off'}, synchronous_commit {state['commits']}: a crash loses data"
        )
        findings.append(Finding("ledger durability", False, found, advice))
    left = state["most"] - state["used"]
    few = left < store.options.pool_size
    findings.append(
        Finding(
            "ledger connections",
            not few,
            f"{left} of {state['most']} connections are left",
            "raise max_connections, or lower HOLDFAST_LEDGER_POOL_SIZE" if few else "",
            warning=few,
        )
    )
    if work["odd"]:
        found = f"{work['odd']} events of the last day did not fit their job's history"
        findings.append(
            Finding("ledger anomalies", False, found, "`holdfast verify --ledger` lists them", warning=True)
        )
    return findings + outbox_findings(backlog, now_ms)


def _unusable(error: HoldfastError) -> Finding:
    cause, _, advice = str(error).rpartition("; ")
    return Finding("ledger", False, cause or str(error), advice)


class PostgresLedger:
    """A ledger in a PostgreSQL database."""

    def __init__(self, store: PostgresStore, publishing: EventPublishing | None = None) -> None:
        self.store = store
        self._publishing = publishing
        self.projection: Projection = PostgresProjection(store, publishing)
        self.effects: EffectStore = PostgresEffectStore(store)
        self.operators: OperatorStore = PostgresOperatorStore(store)
        self.notifications = PendingNotifications(store.read_engine, PostgresNotificationMarks(store))
        self.triggers: TriggerStore = PostgresTriggerStore(store)
        self.outbox: OutboxStore = PostgresOutboxStore(store)
        self.recovery: Recovery = SqlRecovery(store.read_engine)
        self.queries = Queries(store.read_engine)

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.projection.close()
        await self.outbox.close()
        await self.store.close()

    def clone(self) -> PostgresLedger:
        return PostgresLedger(self.store.clone(), self._publishing)

    async def prune(self, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
        return await retention.prune(self.store, keep_ms, limit, marks)

    async def diagnose(self) -> list[Finding]:
        return await diagnose(self.store, self.outbox)
