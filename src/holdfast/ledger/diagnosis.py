"""What `doctor` says of any ledger, whatever its store."""

from __future__ import annotations

from holdfast.engine.port import Finding
from holdfast.ledger.outbox_store import Backlog

#: Events that wait for longer make one wonder whether a relay runs.
_LONG_MS = 10 * 60_000


def of_outbox(backlog: Backlog, now_ms: int) -> list[Finding]:
    """What waits in the outbox, if anything does."""
    findings = []
    if backlog.waiting:
        age_ms = max(0, now_ms - (backlog.oldest_ms or now_ms))
        late = age_ms > _LONG_MS
        found = f"{backlog.waiting} events wait to be published, the oldest for {_age(age_ms)}"
        advice = "see that `holdfast outbox relay` runs and knows their destinations, and that their broker is up"
        findings.append(Finding("outbox", not late, found, advice if late else "", warning=late))
    if backlog.dead:
        advice = "`holdfast outbox list --status DEAD` says why; `holdfast outbox retry` tries them again"
        found = f"{backlog.dead} events could not be published and are dead"
        findings.append(Finding("outbox dead", False, found, advice, warning=True))
    return findings


def _age(ms: int) -> str:
    minutes = ms // 60_000
    if minutes < 1:
        return f"{ms // 1000} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
