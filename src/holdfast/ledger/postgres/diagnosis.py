"""What `doctor` says about a PostgreSQL ledger."""

from __future__ import annotations

from typing import Final

from holdfast.engine.port import Finding
from holdfast.errors import HoldfastError, InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger.diagnosis import of_outbox
from holdfast.ledger.outbox_store import OutboxStore
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.version import HEAD

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


async def examine(store: PostgresStore, outbox: OutboxStore) -> list[Finding]:
    """Never raises for a ledger that is down or wrong: that is the finding."""
    try:
        (state,) = await store.fetch(_STATE)
        (work,) = await store.fetch(_OLDEST)
        backlog, now_ms = await outbox.backlog(), await outbox.now_ms()
    except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
        return [_unusable(exc)]
    findings = [Finding("ledger", True, f"{store.name}, PostgreSQL {state['version']}, schema {HEAD}")]
    if state["read_only"]:
        advice = "point HOLDFAST_LEDGER at the primary, or end the read-only mode"
        findings.append(Finding("ledger writes", False, "the ledger is read-only", advice))
    if not state["fsync"] or state["commits"] == "off":
        advice = "set fsync = on and synchronous_commit = on in PostgreSQL"
        found = f"fsync is {'on' if state['fsync'] else 'off'}, synchronous_commit {state['commits']}: a crash forgets"
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
        found = f"{work['odd']} events of the last day did not fit their job's story"
        findings.append(
            Finding("ledger anomalies", False, found, "`holdfast verify --ledger` lists them", warning=True)
        )
    return findings + of_outbox(backlog, now_ms)


def _unusable(error: HoldfastError) -> Finding:
    said, _, advice = str(error).rpartition("; ")
    return Finding("ledger", False, said or str(error), advice)
