"""Findings of `doctor` about the outbox."""

from __future__ import annotations

import pytest

from holdfast.ledger.checks import outbox_findings
from holdfast.ledger.port.messages import OutboxBacklog
from tests.ledger.conftest import AnyLedger

NOW_MS = 1_800_000_000_000


def test_an_empty_outbox_has_no_finding() -> None:
    assert outbox_findings(OutboxBacklog(0, 0, None), NOW_MS) == []


@pytest.mark.parametrize(
    ("age_ms", "age", "ok"), [(5_000, "5 s", True), (660_000, "11 min", False), (10_800_000, "3 h", False)]
)
def test_events_that_wait_too_long_are_a_warning(age_ms: int, age: str, ok: bool) -> None:
    (found,) = outbox_findings(OutboxBacklog(7, 0, NOW_MS - age_ms), NOW_MS)
    assert found.message == f"7 events wait to be published, the oldest for {age}"
    assert (found.ok, found.warning, bool(found.remedy)) == (ok, not ok, not ok)


async def test_doctor_counts_waiting_and_dead_events(any_ledger: AnyLedger) -> None:
    assert not [finding for finding in await any_ledger.diagnose() if finding.check.startswith("outbox")]
    rows = "('default', 'n', 'd', 't', 0, '{}', 'NEW', %s), ('default', 'x', 'd', 't', 0, '{}', 'DEAD', %s)"
    insert = "INSERT INTO outbox_events (tenant_id, id, destination, topic, lane, payload, status, created_at) VALUES "
    if hasattr(any_ledger.store, "fetch"):
        old = "now() - interval '1 hour'"
        await any_ledger.store.fetch(insert + rows % (old, old))
    else:
        at = str(await any_ledger.outbox.now_ms() - 3_600_000)
        await any_ledger.store.write(lambda transaction: transaction.execute(insert + rows % (at, at)).rowcount)
    waiting, dead = [finding for finding in await any_ledger.diagnose() if finding.check.startswith("outbox")]
    assert waiting.message == "1 events wait to be published, the oldest for 60 min"
    assert "relay" in waiting.remedy
    assert dead.message == "1 events could not be published and are dead"
    assert dead.warning
