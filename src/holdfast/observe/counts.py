"""Plain counters of one process, cheap enough for the hot path; whoever exports metrics reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened since the process began."""

    submitted: int = 0
    duplicates: int = 0
    intake_refused: int = 0
    claimed: int = 0
    adopted: int = 0
    malformed: int = 0
    reclaimed: int = 0
    poisoned: int = 0
    succeeded: int = 0
    retried: int = 0
    dead: int = 0
    suspended: int = 0
    held: int = 0
    released: int = 0
    promoted: int = 0
    #: Claims that met a job which was running or final already (requirement Y5).
    skipped: int = 0
    #: Settles refused because the lease was lost (requirement Q6).
    stale_settles: int = 0
    leases_lost: int = 0
    #: Moves refused by the state table (requirement S2).
    illegal_moves: int = 0
    reconnects: int = 0
    #: Effects that were reserved again while their first holder was still at them: they may have happened twice.
    effect_duplicates: int = 0
    #: Events that reached the ledger from the feed …
    projected: int = 0
    #: … how many of them did not fit its story, or could not be read, and how often the feed was another one.
    anomalies: int = 0
    forks: int = 0
    #: Batches that did not fit at first sight: they cost a look-up.
    looked_up: int = 0
    #: How old the oldest event is that is not in the ledger, or was when it got there in the last turn.
    feed_lag_ms: int = 0
