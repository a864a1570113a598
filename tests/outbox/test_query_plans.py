"""PostgreSQL reads few rows to find due events, however many wait behind one that is retried."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, Final

import msgspec
import pytest

from holdfast.core.publishing import lane_of
from holdfast.ledger.postgres import outbox as sql
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.transactions.outbox import BATCH_BYTES, STEPS, WINDOW, window_for

pytestmark = pytest.mark.postgres

BEHIND: Final = 100_000
LANE: Final = lane_of("kafka", "orders", "stuck", "")
#: Another key of the same lane.
NEIGHBOUR: Final = next(
    key for key in (f"k{number}" for number in range(10_000)) if lane_of("kafka", "orders", key, "") == LANE
)
_COLUMNS: Final = "tenant_id, id, destination, topic, key, lane, payload, status, next_retry_at, created_at"
_FILL: Final = f"""
INSERT INTO outbox_events ({_COLUMNS})
VALUES ('default', 'head', 'kafka', 'orders', 'stuck', {LANE}, '{{}}', 'RETRYING', now() + interval '1 hour', now());
INSERT INTO outbox_events ({_COLUMNS})
SELECT 'default', 'b' || n, 'kafka', 'orders', 'stuck', {LANE}, '{{}}', 'NEW', NULL, now()
  FROM generate_series(1, {BEHIND}) n;
INSERT INTO outbox_events ({_COLUMNS})
SELECT 'default', 'n' || n, 'kafka', 'orders', '{NEIGHBOUR}', {LANE}, '{{}}', 'NEW', NULL, now()
  FROM generate_series(1, 20) n;
"""


@pytest.fixture(params=["never", "before", "since"])
async def ledger(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[PostgresLedger]:
    """A table with a large backlog. Its statistics are missing, from when it was empty, or up to date.

    Up-to-date statistics show that all rows are in one lane, so that a scan of the whole lane looks cheap.
    """
    ledger = PostgresLedger(PostgresStore(postgres_url))
    # Autovacuum could collect statistics before the rows are committed and record an empty table.
    await ledger.store.execute("ALTER TABLE outbox_events SET (autovacuum_enabled = off)")
    if request.param == "before":
        await ledger.store.execute("ANALYZE outbox_events")
    await ledger.store.execute(_FILL)
    if request.param == "since":
        await ledger.store.execute("ANALYZE outbox_events")
    yield ledger
    await ledger.store.execute("ALTER TABLE outbox_events RESET (autovacuum_enabled)")
    await ledger.close()


async def rows_read(ledger: PostgresLedger, statement: str, *arguments: Any) -> int:
    """Return the largest number of rows that one node of the plan processed."""
    (row,) = await ledger.store.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *arguments)
    (plan,) = msgspec.json.decode(row[0])
    return max(_rows(plan["Plan"]))


def _rows(node: dict[str, Any]) -> Iterator[int]:
    filtered = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    yield (node["Actual Rows"] + filtered) * node["Actual Loops"]
    for child in node.get("Plans", ()):
        yield from _rows(child)


async def test_due_events_behind_a_blocked_key_are_found_with_few_reads(ledger: PostgresLedger) -> None:
    outbox = ledger.outbox
    assert await outbox.acquire_lanes("me", ["kafka"], 64, 60_000) == [LANE]
    events = await outbox.due_events("me", [LANE], ["kafka"], 100, dead_blocks=True)
    assert [event.id for event in events] == [f"n{number}" for number in range(1, 21)]
    few = 2_000
    lease = timedelta(seconds=60)
    window = window_for(100, 1)
    begin = ([LANE], [""], [""], [""])
    read = {
        "take": await rows_read(ledger, sql.LEASE_LANES, "me", ["kafka"], lease, True, WINDOW, 64, []),
        "due": await rows_read(ledger, sql.DUE, "me", [LANE], ["kafka"], 100, True, window, BATCH_BYTES),
        "walk": await rows_read(ledger, sql.WALK, *begin, STEPS, ["kafka"], True, 100, 100, BATCH_BYTES),
        "walk lanes": await rows_read(ledger, sql.WALK_LANES, *begin, STEPS, ["kafka"], True, 1, STEPS),
    }
    assert max(read.values()) < few, read


async def test_a_blocked_key_continues_once_its_head_is_sent(ledger: PostgresLedger) -> None:
    await ledger.store.execute("UPDATE outbox_events SET next_retry_at = now() WHERE id = 'head'")
    outbox = ledger.outbox
    lanes = await outbox.acquire_lanes("me", ["kafka"], 64, 60_000)
    first = await outbox.due_events("me", lanes, ["kafka"], 10, dead_blocks=True)
    assert first[0].id == "head"
    await ledger.store.execute(
        "UPDATE outbox_events SET status = 'SENT', sent_at = now(), next_retry_at = NULL WHERE id = 'head'"
    )
    second = await outbox.due_events("me", lanes, ["kafka"], 10, dead_blocks=True)
    assert [event.id for event in second] == [f"b{number}" for number in range(1, 11)]
