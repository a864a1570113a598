"""What `doctor` says about a ledger's own SQLite file."""

from __future__ import annotations

from sqlalchemy import func, select

from holdfast.engine.port import Finding
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch
from holdfast.ledger.diagnosis import of_outbox
from holdfast.ledger.outbox_store import OutboxStore
from holdfast.ledger.schema import anomalies
from holdfast.ledger.sqlite.store import SqliteStore
from holdfast.ledger.version import HEAD


async def examine(store: SqliteStore, outbox: OutboxStore) -> list[Finding]:
    """Never raises for a file that cannot be used: that is the finding."""
    try:
        await store.open()
        async with store.readers.connect() as connection:
            odd = (await connection.execute(select(func.count()).select_from(anomalies))).scalar_one()
        backlog, now_ms = await outbox.backlog(), await outbox.now_ms()
    except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
        said, _, advice = str(exc).rpartition("; ")
        return [Finding("ledger", False, said or str(exc), advice)]
    findings = [Finding("ledger", True, f"{store.name}, schema {HEAD}")]
    if odd:
        found = f"{odd} events did not fit their job's story"
        findings.append(
            Finding("ledger anomalies", False, found, "`holdfast verify --ledger` lists them", warning=True)
        )
    return findings + of_outbox(backlog, now_ms)
