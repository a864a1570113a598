"""Counters of one process, cheap enough for the hot path; `observe.prometheus` reads them on a scrape.

`count_settlements` adds settled attempts to them, in the same way for every engine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, Settlement, SettleResult, Succeed, Suspend

#: Upper bounds of the histogram of run times, in seconds; a last bucket takes what is longer.
BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """How long runs of one result took: a number for each bucket, and their sum."""

    __slots__ = ("buckets", "total_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add_one(self, seconds: float) -> None:
        """This run alone."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, seconds: Sequence[float]) -> None:
        """These runs. A value on a bound belongs below it, as Prometheus has it."""
        # Once for a batch: fifteen looks into a sorted list cost less than one for each of hundreds of runs.
        ordered, below = sorted(seconds), 0
        for bucket, bound in enumerate(BOUNDS_S):
            upto = bisect_right(ordered, bound, below)
            self.buckets[bucket] += upto - below
            below = upto
            if below == len(ordered):
                break
        self.buckets[-1] += len(ordered) - below
        self.total_s += sum(ordered)


class TriggerStats(Protocol):
    """What is told of a trigger's messages (`triggers.counts`)."""

    @property
    def queue(self) -> str: ...
    @property
    def consumed(self) -> Mapping[Any, int]:
        """By status, `ledger.trigger_book.Status`."""
        ...

    @property
    def durations(self) -> Histogram: ...
    @property
    def delays(self) -> Histogram: ...
    @property
    def calls(self) -> int: ...
    @property
    def dedup_hits(self) -> int: ...
    @property
    def active_workers(self) -> int: ...
    @property
    def lag(self) -> int | None:
        """None: the broker does not say."""
        ...


@dataclass(slots=True)
class OutboxStats:
    """What became of events that a relay of this process tried to publish, and how long that took."""

    success: Histogram = field(default_factory=Histogram)
    failure: Histogram = field(default_factory=Histogram)
    dead: Histogram = field(default_factory=Histogram)
    #: From when they were written to when they were sent.
    delay: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Counters:
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
    #: Messages that met a job which waits for its time: they do not run it before that (requirement Y5).
    not_due: int = 0
    #: Dead letters that an operator made.
    moved_to_dlq: int = 0
    #: Looks for lost leases that failed.
    reclaim_errors: int = 0
    #: Settles refused because the lease was lost (requirement Q6).
    stale_settles: int = 0
    leases_lost: int = 0
    #: Long runs that told that they are alive (requirement Q4).
    heartbeats: int = 0
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
    slow_batches: int = 0
    #: How old the oldest event is that is not in the ledger, or was when it got there in the last turn.
    feed_lag_ms: int = 0
    #: Deliveries of webhooks that were answered well, and tries that were not.
    webhooks_delivered: int = 0
    webhooks_failed: int = 0
    #: Of the relay, if one runs here.
    outbox: OutboxStats | None = None
    #: Alerts that this process knows to stand, by key.
    alerts: set[str] = field(default_factory=set)
    #: How long runs took whose verdict the engine has applied.
    run_succeeded: Histogram = field(default_factory=Histogram)
    run_retried: Histogram = field(default_factory=Histogram)
    run_dead: Histogram = field(default_factory=Histogram)
    #: Triggers of this process by name.
    triggers: dict[str, TriggerStats] = field(default_factory=dict)


_FIELDS: Final[dict[type, str]] = {
    Succeed: "succeeded",
    RetryLater: "retried",
    DeadLetter: "dead",
    Suspend: "suspended",
    Hold: "held",
    Release: "released",
}


def count_settlements(counts: Counters, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
    """Applied ones by their verdict; stale ones apart; second copies were counted the first time."""
    applied = Counter(
        type(settlement.verdict)
        for settlement, answer in zip(settlements, answers, strict=True)
        if answer is SettleResult.APPLIED
    )
    for verdict, number in applied.items():
        name = _FIELDS[verdict]
        setattr(counts, name, getattr(counts, name) + number)
    counts.stale_settles += answers.count(SettleResult.STALE)
