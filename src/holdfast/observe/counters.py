"""Counters of one process, cheap enough for the hot path. A scrape reads them (`observe.prometheus`).

`count_settlements` adds settled attempts to them, in the same way for every engine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, Settlement, SettleResult, Succeed, Suspend

#: Upper bounds of the histogram buckets, in seconds; one more bucket has no bound.
BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Durations of runs with one result: counts per bucket, and their sum."""

    __slots__ = ("buckets", "total_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add_one(self, seconds: float) -> None:
        """Add one duration."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, seconds: Sequence[float]) -> None:
        """Add durations. A value equal to a bound counts below it, as in Prometheus."""
        # One search per bucket in the sorted batch costs less than one search per duration.
        ordered, below = sorted(seconds), 0
        for bucket, bound in enumerate(BOUNDS_S):
            upto = bisect_right(ordered, bound, below)
            self.buckets[bucket] += upto - below
            below = upto
            if below == len(ordered):
                break
        self.buckets[-1] += len(ordered) - below
        self.total_s += sum(ordered)


#: Tenants whose failures are counted separately. It limits memory, and the size of a scrape.
MAX_TENANTS: Final = 50
#: Stands for the rest. Not the name of a tenant, which has no spaces.
OTHER_TENANTS: Final = "all others"


class TenantFailures:
    """Failed runs by tenant and result, for the tenants that failed last; the rest is one count.

    A tenant that fails often stays among them, however many others fail now and then. One that comes back starts at 0,
    which Prometheus takes for a restart. The count of the rest never falls.
    """

    __slots__ = ("by_tenant", "others")

    def __init__(self) -> None:
        #: Tenant → result → number; the tenant whose last failure is the oldest comes first.
        self.by_tenant: dict[str, Counter[str]] = {}
        self.others: Counter[str] = Counter()

    def add(self, tenant: str, result: str) -> None:
        """Count a failed run."""
        results = self.by_tenant.pop(tenant, None)
        if results is None:
            results = Counter()
            if len(self.by_tenant) >= MAX_TENANTS:
                self.others += self.by_tenant.pop(next(iter(self.by_tenant)))
        results[result] += 1
        self.by_tenant[tenant] = results


class TriggerStats(Protocol):
    """Counters of a trigger's messages (see `triggers.state`)."""

    @property
    def queue(self) -> str: ...
    @property
    def consumed(self) -> Mapping[Any, int]:
        """By `ExecutionStatus`."""
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
        """None if the broker does not report it."""
        ...


@dataclass(slots=True)
class OutboxStats:
    """Publish attempts of this process's relay by result, with their durations."""

    success: Histogram = field(default_factory=Histogram)
    failure: Histogram = field(default_factory=Histogram)
    dead: Histogram = field(default_factory=Histogram)
    #: Time from write to publish.
    delay: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process."""

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
    #: Claims of a job that was already running or final (requirement Y5).
    skipped: int = 0
    #: Messages for a job that is not due yet; they do not run it early (requirement Y5).
    not_due: int = 0
    #: Notices of another program that could not be read.
    unreadable: int = 0
    #: Values in the engine's store that another program has changed, and that cannot be read.
    unreadable_values: int = 0
    #: Jobs that an operator dead-lettered.
    moved_to_dlq: int = 0
    #: Failed attempts to reclaim expired leases.
    reclaim_errors: int = 0
    #: Settles refused because the lease was lost (requirement Q6).
    stale_settles: int = 0
    leases_lost: int = 0
    #: Heartbeat events of long runs (requirement Q4).
    heartbeats: int = 0
    #: Moves refused by the state table (requirement S2).
    illegal_moves: int = 0
    reconnects: int = 0
    #: Effects reserved again while the first holder was still running them; they may have happened twice.
    effect_duplicates: int = 0
    #: Events written from the feed to the ledger …
    projected: int = 0
    #: … those that could not be recorded as they came or could not be read, and the number of feed forks.
    anomalies: int = 0
    forks: int = 0
    #: Jobs of an engine that went back in time which got the ledger's state.
    corrected: int = 0
    #: Batches that could not be written directly and needed a query.
    slow_batches: int = 0
    #: Age of the oldest event not yet in the ledger, or its age when it was written in the last pass.
    feed_lag_ms: int = 0
    #: Successful webhook deliveries, and failed attempts.
    webhooks_delivered: int = 0
    webhooks_failed: int = 0
    #: Counters of the relay; None if this process runs none.
    outbox: OutboxStats | None = None
    #: Active alerts known to this process, by key.
    alerts: set[str] = field(default_factory=set)
    #: Durations of runs whose verdict the engine has applied.
    run_succeeded: Histogram = field(default_factory=Histogram)
    run_retried: Histogram = field(default_factory=Histogram)
    run_dead: Histogram = field(default_factory=Histogram)
    #: Runs that ended in a retry, a suspension or a dead letter.
    tenant_failures: TenantFailures = field(default_factory=TenantFailures)
    #: Counters of the triggers of this process, by name.
    triggers: dict[str, TriggerStats] = field(default_factory=dict)


_FIELDS: Final[dict[type, str]] = {
    Succeed: "succeeded",
    RetryLater: "retried",
    DeadLetter: "dead",
    Suspend: "suspended",
    Hold: "held",
    Release: "released",
}


#: Verdicts that are failures, as metrics name them.
_FAILURES: Final[dict[type, str]] = {RetryLater: "retry", DeadLetter: "dead", Suspend: "suspended"}


def count_settlements(counts: Counters, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
    """Count applied settlements by verdict, and stale ones separately.

    Repeated ones are not counted again.
    """
    applied = Counter(
        type(settlement.verdict)
        for settlement, answer in zip(settlements, answers, strict=True)
        if answer is SettleResult.APPLIED
    )
    for verdict, number in applied.items():
        name = _FIELDS[verdict]
        setattr(counts, name, getattr(counts, name) + number)
    # Successes cost nothing: batches without failures are not read again.
    if not applied.keys().isdisjoint(_FAILURES):
        _count_failures(counts.tenant_failures, settlements, answers)
    counts.stale_settles += answers.count(SettleResult.STALE)


def _count_failures(
    failures: TenantFailures, settlements: Sequence[Settlement], answers: Sequence[SettleResult]
) -> None:
    for settlement, answer in zip(settlements, answers, strict=True):
        if answer is SettleResult.APPLIED and (result := _FAILURES.get(type(settlement.verdict))) is not None:
            failures.add(settlement.claim.tenant_id, result)
